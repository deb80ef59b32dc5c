"""`kd.dry_run` on CPU devices: the report, its forms, its errors and the command line."""

import importlib.util
import json
import pickle

import jax
import keras
import numpy as np
import pytest

import keras_distribute as kd
from keras_distribute._compat import compiling as seam
from keras_distribute.dry_run import answers, api, command, compiling, targets
from keras_distribute.errors import (
    BackendError,
    DeviceError,
    InputError,
    StructureTypeError,
    ValueStructureError,
)
from keras_distribute.training import adoption
from tests import logical
from tests.dry_run import models
from tests.support import pack_from


@pytest.fixture
def compiled(monkeypatch):
    """The programs that are compiled."""
    made = []
    original = jax.stages.Lowered.compile

    def compile(self, *args, **kwargs):
        made.append(original(self, *args, **kwargs))
        return made[-1]

    monkeypatch.setattr(jax.stages.Lowered, "compile", compile)
    return made


@pytest.fixture
def one_by_one(monkeypatch):
    """Weights travel one by one: a buffer has zeros at its end, and layers no names."""
    pack_from(monkeypatch, None)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", models.EVERY)
def test_the_figures_are_the_compilers(name, compiled, one_by_one):
    report = kd.dry_run(getattr(models, name), 16, topology="cpu:4")
    said = compiled[-1].memory_analysis()
    memory = report.memory
    assert memory.arguments == said.argument_size_in_bytes
    assert memory.outputs == said.output_size_in_bytes
    assert memory.aliased == said.alias_size_in_bytes
    assert memory.temporary == said.temp_size_in_bytes
    assert memory.peak == said.peak_memory_in_bytes
    own = (
        memory.parameters
        + memory.optimizer
        + memory.other_state
        + memory.metrics
        + memory.batch
    )
    assert own == memory.arguments
    assert report.compiler_flops == compiled[-1].cost_analysis()["flops"]
    assert report.num_devices == 4 and report.batch == 16 and report.fits is None
    assert report.collectives and all(
        each.group_size == 4 for each in report.collectives
    )
    text = str(report)
    assert text.startswith("Dry run: batch 16 on cpu:4, 4 devices; compiled, not run")
    assert "ESTIMATE" not in text


def test_the_bytes_of_each_kind(one_by_one):
    report = kd.dry_run(models.mlp, 16, topology="cpu:4")
    parameters = 4 * (16 * 32 + 32 + 32 * 5 + 5)
    assert report.memory.parameters == parameters
    assert report.memory.optimizer == 2 * parameters + 4 + 4
    assert report.memory.batch == 4 * (16 * 4 + 4)
    assert report.num_gradients == 4
    (reduce,) = report.collectives
    assert {"hidden", "logits"} <= set(reduce.of)
    assert reduce.num_bytes >= parameters
    # Forward, and backward with respect to the weights and, but for the first layer,
    # the inputs.
    assert report.flops == {"float32": 2 * 4 * (2 * 16 * 32 + 3 * 32 * 5)}


def test_loops_count_with_their_iterations():
    report = kd.dry_run(models.lstm, 16, topology="cpu:2")
    forward = 2 * 20 * 8 * (8 * 64 + 16 * 64)
    assert 2 * forward < sum(report.flops.values()) < 4 * forward
    # It counts one iteration.
    assert report.compiler_flops < sum(report.flops.values()) / 5
    assert report.unknown_loops == 0


def test_divided_optimizer_state_takes_less():
    whole = kd.dry_run(models.mlp, 16, topology="cpu:4")
    divided = kd.dry_run(models.mlp, 16, topology="cpu:4", shard_optimizer_state=True)
    assert divided.memory.optimizer < whole.memory.optimizer / 3
    with kd.MirroredStrategy(["cpu:0"], shard_optimizer_state=True).scope():
        model = models.mlp()
    assert kd.dry_run(model, 16, topology="cpu:4").memory == divided.memory

    def in_its_own_scope():
        with kd.MirroredStrategy(["cpu:0"], shard_optimizer_state=True).scope():
            return models.mlp()

    report = kd.dry_run(in_its_own_scope, 16, topology="cpu:4")
    assert report.memory == divided.memory


