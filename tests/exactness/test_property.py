"""Any model, loss, weight, optimizer, batch size and input, on any number of replicas,
equals one device.

Hypothesis draws the cases: a few of some kinds of model by default, always the same
ones. For hundreds of cases of each kind, other ones each time, and shrinking of
what fails:

    export EVERY_CASE=1 HYPOTHESIS_PROFILE=thorough
    python -m pytest tests/exactness/test_property.py
"""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, Phase, event, given, settings
from hypothesis import strategies as st

from . import harness, zoo

QUIET = (HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much)
PROFILES = {
    "ci": settings(
        max_examples=2,
        derandomize=True,
        deadline=None,
        database=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=QUIET,
    ),
    "thorough": settings(
        max_examples=100, deadline=None, print_blob=True, suppress_health_check=QUIET
    ),
}
THOROUGH = os.environ.get("HYPOTHESIS_PROFILE") == "thorough"
PROFILE = PROFILES["thorough" if THOROUGH else "ci"]


@st.composite
def optimizers(draw: st.DrawFn) -> zoo.OptimizerChoice:
    """Any optimizer with any of the common options."""
    return zoo.OptimizerChoice(
        name=draw(st.sampled_from(sorted(zoo.OPTIMIZERS, reverse=True))),
        clip=draw(st.sampled_from([None, *zoo.CLIPS])),
        weight_decay=draw(st.sampled_from([None, 0.02])),
        accumulate=draw(st.sampled_from([None, None, 2, 3])),
        ema=draw(st.sampled_from([None, None, *zoo.EMAS])),
    )


@st.composite
def cases(draw: st.DrawFn, kind: str) -> zoo.Case:
    """Any run of a kind of model; the first choices, which hypothesis likes best, make
    an odd tail on 4 replicas.
    """
    flavour = draw(st.integers(0, zoo.FLAVOURS.get(kind, 2) - 1))
    optimizer = draw(optimizers())
    if kind == "own_step" and optimizer.name == "AdamW":
        optimizer = zoo.OptimizerChoice("Adam")
    batch_size = draw(st.sampled_from([8, 4, 12, 5, 16, 3, 1]))
    full_batches = draw(st.sampled_from([1, 2, 0]))
    tail = draw(st.integers(1, batch_size))
    scalar = kind not in ("recurrent", "functional")
    inputs = draw(st.sampled_from(zoo.INPUTS))
    # Keras takes class weights for labels of one dimension, and not beside a generator.
    classes = (
        kind not in ("functional", "values", "recurrent") and inputs != "generator"
    )
    weighted = ["none", "sample", *(["class"] if classes else [])]
    return zoo.Case(
        kind=kind,
        flavour=flavour,
        replicas=draw(st.sampled_from([4, 3, 8, 2, 1])),
        batch_size=batch_size,
        samples=full_batches * batch_size + tail,
        reduction=draw(
            st.sampled_from(zoo.REDUCTIONS if scalar else zoo.REDUCTIONS[:-1])
        ),
        optimizer=optimizer,
        weights=draw(st.sampled_from(weighted)),
        inputs=inputs,
        steps_per_execution=draw(st.sampled_from([1, 1, 2, 3])),
        shuffle=draw(st.booleans()),
        validate=draw(st.booleans()),
    )


@pytest.mark.sampled(10)
@pytest.mark.timeout(0 if THOROUGH else 240)
@pytest.mark.parametrize("kind", zoo.BUILDERS)
def test_equals_one_device(kind: str) -> None:
    """Weights, optimizer state, history, evaluation, predictions: as one device."""

    @PROFILE
    @given(cases(kind))
    def check(case: zoo.Case) -> None:
        event(f"{case.replicas} replicas, {case.reduction}")
        harness.equals_one_device(
            lambda: zoo.build_model(case), zoo.run_case(case), case.replicas
        )

    check()
