"""`kd.find_batch_size`: searches the largest batch that a model trains on here."""

from __future__ import annotations

from typing import Any, NamedTuple

import keras

from keras_distribute import checks
from keras_distribute._compat import building
from keras_distribute._compat import trainer as compat
from keras_distribute.batch_size import example
from keras_distribute.batch_size.host_copy import HostCopy
from keras_distribute.batch_size.result import BatchSizeResult, recommended
from keras_distribute.batch_size.trials import Trials
from keras_distribute.dry_run import fitting
from keras_distribute.dry_run.models import refuse_eager
from keras_distribute.errors import (
    ContextError,
    OutOfMemoryError,
    StructureTypeError,
    ValueStructureError,
)
from keras_distribute.strategies.parameter_server import ParameterServerStrategy
from keras_distribute.training import adoption, calls
from keras_distribute.training.steps.choose import compile_step
from keras_distribute.training.trainer import called

_NAME = "find_batch_size"
_MOST = 2**31 - 1
_MOST_TRIALS = 25  # As Lightning's `max_trials`.


def find_batch_size(
    model: keras.Model,
    x: Any,
    y: Any = None,
    sample_weight: Any = None,
    *,
    starting_batch_size: int | None = None,
    max_batch_size: int | None = None,
    global_batch_size: int | None = None,
    memory_limit: int | None = None,
    margin: float = 0.05,
    steps_per_trial: int = 3,
) -> BatchSizeResult:
    """Searches the largest global batch that `fit` has memory for, by training steps
    that really run on the devices at hand.

    Each size is compiled once, and a few of its steps run. Where one runs out of memory
    (XLA's `RESOURCE_EXHAUSTED`, or a `MemoryError`), smaller ones follow; else larger
    ones, in the proportion in which the compiled programs take memory, or twice as
    large where the devices do not say what they have. The search ends within three
    percent. However it ends, also by Ctrl-C or an error, the model has the values that
    it had, bit for bit: weights, optimizer, metrics, seeds. Meanwhile they are in host
    memory, and no other thread can use the model.

    Of several processes all call it, with data of one form and the same numbers
    (`memory_limit` may differ), and get the same result: that of the one with the least
    memory.

    Sources: Accelerate's `find_executable_batch_size`, and Lightning's
    `Tuner.scale_batch_size`, whose `margin` and `steps_per_trial` these are.

    Args:
        model: A compiled model, under any synchronous strategy or none. It is built
            here where it is not yet.
        x: What `fit` takes: arrays or any dataset. The rows of its first batch are
            repeated as often as needed; of a generator, a model without a strategy
            uses up that batch.
        y: Labels, for arrays.
        sample_weight: Likewise.
        starting_batch_size: The first batch to try; by default that of the dataset, and
            32 for arrays, as in `fit`.
        max_batch_size: The largest to try, such as the rows of an epoch.
        global_batch_size: The batch that one update is to be made of. The result then
            says in how many parts it fits, for the optimizer's
            `gradient_accumulation_steps`, with room for the accumulators.
        memory_limit: Bytes that the steps may take of each device, by the compiler's
            account; larger batches are not run. For devices that are shared, and for
            CPUs, which the system ends without an error when memory is short.
        margin: How much less than the largest batch to recommend, as a fraction: memory
            falls into pieces in a long training.
        steps_per_trial: How many steps to run with each batch.

    Returns:
        A `kd.BatchSizeResult`. Its batches are global ones, multiples of the number of
        replicas where they can be.

    Raises:
        ContextError: Under parameter servers, whose workers have no global batch, in a
            `keras.distribution`, and in a `fit` of the same model.
        InputError: For data that `fit` does not take.
        OutOfMemoryError: Where not even one row a replica has room.
        StructureTypeError: For what is no compiled model.
        ValueStructureError: On CPUs without any limit, and for numbers that contradict
            each other.

    Example:
        >>> import keras, numpy as np, keras_distribute as kd
        >>> with kd.MirroredStrategy(["cpu:0", "cpu:1"]).scope():
        ...     layers = [keras.layers.Dense(64), keras.layers.Dense(1)]
        ...     model = keras.Sequential([keras.Input((8,)), *layers])
        ...     model.compile("sgd", "mse")
        >>> x = np.ones((64, 8), "float32")
        >>> kd.find_batch_size(model, x, x[:, :1], max_batch_size=100).recommended
        100
    """
    _check(model)
    for name, value in (
        ("starting_batch_size", starting_batch_size),
        ("max_batch_size", max_batch_size),
        ("global_batch_size", global_batch_size),
    ):
        if value is not None:
            what = f"{name} is a number of rows, at least 1."
            checks.count(name, value, 1, most=_MOST, what=what, fix=f"{name}=1024")
    if memory_limit is not None:
        what = "The memory that a step may take is a number of bytes."
        fix = "memory_limit=16 * 2**30"
        checks.count("memory_limit", memory_limit, 1, what=what, fix=fix)
    what, fix = "The margin is a fraction, from 0 to less than 1.", "margin=0.05"
    checks.number("margin", margin, zero=True, what=what, fix=fix)
    if margin >= 1:
        raise ValueStructureError(what, received=f"margin={margin}.", fix=fix)
    checks.count("steps_per_trial", steps_per_trial, 1)

    wanted = _Wanted(
        starting_batch_size, max_batch_size, global_batch_size, margin, steps_per_trial
    )

    def search() -> BatchSizeResult:
        batch = example.first_batch(x, y, sample_weight)
        return _search(model, batch, wanted, memory_limit)

    return called(model, _NAME, search, (), {})


