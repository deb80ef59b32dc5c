"""Several logical devices a replica: the numbers of one, and what of them each device
holds and computes.
"""

from __future__ import annotations

import re
import warnings
from typing import Any

import jax
import keras
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import keras_distribute as kd
from keras_distribute.dry_run import collectives
from keras_distribute.training.steps.compiled_step import CompiledStep
from tests.logical import (
    HIDDEN,
    IMAGES,
    LABELS,
    ROWS,
    Divided,
    compiled,
    dense_classifier,
    image_classifier,
    names_of_a_nan,
    tpu_strategy,
)
from tests.support import assert_close, distributed, mirrored, pack_from

pytestmark = [pytest.mark.timeout(200), pytest.mark.sampled(3)]
PARTS = {1: [1, 1, 1, 1], 2: [1, 2, 1, 1], 4: [1, 2, 2, 1], 8: [1, 4, 2, 1]}


def trained(model: Any, x: Any = ROWS) -> list[Any]:
    history = model.fit(
        x, LABELS, batch_size=16, epochs=2, shuffle=False, verbose=0
    ).history
    return [
        *history["loss"],
        *history["accuracy"],
        *(v.numpy() for v in (*model.variables, *model.optimizer.variables)),
    ]


@pytest.fixture
def texts(monkeypatch: Any) -> list[str]:
    """The compiled programs of the steps of `fit`, as they run."""
    found: list[str] = []
    original = CompiledStep._one

    def noting(self: Any, holder: Any, placed: Any) -> Any:
        found.append(self.executable(placed).compile().as_text())
        return original(self, holder, placed)

    monkeypatch.setattr(CompiledStep, "_one", noting)
    return found


@pytest.mark.parametrize(
    ("num_logical", "parts"), [(2, [1, 2, 1, 1]), (4, [1, 2, 2, 1])]
)
def test_a_divided_model_is_trained_like_one_on_as_many_replicas(
    num_logical: int, parts: list[int]
) -> None:
    """Batch normalization knows of replicas, so as many of them are the measure; the
    last batch has six rows.
    """
    replicas = 8 // num_logical
    with mirrored(replicas).scope():
        expected = image_classifier()
    with tpu_strategy(num_logical, layout_map=HIDDEN).scope():
        model = image_classifier(parts)
    assert_close(trained(model, IMAGES), trained(expected, IMAGES))
    x = IMAGES[:13]
    np.testing.assert_allclose(
        model.predict(x, verbose=0),
        expected.predict(x, verbose=0),
        rtol=2e-5,
        atol=2e-6,
    )


def token_classifier(parts: Any = None, **compiling: Any) -> Any:
    """The gradient of an embedding adds up rows by their tokens."""
    keras.utils.set_random_seed(0)
    blocks = [
        Divided(parts),
        keras.layers.Embedding(5, 4, name="tokens"),
        keras.layers.GlobalAveragePooling1D(),
    ]
    model = keras.Sequential(
        [keras.Input((6,), dtype="int32"), *blocks, keras.layers.Dense(3)]
    )
    return compiled(model, **compiling)


@pytest.mark.parametrize(
    ("num_logical", "parts", "size", "steps"),
    [
        (2, None, 6, 1),
        (2, [1, 2], 6, 3),
        (2, [2, 1], 6, 1),
        (4, None, 5, 1),
        (4, [2, 2], 7, 1),
        (4, [4, 1], 6, 1),
    ],
)
def test_rows_that_do_not_divide_are_scattered_once(
    num_logical: int, parts: Any, size: int, steps: int
) -> None:
    """XLA scatters padding, too, of rows divided unevenly over replicas alone."""
    tokens = np.random.RandomState(2).randint(1, 5, (21, 6))
    plain = token_classifier(steps_per_execution=steps)
    with tpu_strategy(num_logical).scope():
        model = token_classifier(parts, steps_per_execution=steps)
    for each in (plain, model):
        each.fit(
            tokens, LABELS[:21], batch_size=size, epochs=2, shuffle=False, verbose=0
        )
    assert_close(
        [v.numpy() for v in model.variables], [v.numpy() for v in plain.variables]
    )
    np.testing.assert_allclose(
        model.predict(tokens, verbose=0),
        plain.predict(tokens, verbose=0),
        rtol=1e-5,
        atol=1e-6,
    )


