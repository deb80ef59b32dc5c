"""Five moments of a training in three systems: `keras.distribution`, `tf.distribute`,
and keras_distribute.

    # Writes results/why.md and .json, in about ten minutes:
    python benchmarks/why.py
    # Some of the cases, which take their places among the others' results:
    python benchmarks/why.py --only last_batch custom_loop

Each case runs in a process of its own, on four virtual CPU devices, with the digits of
scikit-learn and the same weights to begin with. What is reported is how far the weights
are, after the training, from those of plain Keras on one device with the same backend;
or the error. The last row takes its numbers from results/step_time.json.
"""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import numpy as np
import report
from contenders import Measured

DEVICES = 4
BATCH = 128
# Batches that all divide over the devices; a last one of 29 rows; and one of 3, fewer
# than there are devices.
EVEN, ODD, FEW = 1408, 1437, 1411
EPOCHS = 3
SYSTEMS = {
    "plain": "Keras on JAX, one device",
    "data_parallel": "`keras.distribution`",
    "ours": "keras_distribute",
    "tf_plain": "Keras on TensorFlow, one device",
    "tf_mirrored": "`tf.distribute`",
}
ONE_DEVICE = {"data_parallel": "plain", "ours": "plain", "tf_mirrored": "tf_plain"}
CASES = ("last_batch", "batch_norm", "custom_loop", "kill", "curves")
# Of the steps of an epoch of 11; in the second epoch.
KILLED_AFTER, SAVED_EVERY = 5, 4


# In the process of a case.
# --------------------------------------------------------------------------------------


class System:
    """One of `SYSTEMS`, set up in this process."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.strategy: Any = None
        if name == "ours":
            import keras_distribute as kd

            kd.config.set_cpu_devices(DEVICES)
            self.strategy = kd.MirroredStrategy()
        elif name == "data_parallel":
            import jax

            jax.config.update("jax_num_cpu_devices", DEVICES)
            import keras

            keras.distribution.set_distribution(
                keras.distribution.DataParallel(
                    devices=keras.distribution.list_devices()
                )
            )
        elif name == "tf_mirrored":
            import tensorflow as tf

            tf.config.set_logical_device_configuration(
                tf.config.list_physical_devices("CPU")[0],
                [tf.config.LogicalDeviceConfiguration()] * DEVICES,
            )
            self.strategy = tf.distribute.MirroredStrategy(
                [f"CPU:{i}" for i in range(DEVICES)]
            )
        if self.strategy is not None:
            assert self.strategy.num_replicas_in_sync == DEVICES

    def build(self, make: Callable[[], Any]) -> Any:
        """What `make` returns, made in the strategy's scope if there is one."""
        if self.strategy is None:
            return make()
        with self.strategy.scope():
            return make()


def digits() -> tuple[np.ndarray, np.ndarray]:
    from sklearn.datasets import load_digits

    data = load_digits()
    order = np.random.default_rng(0).permutation(len(data.target))
    x, y = (data.data / 16).astype("float32"), data.target.astype("int32")
    return x[order], y[order]


def dense_model(batch_norm: dict[str, Any] | None = None) -> Any:
    """A compiled model, with the same weights under every backend."""
    import keras

    layers = [keras.Input((64,)), keras.layers.Dense(32)]
    if batch_norm is not None:
        layers.append(keras.layers.BatchNormalization(momentum=0.9, **batch_norm))
    layers += [keras.layers.ReLU(), keras.layers.Dense(10)]
    model = keras.Sequential(layers)
    rng = np.random.default_rng(1)
    model.set_weights(
        [
            rng.normal(scale=0.1, size=weight.shape) if weight.ndim == 2 else weight
            for weight in model.get_weights()
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.1), loss)
    return model


def steps_of(model: Any) -> int:
    """How many steps its optimizer has taken."""
    # TensorFlow's mirrored variables are no numbers to `int`.
    return int(np.asarray(model.optimizer.iterations.value))