class _Wanted(NamedTuple):
    """The arguments that have to be the same in all processes."""

    starting_batch_size: int | None
    max_batch_size: int | None
    global_batch_size: int | None
    margin: float
    steps_per_trial: int


def _search(
    model: Any, batch: Any, wanted: _Wanted, memory_limit: int | None
) -> BatchSizeResult:
    whole = wanted.global_batch_size
    strategy = adoption.strategy_of(model)
    building.build(model, batch)
    if strategy is not None:
        compile_step(model, "train")  # Raises where `fit` would.
    unit = 1 if strategy is None else strategy.num_replicas_in_sync
    groups = compat.state_variables(model, "train")
    saved = HostCopy([variable for group in groups for variable in group])
    trials = Trials(
        model,
        strategy,
        batch,
        saved,
        memory_limit=memory_limit,
        count=wanted.steps_per_trial,
        asked=str(wanted),
    )
    ends = [each for each in (wanted.max_batch_size, whole) if each is not None]
    highest = min(ends, default=None)
    _check_end(trials.limit, highest, unit)
    # Twice: an interruption of the first is made good by the second.
    try:
        try:
            start = wanted.starting_batch_size or trials.rows
            largest, too_large, tried = _largest(
                model, trials, unit, start, highest, whole
            )
        finally:
            saved.restore()
    finally:
        saved.restore()
    if not largest:
        raise _nothing_fits(unit, trials.limit)
    size, parts = recommended(
        largest,
        is_limited=too_large is not None,
        margin=wanted.margin,
        unit=unit,
        whole=whole,
    )
    return BatchSizeResult(
        largest=largest,
        too_large=too_large,
        recommended=size,
        gradient_accumulation_steps=parts,
        num_trials=tried,
    )


def _largest(
    model: Any,
    trials: Trials,
    unit: int,
    start: int,
    highest: int | None,
    whole: int | None,
) -> tuple[int, int | None, int]:
    """The largest batch that ran, the smallest that did not, and how many it took."""
    before = 0
    if whole is not None and whole == highest:
        before, needed = 1, trials.needed(whole)
        if needed is not None and (trials.limit is None or needed <= trials.limit):
            return whole, None, before
        start, highest = max(unit, whole // 2), whole - 1
    accumulates = whole is not None and not model.optimizer.gradient_accumulation_steps
    largest, too_large, tried = fitting.largest(
        lambda rows: trials.needed(rows, accumulates),
        trials.limit,
        unit,
        start,
        most=None if highest is None else max(unit, highest),
        most_trials=_MOST_TRIALS,
    )
    if too_large is None and before:
        too_large = whole
    return largest, too_large, before + tried


def _check(model: Any) -> None:
    what = "Batches are searched for a compiled Keras model."
    fix = 'model.compile("adam", loss) first.'
    checks.instance("model", model, keras.Model, what, fix)
    if not model.compiled or model.optimizer is None:
        raise StructureTypeError(what, received=f"{model!r}.", fix=fix)
    refuse_eager(model)
    strategy = adoption.strategy_of(model)
    if isinstance(strategy, ParameterServerStrategy):
        raise ContextError(
            "Under parameter servers each worker trains on batches of its own; there "
            "is no global batch to search.",
            received=f"a model of {strategy!r}.",
            fix="make the model under kd.MirroredStrategy() on one worker's devices, "
            "and give its result to every worker.",
        )
    if keras.distribution.distribution() is not None:
        raise ContextError(
            "Batches are searched for models of kd's strategies, or of none.",
            received=f"{keras.distribution.distribution()!r}.",
            fix="keras.distribution.set_distribution(None), and the model made under "
            "kd.MirroredStrategy().scope().",
        )
    call = calls.of(model)
    if call is not None:
        raise ContextError(
            "A batch size is searched before a model is trained.",
            received=f"a call in {call.name} of the same model.",
            fix="kd.find_batch_size(model, x, y) first, then model.fit(x, y, "
            "batch_size=result.recommended).",
        )


def _check_end(limit: int | None, highest: int | None, unit: int) -> None:
    if limit is None and highest is None:
        raise ValueStructureError(
            "CPUs do not say when their memory ends: the system ends the process, "
            "without an error.",
            received="neither memory_limit nor max_batch_size.",
            fix="memory_limit=4 * 2**30 for the bytes of each device, or "
            "max_batch_size=4096.",
        )
    if highest is not None and highest < unit:
        raise ValueStructureError(
            f"The largest batch to try has a row for each of {unit} replicas.",
            received=f"{highest} rows.",
            fix=f"max_batch_size={unit}, or more; global_batch_size likewise.",
        )


def _nothing_fits(unit: int, limit: int | None) -> OutOfMemoryError:
    known = "the memory of the devices" if limit is None else f"{limit} bytes of each"
    return OutOfMemoryError(
        f"Not even a batch of {unit} row(s), one a replica, has memory to train.",
        received=f"{known}.",
        fix='keras.mixed_precision.set_dtype_policy("mixed_bfloat16"), or '
        "kd.MirroredStrategy(shard_optimizer_state=True), before the model is made; or "
        "a smaller model.",
    )