def test_rows_that_do_not_divide_stay_divided_where_nothing_is_scattered() -> None:
    """Each device slices 200 of 798 rows out of what was placed; all of them would need
    four times as much.
    """
    with tpu_strategy(2).scope():
        model = dense_classifier()
    taken = kd.dry_run(model, 798, topology="cpu:8").memory.temporary
    assert taken < 798 * 192 * 4 / 2


@pytest.mark.parametrize("num_logical", [1, 2, 4])
def test_what_each_device_computes_in_fit(num_logical: int, texts: list[str]) -> None:
    """16 rows of 8 x 8 pixels: each replica's rows, the logical devices' parts of each,
    and of 16 hidden units.
    """
    replicas, units = 8 // num_logical, 16 // num_logical
    height, width = PARTS[num_logical][1:3]
    with tpu_strategy(num_logical, layout_map=HIDDEN).scope():
        blocks = [
            Divided(PARTS[num_logical]),
            keras.layers.Conv2D(4, 3, padding="same"),
            keras.layers.Flatten(),
        ]
        hidden = keras.layers.Dense(16, activation="relu", name="hidden")
        model = compiled(
            keras.Sequential(
                [keras.Input((8, 8, 3)), *blocks, hidden, keras.layers.Dense(3)]
            )
        )
    model.fit(IMAGES[:16], LABELS[:16], batch_size=16, verbose=0)
    text = texts[0]
    found = re.search(r"entry_computation_layout=\{\((.*?)\)->", text)
    assert found is not None
    # Activations: the batch is each replica's rows, the same on its logical devices;
    # each convolves its part of them.
    assert f"f32[{16 // replicas},8,8,3]" in found.group(1)
    convolved = f"f32[{16 // replicas},{8 // height},{8 // width},4]"
    assert convolved in re.findall(r"= (f32\[[\d,]+\])\S* convolution\(", text)
    # Of the images' parts, from the neighbours.
    borders = text.count(" collective-permute(")
    assert borders >= 2 if num_logical > 1 else borders == 0
    # The weight and its slots: a part of each, and in no place of the program the
    # whole.
    assert found.group(1).count(f"f32[256,{units}]") == 3
    assert num_logical == 1 or ("[256,16]" not in text and "[16,256]" not in text)
    # The gradient: each part is summed over the replicas, all of which have it.
    part = rf"f32\[({units},256|256,{units})\]"
    sums = [
        line
        for line in text.splitlines()
        if re.search(rf"= .*{part}.* all-reduce(-start)?\(", line)
    ]
    assert len(sums) == 1
    groups = [list(range(first, 8, num_logical)) for first in range(num_logical)]
    assert collectives._groups(sums[0], 8).tolist() == groups


def test_what_each_device_computes_in_run() -> None:
    strategy = tpu_strategy(
        4, layout_map={".*hidden/kernel": ("logical_0", "logical_1")}
    )
    with strategy.scope():
        layer = keras.layers.Dense(6, name="hidden")
        layer.build((None, 4))

    def step(x: Any) -> Any:
        x = strategy.experimental_split_to_logical_devices(x, [2, 2])
        return strategy.experimental_replicate_to_logical_devices(layer(x))

    x = RNG_ROWS[:8, :4]
    result = strategy.run(step, args=(x,))
    np.testing.assert_allclose(
        result.values[1], x @ layer.kernel.numpy(), rtol=1e-5, atol=1e-6
    )
    assert [component.shape for component in result.values] == [(8, 6)] * 2
    assert layer.kernel.stored.sharding.spec == PartitionSpec("logical_0", "logical_1")
    (program,) = strategy.programs.programs_of(step).values()
    text = (
        program.jitted.lower([], [v.stored for v in program.variables], [x])
        .compile()
        .as_text()
    )
    parameters = re.search(r"entry_computation_layout=\{\((.*?)\)->", text)
    assert parameters is not None
    assert "f32[2,3]" in parameters.group(1)  # A fourth of the weight.
    assert re.search(r"= f32\[4,\d\]\S* dot\(", text)  # Half of the rows.


RNG_ROWS = np.random.RandomState(1).randn(20, 12).astype("float32")


