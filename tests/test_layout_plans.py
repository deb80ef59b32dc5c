"""`kd.layout_plan`: layouts that a strategy takes as they are, printed and changed, and
the numbers of one device.
"""

from __future__ import annotations

import random
import warnings
from typing import Any

import jax
import keras
import numpy as np
import pytest
from keras import layers

import keras_distribute as kd
from tests.support import mirrored

LENGTH, VOCABULARY, WIDTH, HEADS = 8, 64, 32, 4


def attention(kind: str, name: str | None = None) -> Any:
    if kind == "grouped":
        return layers.GroupQueryAttention(8, HEADS, 2, name=name)
    return layers.MultiHeadAttention(HEADS, 8, name=name)


def decoder(kind: str = "heads", blocks: int = 2, named: bool = False) -> keras.Model:
    """With names of layers, or those that Keras counts."""

    def name(text: str) -> str | None:
        return text if named else None

    ids = keras.Input((LENGTH,), dtype="int32")
    hidden = layers.Embedding(VOCABULARY, WIDTH, name=name("tokens"))(ids)
    for i in range(blocks):
        attend = attention(kind, name(f"attention_{i}"))
        normed = layers.LayerNormalization()(hidden)
        hidden = hidden + attend(normed, normed, use_causal_mask=True)
        wide = layers.Dense(96, "gelu", name=name(f"up_{i}"))
        narrow = layers.Dense(WIDTH, name=name(f"down_{i}"))
        hidden = hidden + narrow(wide(layers.LayerNormalization()(hidden)))
    model = keras.Model(ids, layers.Dense(VOCABULARY, name=name("logits"))(hidden))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    # A gradient that is next to nothing is mostly rounding, which Adam would divide by
    # itself: one of 2,048 elements was off by 2.7e-5.
    model.compile(keras.optimizers.Adam(1e-3, epsilon=1e-4), loss)
    return model


def trained(strategy: Any, build: Any) -> keras.Model:
    keras.utils.set_random_seed(3)
    with strategy.scope():
        model = build()
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, (24, LENGTH + 1))
    x, y = tokens[:, :-1], tokens[:, 1:]
    model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0)
    return model