def outcome(model: Any, work: Callable[[], Any]) -> dict[str, Any]:
    """What became of it: the weights, or an error; and the steps that were taken."""
    found: dict[str, Any] = {}
    try:
        work()
    except Exception as error:
        found["error"] = type(error).__name__
        found["text"] = " ".join(str(error).split())[:400]
    weights = [np.asarray(w, "float64").tolist() for w in model.get_weights()]
    return {**found, "weights": weights, "steps": steps_of(model)}


def last_batch(system: System) -> dict[str, Any]:
    """`fit` over rows that divide, and over rows that do not."""
    x, y = digits()
    found = {}
    for rows in (EVEN, ODD):
        model = system.build(dense_model)
        options = {"batch_size": BATCH, "epochs": EPOCHS, "shuffle": False}
        found[str(rows)] = outcome(
            model,
            lambda m=model, n=rows, o=options: m.fit(x[:n], y[:n], verbose=0, **o),
        )
    return found


def batch_norm(system: System) -> dict[str, Any]:
    """Both kinds of BatchNormalization, and the copies of its moving statistics."""
    x, y = digits()
    found = {}
    for kind, options in (("replica", {}), ("synchronized", {"synchronized": True})):
        for rows in (EVEN, ODD, FEW):
            name = f"{kind} {rows}"
            alone = system.name in ("plain", "tf_plain")
            # One device has the whole batch anyway.
            given = {} if alone else options
            try:
                model = system.build(lambda o=given: dense_model(o))
            except Exception as error:
                text = " ".join(str(error).split())[:400]
                found[name] = {"error": type(error).__name__, "text": text}
                continue
            fixed = {"batch_size": BATCH, "epochs": EPOCHS, "shuffle": False}
            found[name] = outcome(
                model,
                lambda m=model, n=rows, o=fixed: m.fit(x[:n], y[:n], verbose=0, **o),
            )
            if not alone:
                found[name]["copies"] = copies(model.layers[1].moving_mean, system)
    return found


def copies(variable: Any, system: System) -> list[list[float]]:
    """A variable's value on each device."""
    if system.name == "tf_mirrored":
        held = [np.asarray(each) for each in variable.value.values]
    else:
        held = [np.asarray(each.data) for each in variable.value.addressable_shards]
    return [each.tolist() for each in held]


def custom_loop(system: System) -> dict[str, Any]:
    """The same steps, in a loop that the user writes."""
    x, y = digits()
    found = {}
    for rows in (EVEN, ODD):
        for kind in ("constant", "counted") if system.name == "tf_mirrored" else ("",):
            model = system.build(dense_model)
            loop = functools.partial(
                LOOPS[system.name], system, model, x[:rows], y[:rows], kind
            )
            found[f"{kind} {rows}".strip()] = outcome(model, loop)
    return found


def loop_of_ours(
    system: System, model: Any, x: np.ndarray, y: np.ndarray, kind: str
) -> None:
    import keras_distribute as kd

    data = kd.ArrayDataset((x, y), batch_size=BATCH)
    data = system.strategy.experimental_distribute_dataset(data)

    def step(x: Any, y: Any) -> Any:
        variables = model.trainable_variables
        loss, gradients = kd.value_and_grad(
            lambda x, y: model.loss(y, model(x, training=True)), variables
        )(x, y)
        model.optimizer.apply(gradients, variables)
        return loss

    for _ in range(EPOCHS):
        for batch in data:
            system.strategy.run(step, args=batch)


def loop_of_tensorflow(
    system: System, model: Any, x: np.ndarray, y: np.ndarray, kind: str
) -> None:
    """As TensorFlow's tutorial has it: a loss for each row, divided by the constant
    global batch size; or, with `kind="counted"`, by the rows that there are.
    """
    import keras
    import tensorflow as tf

    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH)
    with system.strategy.scope():
        loss_of = keras.losses.SparseCategoricalCrossentropy(
            from_logits=True, reduction="none"
        )
        data = system.strategy.experimental_distribute_dataset(data)

    def step(x: Any, y: Any) -> Any:
        rows = BATCH
        if kind == "counted":
            context = tf.distribute.get_replica_context()
            rows = context.all_reduce("SUM", tf.shape(x)[0])
        with tf.GradientTape() as tape:
            losses = loss_of(y, model(x, training=True))
            loss = tf.nn.compute_average_loss(losses, global_batch_size=rows)
        gradients = tape.gradient(loss, model.trainable_variables)
        model.optimizer.apply_gradients(
            zip(gradients, model.trainable_variables, strict=True)
        )
        return loss

    @tf.function
    def distributed(batch: Any) -> Any:
        return system.strategy.run(step, args=batch)

    for _ in range(EPOCHS):
        for batch in data:
            distributed(batch)