@pytest.mark.parametrize("num_logical", [2, 8])
def test_a_custom_loop_has_the_numbers_of_one_device(num_logical: int) -> None:
    """Eleven rows: the replicas have different numbers of them."""
    x, y = RNG_ROWS[:11], RNG_ROWS[:11].sum(1, keepdims=True)
    losses, weights = [], []
    for strategy in (
        kd.OneDeviceStrategy("cpu:0"),
        tpu_strategy(num_logical, layout_map=HIDDEN),
    ):
        with strategy.scope():
            keras.utils.set_random_seed(0)
            parts = (
                None if isinstance(strategy, kd.OneDeviceStrategy) else [1, num_logical]
            )
            hidden = [
                Divided(parts and [1, num_logical]),
                keras.layers.Dense(16, "tanh", name="hidden"),
            ]
            model = keras.Sequential(
                [keras.Input((16,)), *hidden, keras.layers.Dense(1)]
            )
            optimizer = keras.optimizers.Adam(0.1)
            loss = keras.losses.MeanSquaredError()

        def step(
            x: Any,
            y: Any,
            model: Any = model,
            optimizer: Any = optimizer,
            loss: Any = loss,
        ) -> Any:
            value, gradients = kd.value_and_grad(
                lambda: loss(y, model(x)), model.trainable_variables
            )()
            optimizer.apply_gradients(
                zip(gradients, model.trainable_variables, strict=True)
            )
            return value

        data = kd.ArrayDataset((np.pad(x, ((0, 0), (0, 4))), y), batch_size=11)
        batches = [
            element
            for _ in range(3)
            for element in strategy.experimental_distribute_dataset(data)
        ]
        losses.append(
            [
                float(strategy.reduce("SUM", strategy.run(step, args=each), axis=None))
                for each in batches
            ]
        )
        weights.append([v.numpy() for v in model.weights])
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)
    assert_close(weights[1], weights[0])


@pytest.mark.sampled(1)
@pytest.mark.parametrize("divided", [False, True])
def test_sums_of_bfloat16_over_the_replicas(divided: bool) -> None:
    """XLA for CPUs widens such a sum, and ended the process over logical devices."""
    devices = [f"cpu:{i}" for i in range(4)]
    strategy = kd.MirroredStrategy(
        devices,
        num_logical_devices=2,
        communication_dtype="bfloat16",
        shard_variables=divided,
        min_shard_bytes=16,
    )
    losses = []
    for each in (kd.OneDeviceStrategy("cpu:0"), strategy):
        with each.scope():
            keras.utils.set_random_seed(0)
            dense = keras.layers.Dense(4, dtype="bfloat16")
            model = keras.Sequential([keras.Input((192,)), dense])
            model.compile("sgd", "sparse_categorical_crossentropy")
        history = model.fit(ROWS[:16], LABELS[:16], epochs=2, verbose=0).history
        losses.append(history["loss"])
    np.testing.assert_allclose(losses[1], losses[0], rtol=2e-2)

    def sums() -> Any:
        number = kd.get_replica_context().replica_id_in_sync_group + 1.5
        total = jax.lax.psum(number.astype("bfloat16"), "replica")
        return number.astype("bfloat16"), total

    own, total = strategy.run(sums)
    assert [float(v) for v in total.values] == [4.0, 4.0]
    assert float(strategy.reduce("SUM", own, axis=None)) == 4.0


@pytest.mark.parametrize("first", [0, 1])
def test_what_is_divided_leaves_replicas_of_different_rows(first: int) -> None:
    strategy = kd.MirroredStrategy(
        [f"cpu:{i}" for i in range(4)], num_logical_devices=2
    )
    rows = [RNG_ROWS[:first, :4], RNG_ROWS[2:4, :4]]

    def step(x: Any) -> Any:
        return strategy.experimental_split_to_logical_devices(x * 2, [1, 2])

    result = strategy.run(step, args=(distributed(strategy, rows),))
    for mine, x in zip(result.values, rows, strict=True):
        np.testing.assert_array_equal(mine, x * 2)