def test_several_steps_are_one_program():
    one, four = (
        kd.dry_run(build, 16, topology="cpu:2")
        for build in (models.mlp, models.several_steps)
    )
    assert four.num_steps == 4
    assert four.flops == one.flops
    assert four.memory.batch == 4 * one.memory.batch
    assert ", 4 steps a call" in str(four)
    assert {each.times for each in four.collectives} == {4}


def test_models_with_and_without_a_strategy():
    plain = models.cnn()
    assert (
        kd.dry_run(plain, 8, topology="cpu:2").memory
        == kd.dry_run(models.cnn, 8, topology="cpu:2").memory
    )
    with kd.MirroredStrategy(["cpu:0", "cpu:1", "cpu:2"]).scope():
        model = models.cnn()
    assert (
        kd.dry_run(model, 8, topology="cpu:2").memory
        == kd.dry_run(plain, 8, topology="cpu:2").memory
    )


def test_batches_as_structures():
    form = jax.ShapeDtypeStruct
    given = (form((16, 16), "float32"), form((16,), "int32"))
    weighted = (*given, form((16,), "float32"))
    arrays = (np.zeros((16, 16)), np.zeros(16, "int32"))
    report = kd.dry_run(models.mlp, given, topology="cpu:2")
    assert report.memory == kd.dry_run(models.mlp, 16, topology="cpu:2").memory
    assert report.memory == kd.dry_run(models.mlp, arrays, topology="cpu:2").memory
    assert (
        kd.dry_run(models.mlp, weighted, topology="cpu:2").memory.batch
        == report.memory.batch + 4 * 8
    )


def test_models_of_several_inputs_and_outputs_know_their_batches():
    def build():
        a, b = keras.Input((3,), name="a"), keras.Input((2,), name="b")
        joined = keras.layers.Concatenate()([a, b])
        outputs = {
            "c": keras.layers.Dense(4, name="c")(joined),
            "d": keras.layers.Dense(1, name="d")(joined),
        }
        model = keras.Model({"a": a, "b": b}, outputs)
        model.compile(
            "sgd",
            {
                "c": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
                "d": "mse",
            },
        )
        return model

    assert kd.dry_run(build, 8, topology="cpu:2").memory.batch == 4 * 4 * (
        3 + 2 + 1 + 1
    )


def test_a_step_that_does_not_fit_is_reported_and_the_largest_that_does_is_found():
    report = kd.dry_run(
        models.mlp, 4096, topology="cpu:4", memory_limit=200_000, largest_batch=True
    )
    assert report.fits is False
    assert report.needed_bytes > report.limit_bytes == 200_000
    assert "does NOT fit" in str(report)
    found = report.largest_batch
    assert found.rows % 4 == 0 and 0 < found.rows < found.too_large <= 4096
    assert (
        kd.dry_run(models.mlp, found.rows, topology="cpu:4", memory_limit=200_000).fits
        is True
    )
    assert (
        kd.dry_run(
            models.mlp, found.too_large, topology="cpu:4", memory_limit=200_000
        ).fits
        is False
    )