def loop_of_jax(
    system: System, model: Any, x: np.ndarray, y: np.ndarray, kind: str
) -> None:
    """As Keras's guide to custom loops in JAX has it, with the batches put on the
    devices where a distribution is set.
    """
    import jax
    import keras

    optimizer = model.optimizer
    optimizer.build(model.trainable_variables)
    distribution = keras.distribution.distribution()

    def loss_of(trainable: Any, others: Any, x: Any, y: Any) -> Any:
        logits, others = model.stateless_call(trainable, others, x, training=True)
        return model.loss(y, logits), others

    @jax.jit
    def step(state: Any, x: Any, y: Any) -> Any:
        trainable, others, slots = state
        gradients = jax.value_and_grad(loss_of, has_aux=True)
        (_, others), grads = gradients(trainable, others, x, y)
        trainable, slots = optimizer.stateless_apply(slots, grads, trainable)
        return trainable, others, slots

    def put(array: np.ndarray) -> Any:
        if distribution is None:
            return array
        layout = distribution.get_data_layout(array.shape)
        return keras.distribution.distribute_tensor(array, layout)

    groups = (
        model.trainable_variables,
        model.non_trainable_variables,
        optimizer.variables,
    )
    state = tuple([v.value for v in group] for group in groups)
    try:
        for _ in range(EPOCHS):
            for i in range(0, len(x), BATCH):
                state = step(state, put(x[i : i + BATCH]), put(y[i : i + BATCH]))
    finally:
        for group, values in zip(groups, state, strict=True):
            for variable, value in zip(group, values, strict=True):
                variable.assign(value)


def loop_of_tensorflow_alone(
    system: System, model: Any, x: np.ndarray, y: np.ndarray, kind: str
) -> None:
    import tensorflow as tf

    for _ in range(EPOCHS):
        for i in range(0, len(x), BATCH):
            with tf.GradientTape() as tape:
                logits = model(x[i : i + BATCH], training=True)
                loss = model.loss(y[i : i + BATCH], logits)
            gradients = tape.gradient(loss, model.trainable_variables)
            model.optimizer.apply(gradients, model.trainable_variables)


LOOPS = {
    "plain": loop_of_jax,
    "data_parallel": loop_of_jax,
    "ours": loop_of_ours,
    "tf_plain": loop_of_tensorflow_alone,
    "tf_mirrored": loop_of_tensorflow,
}


def kill(system: System) -> dict[str, Any]:
    """One start of a training that is killed in the middle of its second epoch where
    the environment says so; `main` starts it again.
    """
    import keras

    x, y = digits()
    keras.utils.set_random_seed(1)
    model = system.build(dense_model)
    every: Any = os.environ["WHY_SAVES"]
    every = every if every == "epoch" else int(every)
    if system.name == "ours":
        import keras_distribute as kd

        backup = kd.callbacks.BackupAndRestore(
            os.environ["WHY_FOLDER"], save_freq=every
        )
    else:
        backup = keras.callbacks.BackupAndRestore(
            os.environ["WHY_FOLDER"], save_freq=every
        )
    callbacks = [backup]
    if "WHY_KILL" in os.environ:
        steps = EVEN // BATCH + KILLED_AFTER

        class Kill(keras.callbacks.Callback):
            def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
                if steps_of(self.model) >= steps:
                    os.kill(os.getpid(), signal.SIGKILL)

        callbacks.append(Kill())
    # Shuffled, as `fit` does where nothing else is said.
    return outcome(
        model,
        lambda: model.fit(
            x[:EVEN],
            y[:EVEN],
            batch_size=BATCH,
            epochs=EPOCHS,
            callbacks=callbacks,
            verbose=0,
        ),
    )


