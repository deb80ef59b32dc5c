"""`DatasetCreator`: a dataset for `fit` that is made where it is read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from keras_distribute import checks
from keras_distribute.errors import InputError
from keras_distribute.input.options import InputContext, InputOptions
from keras_distribute.input.sharing import check_options


class DatasetCreator:
    """A function that makes a dataset, as the `x` of `fit` and `evaluate`.

    Under a `kd.ParameterServerStrategy` each worker calls it and reads its own dataset:
    no batch travels from the coordinator, and a step takes the next batch of whichever
    worker runs it. Under any other strategy it is
    `strategy.distribute_datasets_from_function(dataset_fn, input_options)`, with a
    batch for each replica; without one, what `dataset_fn` returns.

    The number of steps has to be said: `steps_per_epoch` in `fit`, with
    `validation_steps` for a `DatasetCreator` as `validation_data`, and `steps` in
    `evaluate`. An epoch goes on where the last one has stopped, so let the dataset
    repeat, and shuffle it differently on each worker. `evaluate` begins anew, and so
    does a worker that comes back.

    Source: `tf.keras.utils.experimental.DatasetCreator`. Differs from TF: a worker is
    told its number, where TensorFlow tells each that it is the only one; any kind of
    dataset, not `tf.data` alone; `predict` under a `ParameterServerStrategy` is
    refused, since rows of several workers have no order.

    Args:
        dataset_fn: From a `kd.InputContext` to a dataset of batches: of `tf.data`,
            Grain, torch, a `kd.ArrayDataset`, or a generator. For the workers of a
            `ParameterServerStrategy` it is pickled (cloudpickle), and is told
            `num_input_pipelines` workers, `input_pipeline_id` (its worker's number) and
            one replica in sync. The coordinator calls it once, too, to learn the form
            of batches, as worker 0.
        input_options: `kd.InputOptions`; none under a `ParameterServerStrategy`.

    Raises:
        StructureTypeError: For a `dataset_fn` that is no function, or options that are
            no `InputOptions`.

    Example:
        >>> import keras, numpy as np, keras_distribute as kd
        >>> def dataset_fn(context):
        ...     rng = np.random.default_rng(context.input_pipeline_id)
        ...     while True:
        ...         x = rng.normal(size=(32, 4)).astype("float32")
        ...         yield x, x.sum(axis=1, keepdims=True)
        >>> strategy = kd.ParameterServerStrategy()
        >>> with strategy.scope():
        ...     model = keras.Sequential([keras.layers.Dense(1)])
        ...     model.compile("sgd", "mse")
        >>> data = kd.experimental.DatasetCreator(dataset_fn)
        >>> history = model.fit(data, steps_per_epoch=20, epochs=2, verbose=0)
        >>> strategy.close()
    """

    def __init__(
        self,
        dataset_fn: Callable[[InputContext], Any],
        input_options: InputOptions | None = None,
    ) -> None:
        what = "A DatasetCreator has a function of an InputContext."
        fix = "kd.experimental.DatasetCreator(lambda context: make_dataset())"
        checks.function("dataset_fn", dataset_fn, what, fix)
        check_options(input_options)
        self.dataset_fn, self.input_options = dataset_fn, input_options

    def __repr__(self) -> str:
        return f"DatasetCreator({checks.shown(self.dataset_fn)})"


def batches_of(dataset: Any) -> Iterator[Any]:
    """One pass over what a dataset function of workers has returned.

    Raises:
        InputError: For what cannot be iterated.
    """
    if not (hasattr(dataset, "__iter__") or hasattr(dataset, "__getitem__")):
        raise InputError(
            "A dataset function returns a dataset, or whatever else can be iterated.",
            received=f"{checks.shown(dataset)}.",
            fix="return it: of tf.data, Grain, torch, kd.ArrayDataset((x, y), "
            "batch_size=64), or a generator of batches.",
        )
    return iter(dataset)
