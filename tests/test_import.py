"""Importing chooses the JAX backend, and refuses what cannot work."""

import os
import subprocess
import sys

import pytest

from keras_distribute import errors
from keras_distribute._compat import seams, versions


def run(script: str, **environment: str | None) -> subprocess.CompletedProcess[str]:
    env = {
        k: v
        for k, v in os.environ.items()
        if k not in ("KERAS_BACKEND", "XLA_FLAGS", "NPROC")
    }
    env |= {k: v for k, v in environment.items() if v is not None}
    return subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=120,
        env=env,
    )


def test_chooses_jax_when_nothing_is_chosen():
    result = run("import keras_distribute, keras; print(keras.config.backend())")
    assert result.stdout.strip().endswith("jax"), result.stderr


def test_chooses_jax_where_the_variable_is_empty():
    script = "import keras_distribute, keras; print(keras.config.backend())"
    result = run(script, KERAS_BACKEND="")
    assert result.stdout.strip().endswith("jax"), result.stderr


def test_starts_no_jax_client():
    result = run(
        "import keras_distribute as kd, keras\n"
        "kd.has_strategy(), kd.get_strategy()\n"
        "kd.config.set_cpu_devices(3)\n"
        "print(kd.MirroredStrategy().num_replicas_in_sync)"
    )
    assert result.stdout.strip().endswith("3"), result.stderr


def test_refuses_another_backend_in_the_environment():
    result = run("import keras_distribute", KERAS_BACKEND="tensorflow")
    assert result.returncode != 0
    assert "keras_distribute needs Keras on JAX." in result.stderr
    assert 'Fix: set os.environ["KERAS_BACKEND"] = "jax"' in result.stderr


def test_refuses_a_keras_that_already_runs_on_another_backend():
    script = (
        "import os; os.environ['KERAS_BACKEND'] = 'numpy'\n"
        "import keras\nos.environ['KERAS_BACKEND'] = 'jax'\nimport keras_distribute"
    )
    result = run(script)
    assert result.returncode != 0
    assert "the 'numpy' backend of an already imported Keras." in result.stderr


@pytest.fixture
def installed(monkeypatch):
    """Sets what is installed."""

    def install(**packages: str) -> None:
        monkeypatch.setattr(versions, "_versions", lambda: packages)

    return install


@pytest.mark.parametrize(("package", "old"), [("keras", "3.14.2"), ("jax", "0.9.1")])
def test_refuses_old_versions(installed, package, old):
    installed(**({"keras": "3.15.1", "jax": "0.10.2"} | {package: old}))
    expected = rf"needs {package} .*\n  Received: {package} {old}"
    with pytest.raises(errors.BackendError, match=expected) as caught:
        versions.check_versions()
    assert f"Fix: pip install '{package}>=" in str(caught.value)
    assert isinstance(caught.value, ImportError)


@pytest.mark.parametrize(
    ("keras", "jax"),
    [
        ("3.15.0", "0.10.0"),
        ("3.15.9", "0.12.9"),  # A later patch of a release that was tested.
        ("3.15.0.dev2026010101", "0.12.0.1"),
        (versions.TESTED["keras"], versions.TESTED["jax"]),
    ],
)
def test_tested_versions_pass_without_a_word(installed, recwarn, keras, jax):
    installed(keras=keras, jax=jax)
    versions.check_versions()
    assert not recwarn.list


@pytest.mark.parametrize(
    ("keras", "jax", "named"),
    [
        ("4.0", "0.12.0", "keras 4.0"),
        ("3.16.0", "0.12.0", "keras 3.16.0"),  # Later than the nightly.
        ("3.16.0.dev2099010101", "0.10.2", "keras 3.16.0.dev2099010101"),
        ("3.15.1", "0.13.0", "jax 0.13.0"),
        ("4.0", "1.0", "keras 4.0 and jax 1.0"),
    ],
)
def test_versions_beyond_the_tested_ones_are_named_once(
    installed, recwarn, keras, jax, named
):
    installed(keras=keras, jax=jax)
    versions.check_versions()
    (warning,) = recwarn.list
    text = str(warning.message)
    assert text.startswith(f"keras_distribute was not tested with {named}; the newest")
    assert versions.TESTED["jax"] in text
    assert "pip install 'keras>=3.15,<3.16.0' 'jax>=0.10,<=0.12.0.1'" in text


def test_the_warning_comes_at_the_import_and_points_to_it():
    script = (
        "import warnings, keras; keras.__version__ = '9.0'\n"
        "with warnings.catch_warnings(record=True) as caught:\n"
        "    warnings.simplefilter('always')\n"
        "    import keras_distribute\n"
        "    import keras_distribute.experimental\n"
        "found = [w for w in caught if 'keras_distribute' in str(w.message)]\n"
        "print(len(found), found[0].filename, found[0].lineno)"
    )
    result = run(script, KERAS_BACKEND="jax")
    assert result.stdout.strip() == "1 <string> 4", result.stderr


