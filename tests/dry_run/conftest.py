"""Programs compiled in a child and here; no test finds what another has compiled."""

import pytest

from keras_distribute._compat import topologies
from keras_distribute.dry_run import answers, compiling


@pytest.fixture(autouse=True)
def nothing_is_kept(monkeypatch):
    """Neither in this process nor in files, which stay from one test run to the next."""
    answers.forget()
    monkeypatch.setattr(answers, "folder", lambda: None)


@pytest.fixture
def compiled_twice(monkeypatch):
    """The programs of dry runs, compiled here, too: a child says the same of each."""
    made, in_a_child = [], compiling.compiled

    def compile(target, lowered, options=None):
        # First: then JAX has not compiled it yet.
        result = in_a_child(target, lowered, options)
        with topologies.assembler():
            made.append(lowered.compile(options or None))
        here, there = made[-1].memory_analysis(), result.memory_analysis()
        if target.platform == "tpu":
            assert result.as_text() == made[-1].as_text()
        assert all(getattr(here, name) == size for name, size in vars(there).items())
        assert len(vars(there)) == 6
        assert result.cost_analysis() == made[-1].cost_analysis()
        return result

    monkeypatch.setattr(compiling, "compiled", compile)
    return made