def test_a_compiler_that_refuses_is_reported(monkeypatch):
    def refuse(self, *args, **kwargs):
        raise jax.errors.JaxRuntimeError(
            "RESOURCE_EXHAUSTED: Ran out of memory. Used 17.50G of 15.75G hbm."
        )

    monkeypatch.setattr(jax.stages.Lowered, "compile", refuse)
    report = kd.dry_run(models.mlp, 16, topology="cpu:2")
    assert (report.fits, report.memory, report.estimate) == (False, None, None)
    assert (report.needed_bytes, report.limit_bytes) == (
        int(17.5 * 2**30),
        int(15.75 * 2**30),
    )
    assert "17.50 GiB" in str(
        report
    ) and "15.75 GiB: does NOT fit, 1.75 GiB too much" in str(report)
    with pytest.raises(ValueStructureError, match="There is no estimate"):
        report.scaling()

    def other(self, *args, **kwargs):
        raise jax.errors.JaxRuntimeError("INTERNAL: a bug")

    answers.forget()
    monkeypatch.setattr(jax.stages.Lowered, "compile", other)
    with pytest.raises(jax.errors.JaxRuntimeError, match="a bug"):
        kd.dry_run(models.mlp, 16, topology="cpu:2")

    def newer(self, *args, **kwargs):
        place = "external/xla/xla/hlo/ir/hlo_instruction.cc:390"
        raise jax.errors.JaxRuntimeError(f"INTERNAL: RET_CHECK failure ({place})")

    monkeypatch.setattr(jax.stages.Lowered, "compile", newer)
    with pytest.raises(BackendError, match=r"(?s)cannot read.*RET_CHECK.*jax\[tpu\]=="):
        kd.dry_run(models.mlp, 16, topology="cpu:2")

    def old(self, *args, **kwargs):
        raise jax.errors.JaxRuntimeError("UNIMPLEMENTED: /bin/ptxas ptxas too old.")

    monkeypatch.setattr(jax.stages.Lowered, "compile", old)
    with pytest.raises(
        BackendError, match=r"(?s)assembles programs for GPUs.*too old.*dry-run-cuda"
    ):
        kd.dry_run(models.mlp, 16, topology="cpu:2")


def test_what_the_compiler_refuses_does_not_fit_whatever_the_limit(
    monkeypatch, one_by_one
):
    compiles = jax.stages.Lowered.compile

    def refuse_large(self, *args, **kwargs):
        rows = max(
            form.shape[0] for form in jax.tree.leaves(self.in_avals) if form.shape
        )
        if rows > 100:
            raise jax.errors.JaxRuntimeError(
                f"RESOURCE_EXHAUSTED: Ran out of memory. Used {rows}.00M of 0.01M hbm."
            )
        return compiles(self, *args, **kwargs)

    monkeypatch.setattr(jax.stages.Lowered, "compile", refuse_large)
    options = {"memory_limit": 2**30, "largest_batch": True}
    report = kd.dry_run(models.mlp, 16, topology="cpu:4", **options)
    found = report.largest_batch
    assert report.fits and found.rows <= 100 < found.too_large


def test_json_and_pictures(tmp_path):
    report = kd.dry_run(models.mlp, 16, topology="cpu:2", memory_limit=2**30)
    report.save(tmp_path / "report.json")
    read = json.loads((tmp_path / "report.json").read_text())
    assert (read["topology"], read["fits"], read["batch"]) == ("cpu:2", True, 16)
    assert read["memory"]["temporary"] == report.memory.temporary
    assert read["collectives"][0]["kind"] == "all-reduce"
    report.plot(tmp_path / "report.svg")
    assert "activations" in (tmp_path / "report.svg").read_text()


def test_an_estimate_is_called_one(tmp_path):
    """With a target of TPUs, whose rates are known, in place of the CPUs."""
    report = kd.dry_run(models.mlp, 16, topology="cpu:4")
    target = targets.parse("v5e:2x2")
    seconds = api.estimate.of_step(
        target, report.flops, report.bytes_moved, report.collectives, 1
    )
    report = api.dataclasses.replace(report, target=target, estimate=seconds)
    assert "ESTIMATE of a step, from published peak rates; not a measurement" in str(
        report
    )
    read = report.to_json()
    assert (
        "not a measurement" in read["estimate"]["note"] and read["estimate"]["formula"]
    )
    assert read["estimate"]["in_turn"] >= read["estimate"]["at_least"] > 0
    assert [point["num_devices"] for point in read["scaling"]] == [
        1,
        4,
        8,
        16,
        32,
        64,
        128,
        256,
    ]
    report.plot(tmp_path / "report.svg")
    assert "ESTIMATED" in (tmp_path / "report.svg").read_text()