@pytest.mark.parametrize("many", [4, None], ids=["packed", "one by one"])
@pytest.mark.parametrize("accumulation", [None, 2])
def test_packed_and_accumulating_steps(
    many: int | None, accumulation: int | None, monkeypatch: Any
) -> None:
    """What is divided over logical devices stays by itself; slots may be divided among
    the replicas, too.
    """
    pack_from(monkeypatch, many)

    def built(strategy: Any) -> Any:
        with strategy.scope():
            keras.utils.set_random_seed(0)
            blocks = [
                keras.layers.Dense(8, "tanh"),
                keras.layers.Dense(16, "tanh", name="hidden"),
            ]
            model = keras.Sequential(
                [keras.Input((12,)), *blocks, keras.layers.Dense(1)]
            )
            model.compile(
                keras.optimizers.Adam(0.01, gradient_accumulation_steps=accumulation),
                "mse",
            )
        return model

    options: dict[str, Any] = {} if accumulation else {"shard_optimizer_state": True}
    strategies = [mirrored(2), tpu_strategy(4, layout_map=HIDDEN, **options)]
    models = [built(strategy) for strategy in strategies]
    for model in models:
        model.fit(
            RNG_ROWS, RNG_ROWS.sum(1), batch_size=4, epochs=2, shuffle=False, verbose=0
        )
    assert_close(
        [v.numpy() for v in models[1].variables],
        [v.numpy() for v in models[0].variables],
    )
    ours = [v for v in models[1].optimizer.variables if "hidden_kernel" in v.path]
    assert len(ours) == (3 if accumulation else 2)
    for slot in ours:
        assert slot.stored.addressable_shards[0].data.size == slot.value.size // (
            4 if accumulation else 8
        )


def test_the_second_step_compiles_nothing(compilations: list[str]) -> None:
    with tpu_strategy(2, layout_map=HIDDEN).scope():
        model = dense_classifier()
    trained(model)
    before = len(compilations)
    trained(model)
    assert len(compilations) == before


def test_steps_that_loop_on_the_devices() -> None:
    """Two steps of eleven rows in one dispatch."""
    plain = dense_classifier()
    with tpu_strategy(2, layout_map=HIDDEN).scope():
        model = dense_classifier(steps_per_execution=2)
    for each in (plain, model):
        each.fit(ROWS, LABELS, batch_size=11, epochs=2, shuffle=False, verbose=0)
    assert_close(
        [v.numpy() for v in model.variables], [v.numpy() for v in plain.variables]
    )


def test_saving_and_checkpoints_across_strategies(tmp_path: Any) -> None:
    """From two logical devices to a MirroredStrategy, and back."""
    with tpu_strategy(2, layout_map=HIDDEN).scope():
        model = dense_classifier()
    trained(model)
    model.save(tmp_path / "tpu.keras")
    kd.Checkpoint(model=model).write(str(tmp_path / "tpu"))
    expected = model.predict(ROWS, verbose=0)
    with kd.MirroredStrategy(["cpu:0", "cpu:1", "cpu:2", "cpu:3"]).scope():
        other = dense_classifier()
        loaded = keras.models.load_model(tmp_path / "tpu.keras")
    kd.Checkpoint(model=other).read(str(tmp_path / "tpu"))
    for each in (other, loaded):
        np.testing.assert_allclose(
            each.predict(ROWS, verbose=0), expected, rtol=1e-5, atol=1e-6
        )
    # The slots came along: the very same training goes on.
    assert_close(trained(other), trained(model))
    kd.Checkpoint(model=other).write(str(tmp_path / "mirrored"))
    with tpu_strategy(4, layout_map=HIDDEN).scope():
        back = dense_classifier()
    kd.Checkpoint(model=back).read(str(tmp_path / "mirrored"))
    np.testing.assert_allclose(
        back.predict(ROWS, verbose=0),
        other.predict(ROWS, verbose=0),
        rtol=1e-5,
        atol=1e-6,
    )
    (kernel,) = [v for v in back.variables if v.path.endswith("hidden/kernel")]
    assert kernel.stored.addressable_shards[0].data.shape == (192, 4)


def test_values_outside_of_programs_are_put_on_the_devices() -> None:
    strategy = tpu_strategy(4)
    array = strategy.experimental_split_to_logical_devices(
        np.arange(8.0).reshape(4, 2), [2, 2]
    )
    assert {shard.data.shape for shard in array.addressable_shards} == {(2, 1)}
    np.testing.assert_array_equal(array, np.arange(8.0).reshape(4, 2))
    whole = strategy.experimental_replicate_to_logical_devices(array)
    assert {shard.data.shape for shard in whole.addressable_shards} == {(4, 2)}
    assert (
        strategy.experimental_assign_to_logical_device(array, 3).sharding
        == whole.sharding
    )


