"""When large inputs are made whole in a program: what each of them waits for."""

import jax
import jax.numpy as jnp
import pytest

from keras_distribute.devices import where_used


def whole(weight):
    """In place of a gather."""
    return jnp.concatenate([weight, weight], 1)[:, :4]


def waited_for(one_ahead):
    """For the weight of each layer, the layer whose input it waits for."""
    weights = [jnp.ones((4, 4)) * (i + 1) for i in range(3)]

    def layers(x, *weights):
        for weight in weights:
            x = jnp.tanh(x @ whole(weight))
        return x

    program = jax.make_jaxpr(layers)(jnp.ones((2, 4)), *weights)
    ties = []

    def tie(array, values):
        ties.append((array, list(values)))
        return where_used.tied_by_barrier(array, values)

    inputs = [jnp.ones((2, 4)), *map(where_used.Input, weights)]
    (result,) = where_used.outputs(program, inputs, tie, one_ahead=one_ahead)
    assert jnp.array_equal(result, layers(inputs[0], *weights))
    of_layers = [inputs[0]]
    for weight in weights[:-1]:
        of_layers.append(jnp.tanh(of_layers[-1] @ whole(weight)))
    found = []
    for weight, (array, values) in zip(weights, ties, strict=True):
        assert array is weight and len(values) == 1
        same = [jnp.array_equal(values[0], each) for each in of_layers]
        found.append(same.index(True))
    return found


@pytest.mark.parametrize(
    ("one_ahead", "expected"), [(False, [0, 1, 2]), (True, [0, 0, 1])]
)
def test_a_weight_waits_for_its_layer_or_for_the_one_before(one_ahead, expected):
    assert waited_for(one_ahead) == expected