@pytest.mark.sampled(4)
@pytest.mark.parametrize("shards", [False, True])
@pytest.mark.parametrize("kind", ["heads", "grouped"])
def test_a_plan_divides_memory_and_keeps_the_numbers(kind, shards):
    def build() -> keras.Model:
        return decoder(kind)

    keras.backend.clear_session()
    plan = kd.layout_plan(build, num_logical_devices=2)
    strategy = mirrored(
        4,
        num_logical_devices=2,
        layout_map=plan,
        shard_variables=shards,
        min_shard_bytes=1024,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # Of patterns that match nothing.
        # Keras 3.16 on JAX 0.12 says it of integers, with a strategy or without.
        warnings.filterwarnings("ignore", "Explicitly requested dtype int64")
        model = trained(strategy, build)
    expected = trained(kd.get_strategy(), build)
    for a, b in zip(model.get_weights(), expected.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-5)
    for variable in model.weights:
        layer = variable.path.split("/")[-2]
        parts = variable.value.sharding.shard_shape(variable.shape)
        small = len(variable.shape) == 1 and "dense" not in layer
        if layer == "attention_output" and variable.name == "bias":
            small = True
        if variable.name == "bias" and variable.shape == (WIDTH,):
            small = True
        share = np.prod(variable.shape) // np.prod(parts)
        assert share == 1 if small else share in ((2, 4) if shards else (2,)), variable


def test_pairs_are_divided_once_by_outputs_and_once_by_inputs():
    plan = kd.layout_plan(lambda: decoder(named=True), 2)
    assert dict(plan) == {
        "tokens/embeddings": ("logical", None),
        r"attention(_\d+)*/query/kernel": (None, "logical", None),
        r"attention(_\d+)*/query/bias": ("logical", None),
        r"attention(_\d+)*/key/kernel": (None, "logical", None),
        r"attention(_\d+)*/key/bias": ("logical", None),
        r"attention(_\d+)*/value/kernel": (None, "logical", None),
        r"attention(_\d+)*/value/bias": ("logical", None),
        r"attention(_\d+)*/attention_output/kernel": ("logical", None, None),
        r"up(_\d+)*/kernel": (None, "logical"),
        r"up(_\d+)*/bias": ("logical",),
        r"down(_\d+)*/kernel": ("logical", None),
        "logits/kernel": (None, "logical"),
        "logits/bias": ("logical",),
    }


def test_a_plan_of_a_small_model_serves_a_deeper_one():
    small = kd.layout_plan(lambda: decoder(blocks=1, named=True), 2)
    deep = kd.layout_plan(lambda: decoder(blocks=3, named=True), 2)
    assert dict(small) == dict(deep)


def test_numbers_stay_where_they_tell_layers_apart():
    keras.backend.clear_session()
    plan = kd.layout_plan(decoder, 2)
    assert plan["dense/kernel"] == plan["dense_2/kernel"] == (None, "logical")
    assert plan["dense_1/kernel"] == plan["dense_3/kernel"] == ("logical", None)
    assert r"multi_head_attention(_\d+)*/query/kernel" in plan


def test_a_function_leaves_no_trace():
    shape = (VOCABULARY, 416)  # Of no other test's arrays.

    def build() -> keras.Model:
        keras.utils.set_random_seed(1)
        ids = keras.Input((LENGTH,), dtype="int32")
        hidden = layers.Dropout(0.5)(layers.Embedding(*shape)(ids))
        model = keras.Model(ids, layers.Dense(2)(hidden))
        model.compile(keras.optimizers.Adam(1e-3), "mse", metrics=["mae"])
        model.optimizer.build(model.trainable_variables)
        return model

    def around() -> Any:
        state = random.getstate(), np.random.get_state()[1].tolist()
        return *state, keras.random.uniform((2,)).tolist()

    keras.utils.set_random_seed(7)
    expected = [layers.Dense(1).name, *around()]
    keras.utils.set_random_seed(7)
    number = int(expected[0].partition("_")[2] or 0)
    plan = kd.layout_plan(build)
    name, *after = layers.Dense(1).name, *around()
    assert name == f"dense_{number + 1}" and after == expected[1:]
    with keras.StatelessScope():  # At its end, variables that wait get values.
        pass
    assert not [a for a in jax.live_arrays() if a.shape == shape]
    assert "(64, 416)" in str(plan)


def test_the_table():
    plan = kd.layout_plan(lambda: decoder(named=True), 2)
    lines = str(plan).splitlines()
    assert lines[0].startswith(
        "Layouts for 2 logical devices a replica: 23 of 35 weights are divided, "
    )
    row = next(line for line in lines if r"up(_\d+)*/kernel" in line).split("  ")
    assert [cell.strip() for cell in row if cell.strip()] == [
        r"up(_\d+)*/kernel",
        "(32, 96)",
        "2",
        "(None, 'logical')",
        "12.0 KiB",
    ]
    del plan[r"up(_\d+)*/kernel"]
    row = next(line for line in str(plan).splitlines() if r"up(_\d+)*/kernel" in line)
    assert row.split()[-4:] == ["2", "whole", "24.0", "KiB"]
    assert repr(plan).startswith("LayoutPlan({'tokens/embeddings': ('logical', None), ")


def test_what_does_not_divide_is_whole_and_says_so():
    def build() -> keras.Model:
        ids = keras.Input((LENGTH,), dtype="int32")
        hidden = layers.Embedding(63, 24, name="tokens")(ids)
        attend = layers.GroupQueryAttention(8, 4, 1, name="attention")
        return keras.Model(ids, layers.Dense(7, name="last")(attend(hidden, hidden)))

    plan = kd.layout_plan(build, 4)
    assert plan["tokens/embeddings"] == (None, "logical")
    assert plan["attention/query/kernel"] == (None, "logical", None)
    assert plan["last/kernel"] == ("logical", None)
    assert "attention/key/kernel" not in plan and "last/bias" not in plan
    assert "whole: 1 cannot be divided by 4" in str(plan)


def test_changes():
    plan = kd.layout_plan(lambda: decoder(named=True), 2)
    plan["tokens/embeddings"] = (None, "logical")
    plan[".*/key/kernel"] = ("logical", None, None)  # In the place of the one it had.
    assert r"attention(_\d+)*/key/kernel" not in plan
    del plan["logits/bias"]
    assert len(plan) == 12
    strategy = mirrored(4, num_logical_devices=2, layout_map=plan)
    with strategy.scope():
        model = decoder(named=True)
    shares = {v.path: v.value.sharding.shard_shape(v.shape) for v in model.weights}
    assert shares["tokens/embeddings"] == (VOCABULARY, WIDTH // 2)
    assert shares["attention_0/key/kernel"] == (WIDTH // 2, HEADS, 8)
    assert shares["logits/bias"] == (VOCABULARY,)
    assert shares["logits/kernel"] == (WIDTH, VOCABULARY // 2)


@pytest.mark.parametrize(
    ("pattern", "layout", "text"),
    [
        ("token/embedding", ("logical", None), "such as ['tokens/embeddings'"),
        ("tokens/embeddings", ("logical",), "has 1 dimension(s), the variable 2"),
        (".*logits/kernel", (None, "model"), "cannot be divided over 'model'"),
        ("tokens/embeddings", ("logical", "logical"), "cannot divide two dimensions"),
        ("odd/kernel", ("logical", None), "does not divide over 2 logical devices"),
        ("(up|down)_1/bias", ("logical",), "Two patterns match 'up_1/bias'"),
        ("tokens/embeddings", "logical", "goes from regular expressions to a name"),
        (3, ("logical",), "goes from regular expressions to a name"),
    ],
)
def test_changes_that_do_not_fit(pattern, layout, text):
    def build() -> keras.Model:
        model = decoder(named=True)
        odd = layers.Dense(2, name="odd")(layers.Dense(5)(model.output))
        return keras.Model(model.input, odd)

    plan = kd.layout_plan(build, 2)
    before = dict(plan)
    with pytest.raises(kd.errors.DistributeError) as raised:
        plan[pattern] = layout
    assert text in str(raised.value)
    assert dict(plan) == before


def test_models_that_have_no_plan():
    with pytest.raises(kd.errors.ValueStructureError, match="has no weights yet"):
        kd.layout_plan(keras.Sequential([layers.Dense(4)]))
    odd = keras.Sequential([keras.Input((3,)), layers.Dense(5)])
    with pytest.raises(kd.errors.ValueStructureError, match="Nothing in the model"):
        kd.layout_plan(odd)
    with pytest.raises(kd.errors.StructureTypeError, match="returns a Keras model"):
        kd.layout_plan(lambda: 3)
    with (
        mirrored(2).scope(),
        pytest.raises(kd.errors.ContextError, match="in the scope of a strategy"),
    ):
        kd.layout_plan(decoder)


def test_a_model_that_is_there_has_the_plan_of_its_function():
    model = decoder(named=True)
    assert dict(kd.layout_plan(model, 4)) == dict(
        kd.layout_plan(lambda: decoder(named=True), 4)
    )
    plan = kd.layout_plan(model, 4)
    plan["tokens/embeddings"] = ("logical_0", "logical_1")
    assert "4 logical devices" in str(plan)
