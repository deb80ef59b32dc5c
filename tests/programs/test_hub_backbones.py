"""Backbones of KerasHub, from small configurations, divided over logical devices and
replicas by `kd.layout_plan`: the numbers of one device, and the memory that the plan
says.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any

import keras
import numpy as np
import pytest

import keras_distribute as kd
from tests.support import mirrored

pytestmark = pytest.mark.timeout(600)

keras_hub = pytest.importorskip(
    "keras_hub", reason="KerasHub is in the extra `programs`"
)

VOCABULARY, LENGTH, ROWS, BATCH, STEPS = 256, 12, 50, 11, 20


def gpt2() -> Any:
    return keras_hub.models.GPT2Backbone(
        vocabulary_size=VOCABULARY,
        num_layers=2,
        num_heads=4,
        hidden_dim=64,
        intermediate_dim=256,
        max_sequence_length=LENGTH,
    )


def gemma() -> Any:
    return keras_hub.models.GemmaBackbone(
        vocabulary_size=VOCABULARY,
        num_layers=2,
        num_query_heads=4,
        num_key_value_heads=2,
        hidden_dim=64,
        intermediate_dim=256,
        head_dim=16,
    )


BACKBONES = {"GPT-2": gpt2, "Gemma": gemma}
# What these layers have is divided by the plan.
DIVIDED = {"query", "key", "value", "attention_output", "token_embedding"} | {
    "feedforward_intermediate_dense",
    "feedforward_output_dense",
    "ffw_gating",
    "ffw_gating_2",
    "ffw_linear",
}


def language_model(backbone: Any, lora: bool = False) -> keras.Model:
    """With a loss on the next token."""
    if lora:
        backbone.enable_lora(4)
    table = backbone.token_embedding
    logits = table(backbone(backbone.input), reverse=True)
    model = keras.Model(backbone.input, logits)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(1e-3), loss)
    return model


def tokens() -> Any:
    rng = np.random.default_rng(5)
    ids = rng.integers(1, VOCABULARY, (ROWS, LENGTH + 1)).astype("int32")
    there = (np.arange(LENGTH) < rng.integers(6, LENGTH + 1, (ROWS, 1))).astype("int32")
    return {"token_ids": ids[:, :-1] * there, "padding_mask": there}, ids[:, 1:]


def trained(strategy: Any, backbone: Any, lora: bool = False) -> Any:
    """A model after 20 steps, of which every fifth has 6 rows; its losses."""
    keras.utils.set_random_seed(3)
    with strategy.scope():
        model = language_model(backbone(), lora)
    x, y = tokens()
    history = model.fit(
        x, y, batch_size=BATCH, epochs=STEPS // 5, shuffle=False, verbose=0
    )
    assert int(model.optimizer.iterations) == STEPS
    return model, history.history["loss"]


@functools.cache
def on_one_device(name: str, lora: bool = False) -> Any:
    """By plain Keras."""
    return trained(kd.get_strategy(), BACKBONES[name], lora)


def two_by_four(backbone: Any, shards: bool) -> Any:
    plan = kd.layout_plan(backbone, num_logical_devices=2)
    options = {"shard_variables": True, "min_shard_bytes": 256} if shards else {}
    strategy = mirrored(8, num_logical_devices=2, layout_map=plan, **options)
    assert strategy.num_replicas_in_sync == 4
    return strategy, plan


def assert_equal(ours: Any, theirs: Any, tolerance: float = 2e-5) -> None:
    (model, losses), (expected, known) = ours, theirs
    np.testing.assert_allclose(losses, known, rtol=2e-5)
    for a, b in zip(model.weights, expected.weights, strict=True):
        np.testing.assert_allclose(
            np.asarray(a), np.asarray(b), rtol=0, atol=tolerance, err_msg=a.path
        )


def on_device(variables: Any) -> int:
    return sum(v.value.addressable_shards[0].data.nbytes for v in variables)


@pytest.mark.parametrize("shards", [False, True], ids=["layouts", "both"])
@pytest.mark.parametrize("name", BACKBONES)
def test_numbers_of_one_device_and_the_memory_of_the_plan(name, shards):
    strategy, _ = two_by_four(BACKBONES[name], shards)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="No variable has the layout")
        found = trained(strategy, BACKBONES[name])
    assert_equal(found, on_one_device(name))
    model = found[0]
    for variable in model.weights:
        array = variable.value
        share = array.size // array.addressable_shards[0].data.size
        if variable.name == "bias":
            continue
        layer = variable.path.split("/")[-2]
        whole = 4 if shards and array.size > 512 else 1
        assert share == (2 * whole if layer in DIVIDED else whole), variable.path
    more = [*model.optimizer.variables, *model.metrics_variables]
    kept = {id(v): v for v in (*model.variables, *more)}.values()
    table = str(strategy.summary(model))
    total = next(line for line in table.splitlines() if line.startswith("  together"))
    said = total.split("  ")[-1].strip()
    assert said == f"{on_device(kept) / 1024:.1f} KiB"
    nbytes = sum(v.value.nbytes for v in kept)
    assert on_device(kept) < nbytes * (0.14 if shards else 0.52)


@pytest.mark.parametrize("name", BACKBONES)
def test_adapters_of_a_backbone(name):
    """Its own `enable_lora`: the base is frozen and divided, and has no slots."""
    strategy, _ = two_by_four(BACKBONES[name], shards=True)
    found = trained(strategy, BACKBONES[name], lora=True)
    assert_equal(found, on_one_device(name, lora=True))
    model = found[0]
    adapters = [v for v in model.trainable_variables if "lora" in v.path]
    assert len(adapters) == 2 * 2 * 2  # Queries and values.
    base = [v for v in model.non_trainable_variables if v.name == "kernel"]
    assert base and all(v.value.sharding.is_fully_replicated is False for v in base)
    slots = [v for v in model.optimizer.variables if "kernel_m" in v.path]
    assert not [v for v in slots if "lora" not in v.path]
