"""One replica's program, made from one over all rows, gives what that gives: each
operation, in each way that rows can enter it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from keras_distribute.devices.by_rows import program, sums
from keras_distribute.devices.mesh import ReplicaMesh

pytestmark = pytest.mark.timeout(200)
RNG = np.random.default_rng(0)
N = 16
KEY = np.array([3, 4], "uint32")


def normal(*shape: int) -> np.ndarray:
    return RNG.normal(size=shape).astype("float32")


def run(
    function: Callable[..., Any],
    arguments: Sequence[Any],
    rows: Sequence[int | None],
    replicas: int,
) -> tuple[list[Any], program.OneReplica, sums.Parts]:
    """The results of one replica's program on each, what it is, and its two parts."""
    mesh = ReplicaMesh.of(jax.devices()[:replicas])
    traced = jax.make_jaxpr(function)(*arguments)
    own = program.of_one_replica(traced, rows, replicas)
    parts = sums.parts(own.program, [dim is None for dim in rows])
    found = jax.jit(lambda *given: sums.results_of(mesh, own, rows, given))(*arguments)
    return found, own, parts


def check(
    function: Callable[..., Any],
    arguments: Sequence[Any],
    rows: Sequence[int | None],
    replicas: int,
) -> str:
    """The text of the program, whose results have been compared."""
    found, own, _ = run(function, arguments, rows, replicas)
    expected = jax.tree.leaves(function(*map(jnp.asarray, arguments)))
    for a, b in zip(found, expected, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)
    return str(own.program)


def picked(x: Any, i: Any) -> Any:
    return jnp.take_along_axis(x, i[:, None], 1)


def loop(w: Any, x: Any) -> Any:
    """A recurrent layer."""

    def step(state: Any, at: Any) -> Any:
        state = jnp.tanh(at @ w + state)
        return state, state

    return lax.scan(step, jnp.zeros_like(x[:, 0]), jnp.swapaxes(x, 0, 1))


log2 = getattr(lax, "log2", jnp.log2)


def polynomial(x: Any, coefficients: Any) -> Any:
    own = getattr(lax, "polynomial", None)
    if own is None:
        return jnp.polyval(jnp.stack(coefficients[::-1]), x)
    return own(x, coefficients)


def halved(x: Any) -> Any:
    return lax.while_loop(lambda v: jnp.max(v) > 0.1, lambda v: v / 2, x)


X, Y, W, IMAGE, KERNEL = (
    normal(N, 6),
    normal(N, 5),
    normal(6, 5),
    normal(N, 8, 8, 3),
    normal(3, 3, 3, 4),
)
TOKENS, TABLE = RNG.integers(0, 9, (N, 4)).astype("int32"), normal(9, 6)
PLACES = RNG.integers(0, 6, N).astype("int32")
NUMBERS = ("NHWC", "HWIO", "NHWC")

# Of sums: from a dtype, to another one. Only the wider ones may be of parts of the sum.
CASTS = [
    ("float32", "int32"),
    ("float32", "uint8"),
    ("float32", "bool"),
    ("float32", "complex64"),
    ("bfloat16", "float32"),
    ("float16", "int16"),
    ("int32", "float32"),
]

