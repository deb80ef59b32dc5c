"""What is compiled: once, with another option where the first fails, and no more often
than a search needs; and the line that says how long it takes.
"""

import io
import re
import time
import zlib

import jax
import keras
import pytest

import keras_distribute as kd
from keras_distribute.dry_run import answers, compiling, outcome, progress, targets
from keras_distribute.dry_run.progress import Progress
from tests.dry_run import models

FOLDER = answers.folder  # Before a fixture replaces it.
NO_TILES = "INTERNAL: Couldn't find output tile sizes that satisfy all constraints"


@pytest.fixture
def asked(monkeypatch):
    """The options of each program that a compiler is asked for."""
    options_of, original = [], compiling.compiled

    def compile(target, lowered, options=None):
        options_of.append(dict(options or {}))
        return original(target, lowered, options)

    monkeypatch.setattr(compiling, "compiled", compile)
    return options_of


def without_times(report):
    said = report.to_json()
    del said["compile_seconds"], said["was_compiled_before"]
    return said


def test_a_second_dry_run_compiles_nothing(asked):
    first = kd.dry_run(models.mlp, 16, topology="cpu:4")
    second = kd.dry_run(models.mlp, 16, topology="cpu:4")
    assert len(asked) == 1
    assert (first.was_compiled_before, second.was_compiled_before) == (False, True)
    assert without_times(first) == without_times(second)
    kd.dry_run(models.mlp, 32, topology="cpu:4")
    kd.dry_run(models.mlp, 16, topology="cpu:2")
    assert len(asked) == 3
    answers.forget()
    kd.dry_run(models.mlp, 16, topology="cpu:4")
    assert len(asked) == 4


def test_layers_of_other_names_are_another_program(asked):
    """A report shows the names, so it must not show those of another model."""

    def named(name):
        def build():
            dense = keras.layers.Dense(5, name=name)
            model = keras.Sequential([keras.Input((16,)), dense])
            model.compile("sgd", "mse")
            return model

        return build

    names = ("one", "two", "one")
    reports = [kd.dry_run(named(name), 16, topology="cpu:4") for name in names]
    # Not whether the text has them: JAX's own cache, which tests have, ignores names.
    assert [each.was_compiled_before for each in reports] == [False, False, True]
    assert len(asked) == 2


def test_the_names_that_a_dry_run_takes_are_given_back():
    def build():
        model = keras.Sequential([keras.Input((16,)), keras.layers.Dense(5)])
        model.compile("sgd", "mse")
        names.append(model.layers[0].name)
        return model

    names = []
    kd.dry_run(build, 16, topology="cpu:2")
    kd.dry_run(build, 16, topology="cpu:2")
    build()
    build()
    assert names[0] == names[1] == names[2] != names[3]


def test_answers_are_kept_in_the_folder_of_jaxs_cache(monkeypatch, tmp_path):
    monkeypatch.setattr(answers, "folder", FOLDER)
    target = targets.parse("v5e:1x1")
    lowered = jax.jit(lambda x: 2 * x).lower(1.0)
    said = compiling.compiled(targets.parse("cpu:1"), lowered)
    answer = outcome.said_of(said)
    key = answers.key_of(targets.parse("cpu:1"), lowered, {})
    before = jax.config.values["jax_compilation_cache_dir"]
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "programs"))
    try:
        answers.keep(target, key, answer)
        answers.forget()
        assert answers.kept(target, key) == answer
        (file,) = (tmp_path / "programs").iterdir()
        for broken in (b"", zlib.compress(b"{"), zlib.compress(b'{"text": 1}')):
            answers.forget()
            file.write_bytes(broken)
            assert answers.kept(target, key) is None
        file.unlink()
        file.mkdir()  # It cannot be written: nothing else is left of it.
        answers.keep(target, key, answer)
        assert list((tmp_path / "programs").iterdir()) == [file]
        # Programs for CPUs are in JAX's own cache.
        answers.keep(targets.parse("cpu:1"), "other", answer)
        assert len(list((tmp_path / "programs").iterdir())) == 1
        jax.config.update("jax_compilation_cache_dir", "gs://bucket/programs")
        answers.keep(target, "of a bucket", answer)
        assert answers.kept(target, "of a bucket") == answer
        answers.forget()
        assert answers.kept(target, "of a bucket") is None
    finally:
        jax.config.update("jax_compilation_cache_dir", before)


def test_the_key_has_what_decides_what_a_compiler_makes(monkeypatch):
    def key(topology="v5e:1x1", options=None, value=2.0):
        lowered = jax.jit(lambda x: value * x).lower(1.0)
        return answers.key_of(targets.parse(topology), lowered, options or {})

    monkeypatch.setattr(answers.targets, "PACKAGES", {"tpu": (), "cpu": ()})
    keys = [key(), key("v5e:2x2"), key("cpu:1"), key(options={"a": 1}), key(value=3.0)]
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--one=1")
    keys.append(key())
    assert len(set(keys)) == 6
    assert key() == keys[-1]