@pytest.mark.parametrize(
    ("ask", "error", "message"),
    [
        (
            lambda s: s.experimental_split_to_logical_devices(np.ones((4, 4)), [2]),
            ValueError,
            "a number for each dim",
        ),
        (
            lambda s: s.experimental_split_to_logical_devices(np.ones((4, 4)), [2, 2]),
            ValueError,
            "whose product is 4",
        ),
        (
            lambda s: s.experimental_split_to_logical_devices(
                np.ones((4, 4)), [-1, -2]
            ),
            ValueError,
            "The product of",
        ),
        (
            lambda s: s.experimental_split_to_logical_devices(np.ones((3, 4)), [2, 1]),
            ValueError,
            "Dimension 0 of the",
        ),
        (
            lambda s: s.experimental_split_to_logical_devices(np.ones((4, 4)), 2),
            TypeError,
            "an integer for each dim",
        ),
        (
            lambda s: s.experimental_split_to_logical_devices(
                np.ones((4, 4)), [1.5, 2]
            ),
            TypeError,
            "an integer for",
        ),
        (
            lambda s: s.experimental_assign_to_logical_device(np.ones(2), "1"),
            ValueError,
            "logical_device_id='1'",
        ),
        (
            lambda s: s.experimental_assign_to_logical_device(np.ones(2), 2),
            ValueError,
            "logical devices 0 to 1",
        ),
        (
            lambda s: s.experimental_assign_to_logical_device(np.ones(2), -1),
            ValueError,
            "logical_device_id=-1",
        ),
        (
            lambda s: s.experimental_replicate_to_logical_devices(keras.Input((2,))),
            TypeError,
            "keras.layers.Lambda",
        ),
        (
            lambda s: s.experimental_replicate_to_logical_devices(
                s.run(lambda: np.ones(1))
            ),
            TypeError,
            "in a replica",
        ),
    ],
)
def test_refusals(ask: Any, error: type[Exception], message: str) -> None:
    strategy = tpu_strategy(2)
    with pytest.raises(error, match=message) as raised:
        ask(strategy)
    assert isinstance(raised.value, kd.errors.DistributeError) and "Fix: " in str(
        raised.value
    )


def test_spmd_refuses_assignments_and_strangers_are_refused() -> None:
    strategy = tpu_strategy(2, experimental_spmd_xla_partitioning=True)
    with pytest.raises(
        kd.errors.ValueStructureError,
        match="One SPMD program runs on all logical devices",
    ):
        strategy.experimental_assign_to_logical_device(np.ones(2), 0)
    with (
        kd.MirroredStrategy(["cpu:0"]).scope(),
        pytest.raises(
            kd.errors.ContextError, match="inside the scope of another strategy"
        ),
    ):
        strategy.experimental_replicate_to_logical_devices(np.ones(2))


@pytest.mark.parametrize(
    ("layout_map", "message"),
    [
        ({"k": ("model",)}, "cannot be divided over 'model'"),
        ({"k": ("logical", None)}, "has 2 dimension"),
        ({"k": ("logical_1",)}, "does not divide over 2 logical devices"),
        (3, "a LayoutMap, or a dictionary"),
        ({"k": "logical"}, "from regular expressions to a name or None"),
        ({"[": ("logical",)}, "from regular expressions to a name or None"),
        ({"k": ("logical", "logical")}, "cannot divide two dimensions"),
    ],
)
def test_layouts_that_do_not_fit(layout_map: Any, message: str) -> None:
    with (
        pytest.raises(kd.errors.DistributeError, match=message),
        tpu_strategy(4, layout_map=layout_map).scope(),
    ):
        keras.Variable(np.ones(3), name="k")