# By what they do: the function, its arguments, and which of these have rows, where.
CASES: dict[str, tuple[Callable[..., Any], tuple[Any, ...], tuple[Any, ...]]] = {
    "elements": (lambda x, y: jnp.tanh(x) * y[:, :1] + 2, (X, Y), (0, 0)),
    "a bias": (lambda x, b: x + b, (X, normal(6)), (0, None)),
    "a whole array with rows": (lambda x, a: x * a, (X, X), (0, None)),
    "rows second": (lambda x: jnp.exp(x.T), (normal(6, N),), (1,)),
    "a dense layer": (lambda x, w: x @ w, (X, W), (0, None)),
    "the gradient of a weight": (lambda x, y: x.T @ y, (X, Y), (0, 0)),
    "a sum and a mean": (lambda x: (x.sum(), x.mean(0), x.mean(1)), (X,), (0,)),
    "mean and variance": (lambda x: (x - x.mean(0)) / x.std(0), (X,), (0,)),
    "extremes": (lambda x: (x.max(), x.min(0), x.max(1), x.argmax(1)), (X,), (0,)),
    "any and all": (lambda x: ((x > 0).any(0), (x > -9).all()), (X,), (0,)),
    "softmax": (lambda x: jax.nn.log_softmax(x), (X,), (0,)),
    "positions": (lambda x: x + jnp.arange(N)[:, None], (X,), (0,)),
    "a masked mean": (
        lambda x, m: jnp.sum(x * m[:, None]) / jnp.sum(m),
        (X, (normal(N) > 0).astype("float32")),
        (0, 0),
    ),
    "a choice": (lambda x: jnp.where(x > 0, x, 1.0), (X,), (0,)),
    "a product of batches": (
        lambda a, b: jnp.einsum("nij,njk->nik", a, b),
        (normal(N, 3, 4), normal(N, 4, 2)),
        (0, 0),
    ),
    "merged dimensions": (
        lambda x: jnp.reshape(jnp.reshape(x, (N * 3, 2)).sum(1), (N, 3)),
        (X,),
        (0,),
    ),
    "groups of rows": (lambda x: jnp.reshape(x, (8, 2, 6)).mean(1), (X,), (0,)),
    "dimensions gone": (lambda x: jnp.squeeze(x[:, None], 1), (X,), (0,)),
    "joined and cut": (lambda x, y: jnp.concatenate([x, y], 1)[:, 2:7], (X, Y), (0, 0)),
    "in pieces": (lambda x: jnp.split(x, 3, 1), (X,), (0,)),
    "stacked": (lambda x, y: jnp.stack([x[:, :5], y], 1), (X, Y), (0, 0)),
    "stacked in front": (lambda x: jnp.stack([x.T, x.T], 0), (X,), (0,)),
    "stacked sums": (
        lambda x, y, w: jnp.stack([x.T @ y, w], 2),
        (X, Y, W),
        (0, 0, None),
    ),
    "taken apart": (lambda x: jnp.unstack(x, axis=1), (X,), (0,)),
    "taken apart in front": (
        jax.grad(lambda x: jnp.sum(jnp.stack([x, x**2]) ** 3)),
        (X,),
        (0,),
    ),
    "repeated": (lambda x: jnp.tile(x, (1, 2)), (X,), (0,)),
    "repeated in front": (lambda x: jnp.tile(x, (2, 1, 3)), (X,), (0,)),
    "filled up": (lambda x: jnp.pad(x, ((0, 0), (1, 2))), (X,), (0,)),
    "reversed": (lambda x: x[:, ::-1], (X,), (0,)),
    "sorted": (lambda x: (jnp.sort(x, 1), jnp.argsort(x, 1)), (X,), (0,)),
    "largest": (lambda x: lax.top_k(x, 2), (X,), (0,)),
    "added up": (lambda x: jnp.cumsum(x, 1), (X,), (0,)),
    "a piece": (
        lambda x, i: lax.dynamic_slice(x, (0, i), (N, 2)),
        (X, np.int32(1)),
        (0, None),
    ),
    "a piece put in": (
        lambda x, y, i: lax.dynamic_update_slice(x, y[:, :2], (0, i)),
        (X, Y, np.int32(1)),
        (0, 0, None),
    ),
    "an embedding": (lambda t, i: t[i], (TABLE, TOKENS), (None, 0)),
    "its gradient": (
        lambda t, i: jax.grad(lambda t: jnp.sum(t[i] ** 2))(t),
        (TABLE, TOKENS),
        (None, 0),
    ),
    "one element a row": (picked, (X, PLACES), (0, 0)),
    "the gradient of that": (
        lambda x, i: jax.grad(lambda x: jnp.sum(picked(x, i) ** 2))(x),
        (X, PLACES),
        (0, 0),
    ),
    "columns": (lambda x: x[:, np.array([3, 0, 0])], (X,), (0,)),
    "the gradient of columns": (
        jax.grad(lambda x: jnp.sum(x[:, np.array([3, 0, 0])] ** 2)),
        (X,),
        (0,),
    ),
    "how many of each": (lambda i: jnp.zeros(9).at[i].add(1.0), (TOKENS,), (0,)),
    "added to what was there": (
        lambda a, i: jnp.asarray(a).at[i].add(1.0),
        (normal(9), TOKENS),
        (None, 0),
    ),
    "a convolution": (
        lambda x, k: lax.conv_general_dilated(
            x, k, (2, 2), "SAME", dimension_numbers=NUMBERS
        ),
        (IMAGE, KERNEL),
        (0, None),
    ),
    "its gradients": (
        jax.grad(
            lambda x, k: jnp.sum(
                lax.conv_general_dilated(
                    x, k, (2, 2), "SAME", dimension_numbers=NUMBERS
                )
                ** 2
            ),
            (0, 1),
        ),
        (IMAGE, KERNEL),
        (0, None),
    ),
    "a convolution in groups": (
        jax.grad(
            lambda x, k: jnp.sum(
                lax.conv_general_dilated(
                    x,
                    k,
                    (1, 1),
                    "SAME",
                    dimension_numbers=NUMBERS,
                    feature_group_count=3,
                )
                ** 2
            ),
            (0, 1),
        ),
        (IMAGE, normal(3, 3, 1, 6)),
        (0, None),
    ),
    "pooling": (
        jax.value_and_grad(
            lambda x: jnp.sum(
                lax.reduce_window(
                    x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID"
                )
                ** 2
            )
        ),
        (IMAGE,),
        (0,),
    ),
    "a loop": (loop, (normal(6, 6), normal(N, 4, 6)), (None, 0)),
    "its gradient in the weight": (
        jax.grad(lambda w, x: jnp.sum(loop(w, x)[0] ** 2)),
        (normal(6, 6), normal(N, 4, 6)),
        (None, 0),
    ),
    "a loop over rows": (lambda x: lax.map(lambda v: v * 2 + 1, x), (X,), (0,)),
    "a loop of unknown length": (halved, (X,), (0,)),
    "a loop of unknown length for each row": (
        lambda x, w: jax.vmap(
            lambda v: lax.while_loop(
                lambda c: jnp.max(c) > w[0], lambda c: c / 2 + w[1] * v / 9, v
            )
        )(x),
        (X, np.array([0.5, 0.1], "float32")),
        (0, None),
    ),
    "a condition": (
        lambda f, x: lax.cond(f > 0, jnp.sin, lambda v: v * 2, x),
        (np.float32(1), X),
        (None, 0),
    ),
    "sums in a condition": (
        lambda f, x: lax.cond(f > 0, jnp.sum, jnp.max, x),
        (np.float32(1), X),
        (None, 0),
    ),
    "computed again": (
        jax.grad(lambda w, x: jnp.sum(jax.checkpoint(jnp.tanh)(x @ w) ** 2)),
        (W, X),
        (None, 0),
    ),
    "what only later versions of JAX have": (
        jax.grad(lambda x: jnp.sum(polynomial(log2(x**2 + 1), (0.5, 2.0, 1.0)))),
        (X,),
        (0,),
    ),
    "inverses": (
        lambda a: jnp.linalg.cholesky(a @ jnp.swapaxes(a, 1, 2) + 3 * jnp.eye(3)),
        (normal(N, 3, 3),),
        (0,),
    ),
    "transforms of pieces": (
        lambda x: jnp.abs(jax.scipy.signal.stft(x, nperseg=4)[2]),
        (normal(N, 12),),
        (0,),
    ),
    "a transform": (lambda x: jnp.abs(jnp.fft.rfft(x)), (X,), (0,)),
    "sums scaled": (
        lambda x, w, s: ((x.T @ x) * s) @ w,
        (X, W, np.float32(3)),
        (0, None, None),
    ),
    "a norm of gradients": (
        lambda x, y: (lambda g: g / jnp.sqrt(jnp.sum(g**2)))(x.T @ y),
        (X, Y),
        (0, 0),
    ),
    "sums cast": (
        lambda x: [
            (jnp.round(4 * abs(x)) / 4).astype(before).sum(0, dtype=before).astype(to)
            for before, to in CASTS
        ],
        (X,),
        (0,),
    ),
    "extremes of what is no number": (
        lambda x: (x.max(), x.min(0), x.astype("bfloat16").max(0).astype("float32")),
        (np.where(np.arange(N * 6).reshape(N, 6) % 35 == 3, np.float32("nan"), X),),
        (0,),
    ),
    "nothing of rows": (lambda x, w: (x.sum(), w.T @ w), (X, W), (0, None)),
    "what came in": (lambda x, w: (x, w, x * 2), (X, W), (0, None)),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("replicas", [2, 4, 8])
@pytest.mark.parametrize("name", CASES)
def test_each_operation(name: str, replicas: int) -> None:
    text = check(*CASES[name], replicas)
    assert "all_gather" not in text


@pytest.mark.sampled(2)
@pytest.mark.parametrize("replicas", [3, 5, 7])
@pytest.mark.parametrize("name", CASES)
def test_rows_that_do_not_divide(name: str, replicas: int) -> None:
    """16 rows: of 7 replicas five have three of them, one has one, the last none."""
    text = check(*CASES[name], replicas)
    assert ("all_gather" in text) == (name == "groups of rows")


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_fewer_rows_than_replicas(rows: int) -> None:
    """What is behind the true rows is never seen, whatever it is made to be."""

    def function(w: Any, x: Any) -> Any:
        place = jnp.arange(rows, dtype="float32")[:, None]
        logits = jnp.log((rows - place) * jnp.exp(x)) @ w  # NaN behind the rows.
        sums = logits.T @ logits, logits.sum(), logits.mean(0)
        extremes = logits.max(), logits.min(0), (logits > 9).any(), (x < 9).all()
        counts = jnp.zeros(4).at[jnp.argmax(logits, 1)].add(logits[:, 0])
        return logits, sums, extremes, counts, logits - logits[::-1]

    check(function, (normal(6, 4), normal(rows, 6)), (None, 0), 4)


def drawn(kind: str) -> Callable[..., Any]:
    draws: dict[str, Callable[..., Any]] = {
        "uniform": jax.random.uniform,
        "normal": jax.random.normal,
        "bernoulli": lambda k, s: jax.random.bernoulli(k, 0.3, s),
        "bits": lambda k, s: jax.random.bits(k, s, "uint8"),
        "bfloat16": lambda k, s: jax.random.uniform(k, s, "bfloat16"),
    }
    return draws[kind]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("shape", [(N,), (N, 3), (N, 1, 5), (3, N)])
@pytest.mark.parametrize("kind", ["uniform", "normal", "bernoulli", "bits", "bfloat16"])
def test_draws_are_those_of_one_device(kind: str, shape: tuple[int, ...]) -> None:
    """To the bit, and no replica draws more than its rows'."""
    dim = shape.index(N)

    def function(key: Any, x: Any) -> Any:
        return jnp.where(x == 0, drawn(kind)(key, shape), 0)

    zeros = np.zeros(shape, "float32")
    found, _, parts = run(function, (KEY, zeros), (None, dim), 4)
    np.testing.assert_array_equal(found[0], function(KEY, zeros))
    own = [N // 4 if size == N else size for size in shape]
    text = str(parts.inside)
    assert f"u32[{','.join(map(str, own))}]" in text
    assert f"[{','.join(map(str, shape))}]" not in text


@pytest.mark.parametrize("replicas", [4, 3])
@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_draws_from_a_key_of_each_row(impl: str, replicas: int) -> None:
    """Where the rows are those of the keys, and where each key draws for all rows."""

    def function(x: Any) -> Any:
        keys = jax.random.split(jax.random.key(5, impl=impl), N)
        drawn = jax.vmap(lambda key: jax.random.uniform(key, (N,)))(keys)
        few = jax.vmap(lambda key: jax.random.uniform(key, (2, N)))(keys[:3])
        short = jax.vmap(lambda key: jax.random.uniform(key, (4,)))(keys)
        return x[:, :1] * drawn, x[:, 0] * drawn, x[:, 0] * few, x * short

    rows = normal(N, 4)
    found, *_ = run(function, (rows,), (0,), replicas)
    for a, b in zip(found, function(rows), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_draw_of_another_kind_is_cut() -> None:
    def function(key: Any, x: Any) -> Any:
        key = jax.random.wrap_key_data(key, impl="rbg")
        return x * jax.random.uniform(key, (N, 3))

    arguments = (np.arange(4, dtype="uint32"), normal(N, 3))
    found, *_ = run(function, arguments, (None, 0), 4)
    np.testing.assert_array_equal(found[0], function(*arguments))


MIXING: dict[str, Callable[[Any], Any]] = {
    "reversed": lambda x: x[::-1],
    "sorted": lambda x: jnp.sort(x, 0),
    "added up": lambda x: jnp.cumsum(x, 0),
    "similarities": lambda x: jnp.tanh(x @ x.T) @ x,
    "the largest": lambda x: jnp.argmax(x, 0),
    "one row": lambda x: x - x[:1],
    "rolled": lambda x: jnp.roll(x, 1, 0),
    "bits of whole numbers": lambda x: jnp.bitwise_or.reduce(x.astype("int32") * 5, 0),
    "all bits of them": lambda x: jnp.bitwise_and.reduce(x.astype("int32") - 5, 0),
    "a loop that carries": lambda x: lax.scan(lambda c, r: (c + r, c), x[0], x)[1],
}


@pytest.mark.parametrize("name", MIXING)
def test_what_mixes_few_rows_is_gathered(name: str) -> None:
    assert "all_gather" in check(MIXING[name], (X,), (0,), 4)


@pytest.mark.parametrize("name", MIXING)
def test_what_mixes_many_is_refused_by_name(name: str) -> None:
    def function(x: Any) -> Any:
        with jax.named_scope("mine"):
            return MIXING[name](x)

    traced = jax.make_jaxpr(function)(np.zeros((N, 8192), "float32"))
    with pytest.raises(program.MixedRows) as raised:
        program.of_one_replica(traced, [0], 4)
    assert raised.value.layer == "mine"
    assert raised.value.operation in str(traced)


def test_callbacks_into_python_are_refused() -> None:
    def function(x: Any) -> Any:
        return jax.pure_callback(lambda v: v, jax.ShapeDtypeStruct(X.shape, "f4"), x)

    traced = jax.make_jaxpr(function)(X)
    with pytest.raises(program.MixedRows, match="pure_callback"):
        program.of_one_replica(traced, [0], 4)


def test_what_follows_from_the_sums_is_outside() -> None:
    """An update of divided slots must not be part of a replica's program."""

    def function(w: Any, slot: Any, x: Any) -> Any:
        gradient = x.T @ (x @ w)
        slot = 0.9 * slot + gradient
        return w - slot, slot

    arguments = (normal(6, 6), normal(6, 6), X)
    found, own, parts = run(function, arguments, (None, None, 0), 4)
    for a, b in zip(found, function(*arguments), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)
    assert parts.taken == [0, 2]
    assert parts.made == [False, False]
    assert str(own.program).count("psum") == 1


@pytest.mark.parametrize("copied", [False, True])
def test_a_sum_is_made_before_it_is_copied_for_each_row(copied: bool) -> None:
    """Not before it gets another dimension, though it be as long as there are rows."""

    def function(x: Any) -> Any:
        total = jnp.sum(x, 0)
        changed = jnp.broadcast_to(total, (N, N)) if copied else total[None]
        return 2.0 * changed

    text = check(function, [normal(N, N)], [0], 2)
    summed, doubled = text.index("psum"), text.index(" mul")
    assert (summed < doubled) == copied


def test_a_gradient_is_summed_behind_a_loop() -> None:
    """And not in each of its turns."""

    def gradient(w: Any, x: Any) -> Any:
        return jax.grad(lambda w: jnp.sum(loop(w, x)[0] ** 2))(w)

    x = normal(N, 5, 3)
    arguments = (normal(3, 3), x)
    _, own, _ = run(gradient, arguments, (None, 0), 4)
    check(gradient, arguments, (None, 0), 4)
    loops = [eqn for eqn in own.program.jaxpr.eqns if eqn.primitive.name == "scan"]
    assert len(loops) == 2
    assert not any("psum" in str(eqn) for eqn in loops)
    assert str(own.program).count("psum") == 1


def test_long_sums_are_kept_in_parts() -> None:
    """Of many addends, and of what is added to itself again and again."""

    def function(total: Any, w: Any, x: Any) -> Any:
        many, twice = w + x.sum(0), w * 2.0**-60 + (x * 2.0**-60).sum(0)
        for _ in range(1000):
            many = many + w
        for _ in range(60):
            twice = twice + twice
        return total + checkpoint_name(many + twice, program.ADDEND)

    total, w, x = normal(4, 6), normal(6), normal(N, 6)
    traced = jax.make_jaxpr(function)(total[0], w, x)
    kept = program.Kept([0], [0])
    own = program.of_one_replica(traced, (None, None, 0), 4, kept=kept)
    mesh = ReplicaMesh.of(jax.devices()[:4])
    results = jax.jit(lambda *given: sums.results_of(mesh, own, (0, None, 0), given))
    found = results(total, w, x)[0]
    expected = function(total.sum(0), w, x)
    np.testing.assert_allclose(found.sum(0), expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("penalty", [False, True])
def test_sums_that_are_kept_in_parts(penalty: bool) -> None:
    """As gradients that are added up over several steps."""

    def function(total: Any, w: Any, x: Any) -> Any:
        gradient = x.T @ jnp.sin(x @ w)
        if penalty:
            gradient += 0.1 * w
        return total + checkpoint_name(gradient, program.ADDEND), w * 2

    total, w, x = normal(4, 6, 6), normal(6, 6), normal(N, 6)
    traced = jax.make_jaxpr(function)(total[0], w, x)
    kept = program.Kept([0], [0])
    own = program.of_one_replica(traced, (None, None, 0), 4, kept=kept)
    mesh, rows = ReplicaMesh.of(jax.devices()[:4]), (0, None, 0)
    results = jax.jit(lambda *given: sums.results_of(mesh, own, rows, given))
    compiled = results.lower(total, w, x).compile()
    assert "all-reduce" not in compiled.as_text()
    found = compiled(total, w, x)
    expected = function(total.sum(0), w, x)
    assert found[0].shape == (4, 6, 6)
    np.testing.assert_allclose(found[0].sum(0), expected[0], rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(found[1], expected[1])
    mine = total[1] + x[4:8].T @ np.sin(x[4:8] @ w)
    np.testing.assert_allclose(found[0][1], mine, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("replicas", [2, 4])
def test_rows_beside_all_other_rows(replicas):
    """As in a contrastive loss: operands with parts along different dimensions."""

    def function(x: Any, labels: Any) -> Any:
        distances = jnp.sum((x[:, None] - x[None]) ** 2, -1)
        alike = labels[:, None] == labels[None, :]
        return distances * alike, jnp.max(jnp.where(alike, distances, 0.0), 1)

    labels = RNG.integers(0, 3, N).astype("float32")
    check(function, [normal(N, 3), labels], [0, 0], replicas)
