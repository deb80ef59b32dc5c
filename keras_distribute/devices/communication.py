"""Operations in which replicas communicate, where each device runs several:
collectives, and conditions and loops that hold them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.extend import core

from keras_distribute.devices import jaxprs, replication_proof
from keras_distribute.devices.collectives import COLLECTIVES, SUMS
from keras_distribute.devices.series import Series, Value
from keras_distribute.errors import ContextError

HOLDING = ("cond", "scan", "while")
"""The conditions and loops, by the names of their operations."""


class Communication:
    """From the values of a device's replicas to what each of them gets.

    Args:
        run: Runs a program that is inside of an operation.
    """

    def __init__(
        self,
        series: Series,
        run: Callable[[core.ClosedJaxpr, Sequence[Value]], list[Value]],
    ) -> None:
        self._series, self._run = series, run

    def __call__(self, eqn: Any, given: list[Value]) -> list[Value]:
        """The results of an operation that communicates."""
        name = eqn.primitive.name
        if name in HOLDING:
            return getattr(self, f"_{name}")(eqn, given)
        rule = COLLECTIVES.get(name)
        if rule is None or eqn.params.get("axis_index_groups") is not None:
            raise ContextError(
                "With deterministic=True, replicas communicate with all others.",
                received=f"the operation {name!r}{_groups_of(eqn)}.",
                fix="kd.get_replica_context().all_reduce or all_gather; or a strategy "
                "without deterministic=True.",
            )
        return [rule(self._series, eqn.params, value) for value in given]

    def _cond(self, eqn: Any, given: list[Value]) -> list[Value]:
        """A choice that is the same on every replica."""
        index, *operands = given
        flags = replication_proof.equal_results(eqn, [v.is_equal for v in given])

        def branch_of(program: core.ClosedJaxpr) -> Callable[..., Any]:
            def branch(*arrays: Any) -> list[Any]:
                values = map(Value, arrays, [v.is_equal for v in operands])
                return self._arrays(self._run(program, list(values)), flags)

            return branch

        branches = list(map(branch_of, eqn.params["branches"]))
        results = lax.switch(index.array, branches, *(v.array for v in operands))
        return list(map(Value, results, flags))

    def _scan(self, eqn: Any, given: list[Value]) -> list[Value]:
        """A loop of a known length."""
        params, body = eqn.params, eqn.params["jaxpr"]
        num_consts, num_carry = jaxprs.scan_counts(eqn)
        flags = replication_proof.equal_results(eqn, [v.is_equal for v in given])
        carried, stacked = flags[:num_carry], flags[num_carry:]
        consts, carry = given[:num_consts], given[num_consts : num_consts + num_carry]
        rows = given[num_consts + num_carry :]

        def step(arrays: Any, sliced: Any) -> Any:
            own = [*map(Value, arrays, carried)]
            own += map(Value, sliced, [v.is_equal for v in rows])
            results = self._run(body, [*consts, *own])
            return (
                self._arrays(results[:num_carry], carried),
                self._arrays(results[num_carry:], stacked),
            )

        last, made = lax.scan(
            step,
            self._arrays(carry, carried),
            [v.array if v.is_equal else jnp.moveaxis(v.array, 0, 1) for v in rows],
            length=params["length"],
            reverse=params["reverse"],
        )
        made = [
            array if same else jnp.moveaxis(array, 1, 0)
            for array, same in zip(made, stacked, strict=True)
        ]
        return list(map(Value, [*last, *made], flags))

    def _while(self, eqn: Any, given: list[Value]) -> list[Value]:
        """A loop whose length is the same on every replica."""
        eqn, given = jaxprs.with_one_test(eqn, given)
        params = eqn.params
        flags = replication_proof.equal_results(eqn, [v.is_equal for v in given])
        begin = params["cond_nconsts"]
        end = begin + params["body_nconsts"]

        def goes_on(arrays: Any) -> Any:
            values = [*given[:begin], *map(Value, arrays, flags)]
            found = self._run(params["cond_jaxpr"], values)
            return self._arrays(found, [True])[0]

        def step(arrays: Any) -> Any:
            values = [*given[begin:end], *map(Value, arrays, flags)]
            return self._arrays(self._run(params["body_jaxpr"], values), flags)

        carry = self._arrays(given[end:], flags)
        return list(map(Value, lax.while_loop(goes_on, step, carry), flags))

    def _arrays(self, values: Sequence[Value], equal: Sequence[bool]) -> list[Any]:
        each = self._series.each
        return [
            value.alone() if same else value.stacked(each)
            for value, same in zip(values, equal, strict=True)
        ]


def is_sum(eqn: Any) -> bool:
    """Whether it adds up over all replicas."""
    return eqn.primitive.name in SUMS and not _groups_of(eqn)


def _groups_of(eqn: Any) -> str:
    groups = eqn.params.get("axis_index_groups")
    return "" if groups is None else f" with axis_index_groups={groups}"