def test_a_layout_that_no_variable_has_is_said() -> None:
    strategy = tpu_strategy(
        2,
        layout_map={".*hiden/kernel": (None, "logical"), ".*hidden/bias": ("logical",)},
    )
    with strategy.scope():
        model = dense_classifier()
    with pytest.warns(
        UserWarning,
        match=r"the layout of '\.\*hiden/kernel' .*the model has \S*hidden/kernel,",
    ) as caught:
        trained(model)
    (message,) = {str(w.message) for w in caught if "hiden" in str(w.message)}
    assert "hidden/bias'" not in message
    assert re.search(r"hiden/kernel' \(closest: '\S*/hidden/kernel'\) in", message)
    with warnings.catch_warnings():  # Once is enough.
        warnings.simplefilter("error", UserWarning)
        trained(model)


@pytest.mark.parametrize(
    ("pattern", "closest"),
    [
        (".*desne[_0-9]*/kernel", "net/dense/kernel"),  # The first of several.
        ("dense_1/kernel", "net/dense_1/kernel"),  # Without the model's name.
        ("net/dense_1/biases", "net/dense_1/bias"),
        (r".*embedding_\d+/embeddings?", "net/embedding/embeddings"),
        ("nothing", None),
        (".*", None),
    ],
)
def test_the_warning_names_the_closest_path(pattern: str, closest: str | None) -> None:
    strategy = tpu_strategy(2, layout_map={pattern: (None, "logical")})
    layers = ["net/dense", "net/dense_1"]
    paths = [f"{layer}/{name}" for layer in layers for name in ("kernel", "bias")]
    with pytest.warns(UserWarning, match="No variable has the layout of") as caught:
        strategy.placement.check_layouts(["net/embedding/embeddings", *paths])
    expected = (
        f"{pattern!r} (closest: {closest!r}) in" if closest else f"{pattern!r} in"
    )
    assert expected in str(caught[0].message)


def test_a_layout_that_no_variable_of_a_custom_loop_has_is_said() -> None:
    strategy = tpu_strategy(2, layout_map={"nothing": ("logical",)})
    with strategy.scope():
        variable: Any = keras.Variable(1.0, name="k")
    with pytest.warns(UserWarning, match="'nothing'.*the model has k.$"):
        strategy.run(lambda: variable.value)


def test_kerass_layout_map_with_a_mesh_of_its_own() -> None:
    devices = [f"cpu:{i}" for i in range(8)]
    layout_map: Any = keras.distribution.LayoutMap(
        keras.distribution.DeviceMesh((4, 2), ["batch", "model"], devices)
    )
    layout_map["k"] = (None, "model")
    with tpu_strategy(2, layout_map=layout_map).scope():
        variable: Any = keras.Variable(np.ones((3, 4)), name="k")
    assert variable.stored.sharding.spec == PartitionSpec(None, "logical")
    assert [component.shape for component in variable.values] == [(3, 4)] * 4
    np.testing.assert_array_equal(variable.numpy(), np.ones((3, 4)))
    with pytest.raises(
        kd.errors.ValueStructureError,
        match=r"a DeviceMesh of shape \(4, 2\), for 2 replica",
    ):
        tpu_strategy(4, layout_map=layout_map)


def test_variables_of_each_replica_may_be_divided() -> None:
    with tpu_strategy(2, layout_map={"k": ("logical",)}).scope():
        variable: Any = keras.Variable(
            np.arange(4.0), name="k", synchronization="on_read", aggregation="sum"
        )
    assert variable.stored.addressable_shards[0].data.shape == (1, 2)
    variable.assign_add(np.ones(4))
    np.testing.assert_array_equal(variable.numpy(), np.arange(4.0) + 1)
    assert [component.shape for component in variable.values] == [(4,)] * 4
    assert jax.tree.leaves(variable.stored)[0].sharding.spec == PartitionSpec(
        "replica", "logical"
    )


@pytest.mark.parametrize("num_logical", [2, 4, 8])
@pytest.mark.parametrize(("rows", "row"), [(16, 6), (16, 15), (13, 12)])
def test_a_nan_is_found_on_its_replica(num_logical: int, rows: int, row: int) -> None:
    """Named once, whatever number of devices have its rows, and how they divide."""
    strategy = tpu_strategy(num_logical, layout_map=HIDDEN)
    each = -(-rows // (8 // num_logical))
    assert names_of_a_nan(strategy, rows, row) == (
        f"Received: values that are not finite in x of replica {row // each} (process 0)."
    )