def test_errors_say_what_to_do(monkeypatch):
    assert len(jax.devices()) == 8  # JAX has started: it could have 9 otherwise.
    with pytest.raises(DeviceError, match=r"There are 8 CPU device\(s\)") as caught:
        kd.dry_run(models.mlp, 16, topology="cpu:9")
    assert "kd.config.set_cpu_devices(9)" in str(caught.value)
    with pytest.raises(StructureTypeError, match="A dry run is for a Keras model"):
        kd.dry_run(3, 16, topology="cpu:2")
    with pytest.raises(StructureTypeError, match="returns a compiled Keras model"):
        kd.dry_run(lambda: None, 16, topology="cpu:2")
    with pytest.raises(StructureTypeError, match="needs a compiled model"):
        kd.dry_run(
            lambda: keras.Sequential([keras.layers.Dense(1)]), 16, topology="cpu:2"
        )
    with pytest.raises(InputError, match="does not say what its batches are"):
        kd.dry_run(_unbuilt, 16, topology="cpu:2")
    with pytest.raises(InputError, match="at least one row"):
        kd.dry_run(models.mlp, 0, topology="cpu:2")
    with pytest.raises(InputError, match="same number of rows"):
        kd.dry_run(models.mlp, (np.zeros((4, 16)), np.zeros(3)), topology="cpu:2")
    with pytest.raises(
        ValueStructureError, match="only where the size of the memory is known"
    ):
        kd.dry_run(models.mlp, 16, topology="cpu:2", largest_batch=True)
    with pytest.raises(StructureTypeError, match="a number of bytes"):
        kd.dry_run(models.mlp, 16, topology="cpu:2", memory_limit="16G")
    with pytest.raises(StructureTypeError, match="runs eagerly"):
        kd.dry_run(_eager, 16, topology="cpu:2")
    with pytest.raises(InputError, match="differs from batch to batch"):
        kd.dry_run(_any_length, 16, topology="cpu:2")


def _unbuilt():
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


def _eager():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", run_eagerly=True)
    return model


def _any_length():
    model = keras.Sequential([keras.Input((None, 2)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


def test_an_unbuilt_model_is_built_by_a_structure():
    report = kd.dry_run(
        _unbuilt, (np.zeros((8, 3)), np.zeros((8, 1))), topology="cpu:2"
    )
    assert report.memory.parameters == 4 * 4


def test_a_model_that_cannot_be_made_again_needs_a_function():
    class Own(keras.Model):
        def __init__(self, layer):
            super().__init__()
            self.layer = layer

        def call(self, x):
            return self.layer(x)

    model = Own(keras.layers.Dense(1))
    model.compile("sgd", "mse")
    with pytest.raises(
        InputError, match="made again for a dry run, which this one cannot"
    ) as caught:
        kd.dry_run(model, (np.zeros((8, 3)), np.zeros((8, 1))), topology="cpu:2")
    assert "kd.dry_run(build_model, 256)" in str(caught.value)


@pytest.mark.parametrize(
    ("topology", "package", "extra"),
    [("v5e:2x2", "libtpu", "tpu"), ("h100:2", "jax-cuda12", "cuda")],
)
def test_without_a_compiler_the_error_says_what_to_install(
    topology, package, extra, monkeypatch
):
    found = importlib.util.find_spec
    missing = ("libtpu", "jax_cuda12_plugin", "jax_cuda13_plugin")
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *args: None if name in missing else found(name, *args),
    )
    with pytest.raises(
        BackendError, match=f"Compiling for {topology} needs {package}"
    ) as caught:
        kd.dry_run(models.mlp, 16, topology=topology)
    assert f"pip install 'keras-distribute[dry-run-{extra}]'" in str(caught.value)


def test_the_command_line(tmp_path, capsys):
    model = "tests.dry_run.models:mlp"
    arguments = [
        "--model",
        model,
        "--batch",
        "64",
        "--topology",
        "cpu:4",
        "--json",
        str(tmp_path / "a.json"),
    ]
    assert command.main([*arguments, "--plot", str(tmp_path / "a.png")]) == 0
    assert "batch 64 on cpu:4" in capsys.readouterr().out
    assert json.loads((tmp_path / "a.json").read_text())["batch"] == 64
    assert (tmp_path / "a.png").stat().st_size > 1000
    assert command.main([*arguments, "--memory-limit", "10000"]) == 1
    assert "does NOT fit" in capsys.readouterr().out
    assert (
        command.main(
            [
                "--model",
                model,
                "--batch",
                f"{__name__}:made_batch",
                "--topology",
                "cpu:2",
            ]
        )
        == 0
    )
    for wrong, message in (
        (["--model", "mlp", "--batch", "8"], "not of the form module:function"),
        (
            ["--model", "tests.dry_run.models:nothing", "--batch", "8"],
            "cannot be imported",
        ),
        (
            ["--model", model, "--batch", "8", "--topology", "v9:1x1"],
            "no hardware 'v9'",
        ),
    ):
        with pytest.raises(SystemExit):
            command.main(wrong)
        assert message in capsys.readouterr().err


def raising():
    raise ValueError("no data here")


def test_an_error_is_no_step_that_does_not_fit(tmp_path, capsys):
    model, unwritable = "tests.dry_run.models:mlp", str(tmp_path / "no" / "a.json")
    for wrong, message in (
        (["--model", f"{__name__}:raising", "--batch", "8"], "no data here"),
        (["--model", model, "--batch", f"{__name__}:raising"], "no data here"),
        (["--model", model, "--batch", "8", "--json", unwritable], "No such file"),
    ):
        assert command.main([*wrong, "--topology", "cpu:2"]) == 2
        assert message in capsys.readouterr().err


def made_batch():
    return np.zeros((8, 16), "float32"), np.zeros(8, "int32")


def divided_model():
    """A replica of two logical devices, which share a kernel by its columns."""
    strategy = logical.tpu_strategy(2, layout_map={".*wide/kernel": (None, "logical")})
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((16,)),
                keras.layers.Dense(64, use_bias=False, name="wide"),
                keras.layers.Dense(1),
            ]
        )
        model.compile("sgd", "mse")
    return model