def curves(system: System) -> dict[str, Any]:
    """The loss of each epoch of a convolutional network with dropout."""
    import keras
    from keras import layers

    x, y = digits()
    x = x.reshape(-1, 8, 8, 1)

    def make() -> Any:
        keras.utils.set_random_seed(1)
        model = keras.Sequential(
            [
                keras.Input((8, 8, 1)),
                layers.Conv2D(16, 3, padding="same", use_bias=False),
                layers.BatchNormalization(momentum=0.9, synchronized=True),
                layers.ReLU(),
                layers.Conv2D(32, 3, strides=2, padding="same", activation="relu"),
                layers.Flatten(),
                layers.Dropout(0.3),
                layers.Dense(10),
            ]
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(3e-3), loss)
        return model

    import keras_distribute  # noqa: F401  # Lets plain Keras take `synchronized`, too.

    model = system.build(make)
    history = model.fit(
        x[:ODD],
        y[:ODD],
        batch_size=BATCH,
        epochs=12,
        validation_data=(x[ODD:], y[ODD:]),
        verbose=0,
    ).history
    return {"loss": history["loss"], "val_loss": history["val_loss"]}


# In the process that compares.
# --------------------------------------------------------------------------------------


def child(case: str, system: str, **more: str) -> dict[str, Any] | None:
    """What a case returned in a process of its own; None if that was killed."""
    environment = os.environ | {
        "KERAS_BACKEND": "tensorflow" if system.startswith("tf_") else "jax",
        "JAX_PLATFORMS": "cpu",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "PYTHONPATH": os.pathsep.join(
            [str(report.ROOT), os.environ.get("PYTHONPATH", "")]
        ).rstrip(os.pathsep),
        **more,
    }
    if system == "data_parallel":
        environment["NPROC"] = str(8 * DEVICES)  # keras_distribute does this by itself
    result = subprocess.run(
        [sys.executable, __file__, "--child", case, system],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    if result.returncode == -signal.SIGKILL:
        return None
    if result.returncode:
        raise RuntimeError(f"{case}, {system}:\n{result.stderr[-3000:]}")
    return json.loads(result.stdout.splitlines()[-1])


def far(found: dict[str, Any], expected: dict[str, Any]) -> float:
    """The largest difference between the weights of two trainings."""
    pairs = zip(found["weights"], expected["weights"], strict=True)
    return max(float(np.abs(np.subtract(a, b)).max()) for a, b in pairs)


def judged(found: dict[str, Any], expected: dict[str, Any] | None) -> dict[str, Any]:
    """An outcome without its weights, and beside it how far these are."""
    left = ("weights",) if "error" not in found else ("weights", "copies")
    short = {key: value for key, value in found.items() if key not in left}
    if "error" in found or expected is None:
        return short
    flat = np.concatenate([np.ravel(each) for each in found["weights"]])
    short["nan_weights"] = int(np.isnan(flat).sum())
    short["weights"] = flat.size
    if not short["nan_weights"]:
        short["difference"] = far(found, expected)
    if "copies" in found:
        held = np.asarray(found["copies"])
        short["copies_differ"] = float(np.abs(held - held[0]).max())
        # After gamma and beta, of `fit`'s order.
        saved = np.asarray(found["weights"][4])
        short["saved_is_copy"] = [bool(np.array_equal(saved, each)) for each in held]
        del short["copies"]
    return short


def compared(case: str) -> dict[str, Any]:
    """A case in all systems, each beside its one device."""
    raw = {system: child(case, system) for system in SYSTEMS}
    found: dict[str, Any] = {}
    for system, one in ONE_DEVICE.items():
        found[system] = {}
        for name, each in raw[system].items():
            rows = name.split()[-1]
            same = raw[one].get(name) or raw[one][rows]
            found[system][name] = judged(each, same)
    return found


def killed() -> dict[str, Any]:
    """By system and by how often it saves: a training that is killed, and goes on."""
    found: dict[str, Any] = {}
    for system in SYSTEMS:
        found[system] = {}
        for saves in (str(SAVED_EVERY), "epoch"):
            with tempfile.TemporaryDirectory() as folder:
                whole = {"WHY_FOLDER": f"{folder}/whole", "WHY_SAVES": saves}
                expected = child("kill", system, **whole)
                again = whole | {"WHY_FOLDER": f"{folder}/again"}
                assert child("kill", system, WHY_KILL="1", **again) is None
                result = child("kill", system, **again)
            assert expected is not None and result is not None
            found[system][saves] = judged(result, expected) | {
                "steps_without_kill": expected["steps"]
            }
    return found


def speed() -> dict[str, float]:
    """Ratios of results/step_time.json, each that of the median round."""
    facts = json.loads((report.RESULTS / "step_time.json").read_text("utf-8"))

    def over(comparison: str, contender: str, other: str) -> float:
        one, base = (Measured(**facts[comparison][n]) for n in (contender, other))
        return one.over(base)

    found = {}
    for name in ("mlp_fit", "cnn_fit"):
        found[f"{name} data_parallel"] = over(name, "data_parallel", "ours")
        if name == "mlp_fit":
            found[f"{name} tf_mirrored"] = over(name, "tf_mirrored", "ours")
        else:  # Convolutions of two frameworks: each beside its own one device.
            found[f"{name} tf_mirrored own"] = over(name, "tf_mirrored", "tf_one")
            found[f"{name} ours own"] = over(name, "ours", "plain")
            found[f"{name} data_parallel own"] = over(name, "data_parallel", "plain")
    return found


# Words.
# --------------------------------------------------------------------------------------


def number(value: float) -> str:
    """0 as 0, others as `2.4e-02`."""
    return f"{value:.1e}" if value else "0"


def said(found: dict[str, Any]) -> str:
    """An outcome in a few words."""
    if "error" in found:
        return f"`{found['error']}`" + (
            f" after {found['steps']} steps" if found.get("steps") else ""
        )
    if found["nan_weights"]:
        return f"**{found['nan_weights']} of {found['weights']} weights are NaN**"
    far_off = found["difference"] > 1e-5
    return (
        f"**{number(found['difference'])}**" if far_off else number(found["difference"])
    )


def rows_of(facts: dict[str, Any]) -> list[list[str]]:
    order = ("data_parallel", "tf_mirrored", "ours")

    def row(title: str, case: str, name: str) -> list[str]:
        cells = [said(facts[case][each][name]) for each in order]
        if "[2]" in title:  # By design.
            cells = [c if "NaN" in c else c.replace("**", "") for c in cells]
        return [title, *cells]

    def resumed(saves: str) -> list[str]:
        cells = []
        for each in order:
            found = facts["kill"][each][saves]
            steps = f"{found['steps']} steps for {found['steps_without_kill']}"
            same = "equal bits" if found["difference"] == 0 else said(found)
            cells.append(f"{same}, {steps}")
        how = "at each epoch" if saves == "epoch" else f"every {saves} steps"
        return [f"killed in an epoch, started again; saves {how}", *cells]

    def statistics_of() -> list[str]:
        cells = []
        for each in order:
            found = facts["batch_norm"][each][f"replica {EVEN}"]
            cells.append(number(found["copies_differ"]))
        return ["copies of its moving mean differ among the devices by", *cells]

    loops = facts["custom_loop"]
    loop = [f"custom loop, {ODD} rows"]
    for each in order:
        if each == "tf_mirrored":
            constant = said(loops[each][f"constant {ODD}"])
            counted = said(loops[each][f"counted {ODD}"])
            loop.append(f"{constant}; {counted} where the rows are counted [1]")
        else:
            loop.append(said(loops[each][str(ODD)]))
    even_loop = [f"custom loop, {EVEN} rows"]
    for each in order:
        name = f"constant {EVEN}" if each == "tf_mirrored" else str(EVEN)
        even_loop.append(said(loops[each][name]))
    speeds = facts["speed"]
    return [
        row(f"`fit`, {EVEN} rows: all batches divide", "last_batch", str(EVEN)),
        row(f"`fit`, {ODD} rows: a last batch of 29", "last_batch", str(ODD)),
        row(
            f"`BatchNormalization(synchronized=True)`, {EVEN} rows",
            "batch_norm",
            f"synchronized {EVEN}",
        ),
        row(
            f"`BatchNormalization(synchronized=True)`, {ODD} rows",
            "batch_norm",
            f"synchronized {ODD}",
        ),
        row(
            f"`BatchNormalization()`, {EVEN} rows [2]", "batch_norm", f"replica {EVEN}"
        ),
        row(f"`BatchNormalization()`, {ODD} rows [2]", "batch_norm", f"replica {ODD}"),
        row(
            f"`BatchNormalization()`, {FEW} rows: a last batch of 3 [2]",
            "batch_norm",
            f"replica {FEW}",
        ),
        statistics_of(),
        even_loop,
        loop,
        resumed(str(SAVED_EVERY)),
        resumed("epoch"),
        [
            "time of a step, dense model, ours = 1",
            f"{speeds['mlp_fit data_parallel']:.2f}",
            f"{speeds['mlp_fit tf_mirrored']:.2f}",
            "1.00",
        ],
        [
            "time of a step, convolutions, own single device = 1",
            f"{speeds['cnn_fit data_parallel own']:.2f}",
            f"{speeds['cnn_fit tf_mirrored own']:.2f}",
            f"{speeds['cnn_fit ours own']:.2f}",
        ],
    ]


def markdown(facts: dict[str, Any]) -> str:
    header = [
        "",
        "`keras.distribution.DataParallel`",
        "`tf.distribute.MirroredStrategy`",
        "keras_distribute",
    ]
    errors: dict[str, str] = {}  # By name, the text of the first.
    for case in ("last_batch", "batch_norm", "custom_loop"):
        for system in facts[case].values():
            for found in system.values():
                if "error" in found:
                    errors.setdefault(found["error"], found["text"])
    note = (
        "Four virtual CPU devices; batches of 128 rows, three epochs, SGD. A number is "
        "the largest difference of a weight from plain Keras on one device with the "
        "same backend (for a training that was killed, from the same training that was "
        "not); bold where it is more than the rounding of float32. `tf.distribute` "
        "runs Keras 3 on TensorFlow, the others run Keras on JAX. A training that is "
        "killed gets `SIGKILL` after step 16 of 33, the fifth of its second epoch; the "
        "script is then started again, with `BackupAndRestore` of Keras, or of "
        "keras_distribute. Its batches are shuffled, as `fit` does by default. The "
        "times are ratios of `step_time.md`."
    )
    notes = (
        "[1] The loop of TensorFlow's tutorial divides each row's loss by a constant "
        "global batch size, so that the rows of a smaller last batch count less; "
        "dividing by the number of rows that there are, summed over the replicas, is "
        "exact. [2] With `tf.distribute` and keras_distribute each replica normalizes "
        "its own rows, with `DataParallel` the whole batch is normalized: a difference "
        "from one device is by design, NaN is not."
    )
    texts = "\n".join(f"- `{name}`: {text}" for name, text in errors.items())
    versions = ", ".join(
        f"{name} {importlib.metadata.version(name)}"
        for name in ("tensorflow_cpu", "scikit-learn")
    )
    return (
        report.table(header, rows_of(facts), "llll")
        + f"\n\n{note}\n\n{notes}\n\nThe errors:\n\n{texts}\n\n"
        + f"Also with {versions}."
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=(*CASES, "speed"), nargs="+", default=[])
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        case, system = arguments.child
        print(json.dumps(globals()[case](System(system))))
        return
    facts = stored() if arguments.only else {}
    for case in arguments.only or CASES:
        if case == "speed":
            continue  # It is read below.
        if case == "kill":
            facts[case] = killed()
        elif case == "curves":
            facts[case] = {each: child(case, each) for each in ("plain", "ours")}
        else:
            facts[case] = compared(case)
        print(case, "done", flush=True)
    facts["speed"] = speed()
    report.write("why", facts, markdown(facts))


def stored() -> dict[str, Any]:
    """What results/why.json has."""
    path = report.RESULTS / "why.json"
    return json.loads(path.read_text("utf-8")) if path.exists() else {}


if __name__ == "__main__":
    main()