MOVED = "keras_distribute builds on parts of Keras and JAX that have moved: "


@pytest.mark.parametrize(
    ("script", "named"),
    [
        (  # A function that is imported.
            "from keras.src.backend.common import stateless_scope as owner\ndel owner.get_stateless_scope",
            "cannot import name 'get_stateless_scope' from 'keras.src.backend.common.stateless_scope'",
        ),
        (  # A method that is called later.
            "del keras.Model.__mro__[2]._symbolic_build",
            "_symbolic_build",
        ),
        (  # JAX's.
            "from jax._src.lax import parallel; del parallel._psum",
            "module 'jax._src.lax.parallel' has no attribute '_psum'",
        ),
    ],
)
def test_a_seam_that_has_moved_is_named_with_what_to_install(script, named):
    script = f"import jax, keras\n{script}\nimport keras_distribute"
    result = run(script, KERAS_BACKEND="jax")
    assert result.returncode != 0
    last = result.stderr[result.stderr.rindex("BackendError: ") :]
    assert MOVED in last and named in last.splitlines()[0]
    assert f"  Received: {versions.installed()}; the newest that were tested" in last
    assert "  Fix: pip install 'keras>=3.15,<3.16.0' 'jax>=0.10,<=0.12.0.1'" in last


class Owner:
    def __init__(self):
        self._set, self.plain = 1, self._method(2)

    def _method(self, number):
        return number


def test_a_name_is_found_at_the_first_place_that_has_it():
    assert seams.find("no.such.module", "os:no_such_name", "os.path:join", "os")
    assert seams.find("os.path:join") is os.path.join
    assert seams.find("nowhere", "os.path") is os.path
    with pytest.raises(errors.BackendError, match="there is no nowhere and no os:gone"):
        seams.find("nowhere", "os:gone")


def test_names_that_are_used_later_are_looked_up():
    seams.check(Owner, "_method", "_set")
    seams.check(os, "path")
    with pytest.raises(errors.BackendError, match=r"Owner has no _gone\."):
        seams.check(Owner, "_set", "_gone")
    with pytest.raises(errors.BackendError, match=r"moved: os has no _gone\."):
        seams.check(os, "_gone")


def test_replacements_take_what_they_replace_and_are_undone():
    replacements = seams.Replacements()
    before, inherited = dict(vars(Owner)), type("Heir", (Owner,), {})
    replacements.replace(Owner, "_method", lambda self, number: -number)
    replacements.replace(inherited, "_method", lambda self, *args, **kwargs: 0)
    assert (Owner().plain, inherited().plain) == (-2, 0)
    with pytest.raises(errors.BackendError, match="Owner._method takes number"):
        replacements.replace(Owner, "_method", lambda self: 0)
    with pytest.raises(errors.BackendError, match="Owner has no _gone"):
        replacements.replace(Owner, "_gone", lambda self: 0)
    replacements.undo()
    assert dict(vars(Owner)) == before
    assert "_method" not in vars(inherited) and Owner().plain == 2


def test_errors_of_others_are_left_as_they_are():
    with pytest.raises(ImportError) as caught, seams.loaded():
        raise ImportError("no numbers today")
    assert not isinstance(caught.value, errors.BackendError)


def test_what_few_programs_use_is_imported_later():
    result = run(
        "import sys, keras_distribute as kd\n"
        "later = ('zmq', 'scheduling', 'servers', 'launch', 'testing', 'callbacks')\n"
        "own = ['keras_distribute.' + name for name in later[1:]]\n"
        "print([name for name in (later[0], *own) if name in sys.modules])\n"
        "import keras_distribute.dry_run.hlo\n"
        "print(kd.dry_run.__name__, kd.dry_run.__module__, kd.DryRunReport.__module__)\n"
        "from keras_distribute import *\n"
        "print(sorted(set(kd.__all__) - set(globals())), set(kd.__all__) <= {*dir(kd)})\n"
        "print(kd.experimental.ParameterServerStrategy is kd.ParameterServerStrategy)\n"
        "print(ParameterServerStrategy.__module__, callbacks.StepReplay.__module__)\n"
        "kd.nothing"
    )
    assert result.stdout.splitlines() == [
        "[]",
        "dry_run keras_distribute keras_distribute",
        "[] True",
        "True",
        "keras_distribute keras_distribute.callbacks",
    ]
    last = "AttributeError: module 'keras_distribute' has no attribute 'nothing'"
    assert result.stderr.strip().endswith(last)


def test_all_that_is_private_is_looked_up_at_the_import():
    result = run(
        "import pathlib, sys, keras_distribute._compat as compat\n"
        "names = {p.stem for p in pathlib.Path(compat.__file__).parent.glob('*.py')}\n"
        "names -= {n.rpartition('.')[2] for n in sys.modules if '._compat.' in n}\n"
        "print(names)"
    )
    assert result.stdout.strip() == "{'__init__'}", result.stderr