def test_logical_devices_share_what_is_divided():
    report = kd.dry_run(divided_model(), 32, topology="cpu:8")
    assert report.memory.parameters == 4 * (16 * 64 // 2 + 64 + 1)
    # Of the forward pass alone, all devices together.
    operations = 32 * (2 * 16 * 64 + 2 * 64)
    assert sum(report.flops.values()) * 8 > 2 * operations
    assert sum(report.flops.values()) * 8 < 4 * operations
    assert report.num_logical == 2
    assert str(report).startswith(
        "Dry run: batch 32 on cpu:8, 8 devices, 2 to a replica; compiled, not run"
    )
    kinds = {(each.group_size, each.num_replicas) for each in report.collectives}
    assert (4, 4) in kinds  # Each half of the gradient, over the four replicas.
    assert (2, 1) in kinds  # What two logical devices of a replica have each a part of.


def test_a_topology_holds_whole_replicas(monkeypatch):
    model = divided_model()
    with pytest.raises(
        DeviceError,
        match=r"(?s)cpu:3 has no whole number of replicas of 2.*3 devices.*multiple of 2",
    ):
        kd.dry_run(model, 32, topology="cpu:3")


@pytest.mark.parametrize(
    "topology",
    ["v2:32x16", "v3:16x64", "v4:32x16x16", "v5e:32x1", "v6e:8x32", "tpu7x:32x32x16"],
)
def test_slices_beyond_a_whole_pod_are_refused_by_name(topology):
    pod = {"v2": "16x16", "v3": "32x32", "v4": "16x16x16"} | {
        "v5e": "16x16",
        "v6e": "16x16",
        "tpu7x": "16x24x24",
    }
    kind = topology.partition(":")[0]
    with pytest.raises(DeviceError, match=f"largest slice of {kind} has {pod[kind]} "):
        targets.parse(topology)


@pytest.mark.parametrize(
    "topology", ["v5e:16x16", "v3:32x32", "v4:4x4x64", "v5p:16x20x28", "tpu7x:4x4x64"]
)
def test_slices_of_a_pod_are_there(topology):
    shape = topology.partition(":")[2].split("x")
    assert targets.parse(topology).shape == tuple(map(int, shape))


CRASH = "import sys, os; sys.stderr.write({said!r}); sys.stderr.flush(); {end}"


@pytest.mark.parametrize(
    ("said", "end", "how", "last"),
    [
        (
            "one\nF1122 Check failed: plan",
            "os.abort()",
            "SIGABRT",
            "Check failed: plan",
        ),
        ("", "os._exit(3)", "exit code 3", "nothing"),
        ("x\n" * 99 + "end", "os.kill(os.getpid(), 11)", "SIGSEGV", "    x\n    end"),
    ],
)
def test_a_compiler_that_ends_its_process_is_an_error(
    monkeypatch, said, end, how, last
):
    monkeypatch.setattr(compiling, "_CHILD", CRASH.format(said=said, end=end))
    target = targets.parse("v5e:4x4")
    lowered = jax.jit(lambda x: 2 * x).lower(1.0)
    with pytest.raises(BackendError) as caught:
        compiling.compiled(target, lowered)
    text = str(caught.value)
    assert f"for v5e:4x4 ended its process ({how}); this one goes on." in text
    assert last in text.split("its last lines:")[1]
    assert "pip install -U libtpu" in text


def without_places(text):
    """The text of a program without the lines of Python that it comes from, which it
    has with `EVERY_CASE`.
    """
    if "FileNames" not in text:
        return text
    begin, end = text.index("FileNames"), text.rindex("parent_frame_id")
    return text[:begin] + text[end:].partition("\n")[2]


def test_what_a_compiler_is_given_says_the_same_elsewhere():
    """A program that is taken from JAX, and compiled from its bytes, is the one of JAX."""
    step = jax.jit(lambda x, w: jax.numpy.sin(x) * w, donate_argnums=0)
    lowered = step.lower(*[np.ones((8, 8), "float32")] * 2)
    program = seam.program_of(lowered)
    result, here = seam.compiled_for(jax.devices("cpu")[:1], program), lowered.compile()
    assert without_places(result.as_text()) == without_places(here.as_text())
    said = here.memory_analysis()
    sizes = vars(result.memory_analysis())
    assert sizes == {name: getattr(said, name) for name in sizes} and len(sizes) == 6
    assert result.cost_analysis() == here.cost_analysis()
    assert pickle.loads(pickle.dumps(result)) == result
    # What JAX has compiled already is not compiled again.
    assert without_places(seam.program_of(lowered).as_text()) == without_places(
        here.as_text()
    )


def test_options_are_compared_in_one_table():
    def build():
        blocks = [keras.layers.Dense(512, name=f"hidden_{i}") for i in range(2)]
        model = keras.Sequential([keras.Input((512,)), *blocks])
        model.compile("adam", "mse")
        return model

    batch = 512  # Of 64 rows less would travel than of the weights.
    found = kd.compare_dry_runs(
        build,
        batch,
        "cpu:4",
        memory_limit=8 << 20,
        num_logical_devices=2,
        layout_map={".*hidden.*kernel": (None, "logical")},
    )
    whole, slots, parts, layout, both = found.reports.values()
    weights = 2 * (512 * 512 + 512) * 4
    assert whole.memory.parameters == slots.memory.parameters == weights
    assert slots.memory.optimizer < whole.memory.optimizer / 3.9
    assert parts.memory.parameters < weights / 3.9
    assert parts.memory.optimizer < whole.memory.optimizer / 3.9
    assert weights / 2 < layout.memory.parameters < weights / 1.9
    assert both.memory.parameters < weights / 3.9
    # Gathered for the forward and, of the second layer, the backward pass; scattered.
    kernel = 512 * 512 * 4 * 3 / 4
    assert parts.bytes_sent == pytest.approx(5 * kernel, rel=0.02)
    assert whole.bytes_sent == pytest.approx(4 * kernel, rel=0.02)
    text = str(found)
    assert text.startswith("Dry runs: batch 512 on cpu:4; compiled, not run")
    assert [line.split("  ")[0] for line in text.splitlines()[3:]] == [*found.reports]
    assert "NO" in text and "yes" in text
    few = kd.dry_run(build, 64, "cpu:4", shard_variables=True)
    assert few.bytes_sent < kernel / 1.5


def test_a_comparison_makes_its_models():
    with pytest.raises(kd.errors.StructureTypeError, match="anew for each option"):
        kd.compare_dry_runs("model", 64, "cpu:4")


def test_a_comparison_gives_no_values_to_its_models():
    """28 GB of them, of each."""

    def build():
        layers = [keras.Input((700,)), keras.layers.Dense(10_000_000, use_bias=False)]
        model = keras.Sequential(layers)
        model.compile("sgd", "mse")
        return model

    whole, _, parts = kd.compare_dry_runs(build, 8, "cpu:4").reports.values()
    assert whole.memory.parameters == 700 * 10_000_000 * 4
    assert parts.memory.parameters == 700 * 10_000_000


def test_a_model_that_a_function_makes_has_no_values():
    """112 GB of them; and the models that follow are what they would have been."""

    def build(units=10_000_000, name="wide"):
        wide = keras.layers.Dense(units, name=name)
        model = keras.Sequential([keras.Input((700,)), wide, keras.layers.Dense(1)])
        model.compile(keras.optimizers.Adam(), "mse")
        return model

    keras.utils.set_random_seed(0)
    expected = build(8).get_weights()
    keras.utils.set_random_seed(0)
    before = {id(array) for array in jax.live_arrays()}
    largest = max((array.nbytes for array in jax.live_arrays()), default=0)
    report = kd.dry_run(build, 8, topology="cpu:8", shard_variables=True)
    made = [array for array in jax.live_arrays() if id(array) not in before]
    assert all(array.nbytes <= largest for array in made)
    kernel = 700 * 10_000_000 * 4
    assert kernel / 8 < report.memory.parameters < kernel / 8 * 1.01
    assert 2 * kernel / 8 < report.memory.optimizer < 2 * kernel / 8 * 1.01
    for ours, theirs in zip(build(8).get_weights(), expected, strict=True):
        assert ours.tobytes() == theirs.tobytes()


def test_a_strategys_model_keeps_its_values():
    with kd.MirroredStrategy(["cpu:0"]).scope():
        model = models.mlp()
    before = model.get_weights()
    kd.dry_run(model, 16, topology="cpu:4")
    for ours, theirs in zip(model.get_weights(), before, strict=True):
        assert ours.tobytes() == theirs.tobytes()
    x = np.ones((16, *model.input_shape[1:]), "float32")
    model.fit(x, np.zeros(16, "int32"), verbose=0)
    assert all(np.isfinite(v.numpy()).all() for v in model.optimizer.variables)


def test_a_deterministic_strategy_has_its_own_step():
    """Of several replicas on a device, one after the other."""
    kind = {"deterministic": True, "num_replicas": 8}
    reports = []
    for options in ({}, kind):
        with kd.MirroredStrategy(["cpu:0"], **options).scope():
            model = models.mlp()
        reports += [kd.dry_run(model, rows, topology="cpu:4") for rows in (64, 61)]
    ordinary, _, deterministic, tail = reports
    assert (ordinary.count("all-reduce"), deterministic.count("all-reduce")) == (1, 0)
    assert deterministic.count("all-gather"), deterministic.collectives
    assert deterministic.flops == ordinary.flops == tail.flops
    with kd.MirroredStrategy(["cpu:0"], **kind).scope():
        model = models.mlp()
    with pytest.raises(DeviceError, match=r"(?s)3 devices, num_replicas=8.*=3\)"):
        kd.dry_run(model, 64, topology="cpu:3")


def test_host_memory_that_the_compiler_does_not_know_is_an_error():
    with kd.experimental.CentralStorageStrategy(["cpu:0"]).scope():
        model = models.mlp()
    assert kd.dry_run(model, 64, topology="cpu:2").memory.host

    class Device:
        def addressable_memories(self):
            return []

    with pytest.raises(DeviceError, match=r"(?s)h100:2 cannot have variables in host"):
        api._check_host_memory(adoption.strategy_of(model), [Device()], "h100:2")