def test_only_so_many_answers_stay(monkeypatch):
    monkeypatch.setattr(answers, "_MOST_KEPT", 2)
    target = targets.parse("cpu:1")
    for name in ("a", "b"):
        answers.keep(target, name, "RESOURCE_EXHAUSTED")
    assert answers.kept(target, "a")  # Used last now.
    answers.keep(target, "c", "RESOURCE_EXHAUSTED")
    assert [bool(answers.kept(target, name)) for name in "abc"] == [True, False, True]


def test_a_step_without_tiles_is_compiled_without_them(monkeypatch):
    """The fault that XLA for GPUs has, here of another compiler."""
    asked, original = [], jax.stages.Lowered.compile

    def compile(self, compiler_options=None, **more):
        asked.append(compiler_options)
        if not compiler_options:
            raise jax.errors.JaxRuntimeError(NO_TILES)
        return original(self, **more)

    monkeypatch.setattr(jax.stages.Lowered, "compile", compile)
    options = {"xla_gpu_enable_triton_gemm": False}
    report = kd.dry_run(models.mlp, 16, topology="cpu:4")
    assert asked == [None, options]
    assert report.compiler_options == options and report.memory.parameters == 709 * 4
    assert (
        "compiled with xla_gpu_enable_triton_gemm=False, without which XLA fails here"
        in str(report)
    )
    # Neither is tried a second time, and the programs of a search do not fail first.
    report = kd.dry_run(
        models.mlp, 16, topology="cpu:4", memory_limit=60_000, largest_batch=True
    )
    assert report.was_compiled_before and asked.count(None) == 1
    assert len(asked) == 1 + report.largest_batch.compilations
    assert "compiled with" not in str(
        kd.dry_run(models.mlp, 16, topology="cpu:4").compiler_options
    )


def test_a_step_that_fails_with_the_option_too_is_an_error(monkeypatch):
    def fail(self, *args, **kwargs):
        raise jax.errors.JaxRuntimeError(NO_TILES)

    monkeypatch.setattr(jax.stages.Lowered, "compile", fail)
    with pytest.raises(jax.errors.JaxRuntimeError, match="output tile sizes"):
        kd.dry_run(models.mlp, 16, topology="cpu:4")


def test_a_search_compiles_what_it_needs_and_no_more(asked):
    options = {"topology": "cpu:4", "memory_limit": 60_000, "largest_batch": True}
    found = kd.dry_run(models.mlp, 16, **options)
    assert len(asked) == found.largest_batch.compilations <= 12
    again = kd.dry_run(models.mlp, 16, **options)
    assert len(asked) == found.largest_batch.compilations
    assert again.largest_batch == found.largest_batch
    # The first program of a search is that of the report, and is not made twice.
    kd.dry_run(models.mlp, 16, topology="cpu:4")
    assert len(asked) == found.largest_batch.compilations


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("stream", [io.StringIO, Terminal])
def test_what_takes_long_says_so(monkeypatch, stream):
    monkeypatch.setattr(progress, "_QUIET_SECONDS", 0.01)
    said = stream()
    with Progress("Compiling a step", stream=said):
        deadline = time.monotonic() + 30
        while not said.getvalue() and time.monotonic() < deadline:
            time.sleep(0.01)
    lines = re.split(r"[\n\r]", said.getvalue())
    assert re.fullmatch(r".*Compiling a step: took \d+ s", lines[-2]) and not lines[-1]
    assert re.fullmatch(r".*Compiling a step: \d+ s", lines[-3])
    assert ("\r" in said.getvalue()) is said.isatty()


def test_what_is_over_soon_says_nothing(capsys):
    with Progress("Compiling a step"):
        pass
    assert capsys.readouterr().err == ""


def test_a_failure_is_said(monkeypatch):
    monkeypatch.setattr(progress, "_QUIET_SECONDS", 0.0)
    said = io.StringIO()
    with pytest.raises(ValueError), Progress("Compiling a step", stream=said):
        while not said.getvalue():
            time.sleep(0.01)
        raise ValueError
    assert "Compiling a step: failed after 0 s\n" in said.getvalue()


@pytest.mark.parametrize("verbose", [0, 1, True, False])
def test_nothing_is_said_where_none_of_it_is_wanted(monkeypatch, capsys, verbose):
    monkeypatch.setattr(progress, "_QUIET_SECONDS", 0.0)
    kd.dry_run(models.mlp, 16, topology="cpu:4", verbose=verbose)
    said = capsys.readouterr().err
    assert ("Compiling the step of 16 rows for cpu:4" in said) is bool(verbose)
