"""Programs read from their text: shapes, loops, collectives, bytes; and operations
counted in traced programs.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from keras_distribute.dry_run import collectives, flops, hlo, memory, traffic

TEXT = """HloModule jit_step, is_scheduled=true

%fused (param_0.1: f32[100,8], param_1.2: s32[]) -> f32[1,8] {
  %param_0.1 = f32[100,8]{1,0:T(8,128)} parameter(0)
  %param_1.2 = s32[]{:T(128)} parameter(1)
  %zero = s32[] constant(0)
  ROOT %ds = f32[1,8]{1,0} dynamic-slice(%param_0.1, %param_1.2, %zero), dynamic_slice_sizes={1,8}
}

%body (p: (s32[], f32[100,8])) -> (s32[], f32[100,8]) {
  %p = (s32[]{:T(128)}, f32[100,8]{1,0}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%p), index=0
  %x = f32[100,8]{1,0} get-tuple-element(%p), index=1
  %row = f32[1,8]{1,0} fusion(%x, %i), kind=kLoop, calls=%fused, metadata={op_name="jit(step)/jvp(rnn)/cell/mul"}
  %sum = f32[1,8]{1,0} all-reduce(%row), channel_id=1, replica_groups={{0,1},{2,3}}, to_apply=%add
  ROOT %t = (s32[]{:T(128)}, f32[100,8]{1,0}) tuple(%i, %x)
}

%condition (q: (s32[], f32[100,8])) -> pred[] {
  %limit = s32[]{:T(128)} constant(5)
  %q = (s32[]{:T(128)}, f32[100,8]{1,0}) parameter(0)
  %j = s32[] get-tuple-element(%q), index=0
  ROOT %lt = pred[] compare(%j, %limit), direction=LT
}

ENTRY %main (a: f32[100,8], b: bf16[4,8]) -> bf16[4,8] {
  %a = f32[100,8]{1,0:T(8,128)} parameter(0)
  %b = bf16[4,8]{1,0:T(8,128)(2,1)S(1)} parameter(1)
  %zero.1 = s32[] constant(0)
  %state = (s32[], f32[100,8]{1,0}) tuple(%zero.1, %a)
  %loop = (s32[]{:T(128)}, f32[100,8]{1,0}) while(%state), condition=%condition, body=%body
  %g = bf16[4,8]{1,0:T(8,128)(2,1)} negate(%b), metadata={op_name="jit(step)/transpose(jvp(net))/dense/dot_general"}
  ROOT %all-reduce.1 = (bf16[4,8]{1,0}, bf16[4,8]{1,0:S(1)}) all-reduce(%g, /*index=1*/%b), replica_groups=mesh['x'=2,'y'=2] {'x','y'}, use_global_device_ids=true, to_apply=%add
}
"""


def test_a_module_is_read():
    module = hlo.parse(TEXT)
    assert module.entry == "main"
    assert module.runs == {"main": 1, "body": 5}
    assert module.unknown_loops == 0
    reduce = module.computations["main"][-1]
    assert reduce.operands == ("g", "b")
    assert [(array.dtype, array.shape, array.on_chip) for array in reduce.arrays] == [
        ("bf16", (4, 8), False),
        ("bf16", (4, 8), True),
    ]


def test_what_a_kernel_says_of_itself_may_go_over_lines():
    said = ', frontend_attributes={kernel_metadata={\n"blocks":"{\\"q\\": 128}"\n}}'
    kernel = "  %kernel = f32[4,8]{1,0} custom-call(%b)"
    text = TEXT.replace("  %g = ", f"{kernel}{said}, metadata={{}}\n  %g = ")
    module = hlo.parse(text)
    names = [each.name for each in module.computations["main"]]
    assert names[-3:] == ["kernel", "g", "all-reduce.1"]
    assert len(collectives.of_program(module, 4)) == 2


def test_loops_of_unknown_length_count_once_and_are_said():
    module = hlo.parse(TEXT.replace("direction=LT", "direction=NE"))
    assert module.runs["body"] == 1
    assert module.unknown_loops == 1
    known = TEXT.replace(
        "body=%body", 'body=%body, backend_config={"known_trip_count":{"n":"7"}}'
    )
    assert hlo.parse(known).runs["body"] == 7


def test_what_two_call_runs_for_both():
    step = TEXT.replace("ENTRY %main", "%step")
    module = hlo.parse(f"""{step}
ENTRY %twice (a: f32[100,8], b: bf16[4,8]) -> bf16[4,8] {{
  %first = bf16[4,8]{{1,0}} call(%a, %b), to_apply=%step
  ROOT %second = bf16[4,8]{{1,0}} call(%a, %first), to_apply=%step
}}
""")
    assert module.runs == {"twice": 1, "step": 2, "body": 10}


def test_collectives_say_what_they_move_and_wait_for():
    whole, inner = collectives.of_program(hlo.parse(TEXT), 4)
    assert (whole.kind, whole.num_bytes, whole.num_arrays, whole.dtypes) == (
        "all-reduce",
        128,
        2,
        ("bf16",),
    )
    assert (whole.group_size, whole.num_groups, whole.times) == (4, 1, 1)
    assert (whole.of, whole.waits_for) == (("dense",), "dense")
    assert (inner.num_bytes, inner.group_size, inner.num_groups, inner.times) == (
        32,
        2,
        2,
        5,
    )
    assert inner.waits_for == "cell"


def test_bytes_moved_are_those_outside_of_the_chip_and_of_slices():
    # Each iteration: the row is read and written (64) with its index (4), then reduced:
    # read and written (64). Once: the result of negate (64), the operand of the
    # reduction (64) and its first result (64).
    assert traffic.bytes_moved(hlo.parse(TEXT)) == 5 * (64 + 4 + 64) + 64 + 64 + 64


NESTED = """HloModule jit_step, is_scheduled=true

%slicing (param_0.1: f32[100,8], param_1.2: s32[]) -> f32[1,8] {
  %param_0.1 = f32[100,8]{1,0} parameter(0)
  %param_1.2 = s32[] parameter(1)
  %zero = s32[] constant(0)
  ROOT %ds = f32[1,8]{1,0} dynamic-slice(%param_0.1, %param_1.2, %zero), dynamic_slice_sizes={1,8}
}

%multiplying (param_0.3: f32[8,4], param_1.4: f32[100,8], param_2.5: s32[]) -> f32[1,4] {
  %param_0.3 = f32[8,4]{1,0} parameter(0)
  %param_1.4 = f32[100,8]{1,0} parameter(1)
  %param_2.5 = s32[] parameter(2)
  %row = f32[1,8]{1,0} fusion(%param_1.4, %param_2.5), kind=kLoop, calls=%slicing
  ROOT %dot = f32[1,4]{1,0} convolution(%row, %param_0.3), dim_labels=bf_io->bf
}

ENTRY %main (w: f32[8,4], x: f32[100,8], i: s32[]) -> f32[1,4] {
  %w = f32[8,4]{1,0} parameter(0)
  %x = f32[100,8]{1,0} parameter(1)
  %i = s32[] parameter(2)
  ROOT %product = f32[1,4]{1,0} fusion(%w, %x, %i), kind=kOutput, calls=%multiplying
}
"""


def test_a_slice_in_a_fusion_of_a_fusion_is_a_slice():
    # The weight (128), one row of a hundred (32), its number (4) and the result (16).
    assert traffic.bytes_moved(hlo.parse(NESTED)) == 128 + 32 + 4 + 16


@pytest.mark.parametrize(
    ("text", "size", "groups", "replicas"),
    [
        ("replica_groups={{0,1},{2,3},{4,5},{6,7}}", 2, 4, 1),
        ("replica_groups={{0,2,4,6},{1,3,5,7}}", 4, 2, 4),
        ("replica_groups=[4,2]<=[8]", 2, 4, 1),
        ("replica_groups=[2,4]<=[4,2]T(1,0)", 4, 2, 4),
        ("replica_groups=mesh['axis_0'=4,'axis_1'=2] {'axis_1'}", 2, 4, 1),
        ("replica_groups=mesh['axis_0'=4,'axis_1'=2] {'axis_0'}", 4, 2, 4),
        ("replica_groups=mesh['axis_0'=4,'axis_1'=2] {'axis_0','axis_1'}", 8, 1, 4),
        ("replica_groups={}", 8, 1, 4),
        ("source_target_pairs={{1,0},{3,2},{5,4},{7,6}}", 2, 4, 1),
        ("source_target_pairs={{0,2},{2,4}}", 2, 2, 2),
    ],
)
def test_who_exchanges_with_whom(text, size, groups, replicas):
    """Four replicas of two logical devices, one after the other."""
    kind = "collective-permute" if "pairs" in text else "all-reduce"
    line = f"  ROOT %r = f32[8]{{0}} {kind}(%a), channel_id=1, {text}, to_apply=%add\n"
    program = f"HloModule m\n\nENTRY %main (a: f32[8]) -> f32[8] {{\n  %a = f32[8]{{0}} parameter(0)\n{line}}}\n"
    (found,) = collectives.of_program(hlo.parse(program), 8, num_logical=2)
    assert (found.group_size, found.num_groups, found.num_replicas) == (
        size,
        groups,
        replicas,
    )


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        ("jit(step)/jvp(hidden)/dot_general", ["hidden"]),
        ("jit(step)/transpose(jvp(block))/dense/dot_general", ["dense"]),
        (
            "jit(step)/transpose(jvp(lstm))/while/body/closed_call/lstm_cell/dot_general",
            ["lstm_cell"],
        ),
        (
            "jit(step)/(reduce_sum:jvp(loss)/reduce_sum:transpose(jvp(a))/dot_general)",
            ["loss", "a"],
        ),
        ("jit(step)/jvp(a)/mul;jit(step)/jvp(b)/mul", ["a", "b"]),
        ("jit(step)/reduce_sum", []),
        ("", []),
    ],
)
def test_names_of_layers(name, layers):
    assert collectives.layers_of(name) == layers


def test_a_real_program_is_read():
    mesh = Mesh(np.array(jax.devices("cpu")[:4]), ("x",))
    split, same = (
        NamedSharding(mesh, PartitionSpec("x")),
        NamedSharding(mesh, PartitionSpec()),
    )

    def step(w, x):
        with jax.named_scope("layer"):
            return w - jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)

    arguments = (
        jax.ShapeDtypeStruct((8, 8), "float32", sharding=same),
        jax.ShapeDtypeStruct((16, 8), "float32", sharding=split),
    )
    compiled = jax.jit(step, out_shardings=same).lower(*arguments).compile()
    (found,) = collectives.of_program(hlo.parse(compiled.as_text()), 4)
    assert (found.kind, found.num_bytes, found.group_size, found.of) == (
        "all-reduce",
        256,
        4,
        ("layer",),
    )


def counted(function, *shapes):
    traced = jax.jit(function).trace(
        *[jax.ShapeDtypeStruct(shape, "float32") for shape in shapes]
    )
    return dict(flops.of_program(traced.jaxpr))


def test_operations_of_products_and_convolutions():
    assert counted(lambda a, b: a @ b, (3, 5), (5, 7)) == {"float32": 2 * 3 * 5 * 7}
    assert counted(
        lambda a, b: jnp.einsum("bij,bjk->bik", a, b), (2, 3, 5), (2, 5, 7)
    ) == {"float32": 2 * 2 * 3 * 5 * 7}
    numbers = ("NHWC", "HWIO", "NHWC")

    def convolution(x, k, groups=1):
        return lax.conv_general_dilated(
            x, k, (1, 1), "SAME", dimension_numbers=numbers, feature_group_count=groups
        )

    forward = 2 * 2 * 8 * 8 * 4 * 9 * 3
    assert counted(convolution, (2, 8, 8, 3), (3, 3, 3, 4)) == {"float32": forward}
    depthwise = counted(
        lambda x, k: convolution(x, k, groups=3), (2, 8, 8, 3), (3, 3, 1, 3)
    )
    assert depthwise == {"float32": 2 * 2 * 8 * 8 * 3 * 9}


def test_zeros_between_the_rows_of_a_strided_gradient_do_not_count():
    def loss(x, k):
        return jnp.sum(
            lax.conv_general_dilated(
                x, k, (2, 2), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
            )
        )

    forward = counted(loss, (2, 8, 8, 4), (2, 2, 4, 8))["float32"]
    assert (
        counted(jax.grad(loss, (0, 1)), (2, 8, 8, 4), (2, 2, 4, 8))["float32"]
        == 3 * forward
    )


def test_loops_count_as_often_as_they_run_and_branches_as_the_longest():
    def loop(a, b):
        return lax.scan(lambda carry, _: (carry @ b, None), a, length=10)[0]

    def branch(a, b):
        return lax.cond(a[0, 0] > 0, lambda: a @ b @ b, lambda: a @ b)

    once = 2 * 4**3
    assert counted(loop, (4, 4), (4, 4)) == {"float32": 10 * once}
    assert counted(branch, (4, 4), (4, 4)) == {"float32": 2 * once}


def test_what_each_replica_does_counts_for_all():
    mesh = Mesh(np.array(jax.devices("cpu")[:4]), ("x",))
    spec = PartitionSpec("x")
    mapped = jax.shard_map(
        lambda a, b: a @ b, mesh=mesh, in_specs=(spec, PartitionSpec()), out_specs=spec
    )
    assert counted(mapped, (8, 4), (4, 4)) == {"float32": 2 * 8 * 4 * 4}


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        (
            "RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM, the total memory required for HLO "
            "temporaries (480.00G) exceeds available HBM (15.75G). HLO module: jit_f.",
            (480 * 2**30, int(15.75 * 2**30)),
        ),
        (
            "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 17.50G of 15.75G hbm.",
            (int(17.5 * 2**30), int(15.75 * 2**30)),
        ),
        ("INTERNAL: something else (3.00G) and (2.00G)", None),
    ],
)
def test_the_sizes_in_a_refusal_are_read(text, sizes):
    assert memory.refusal(text) == sizes


ACCOMPANIED = """HloModule jit_step, is_scheduled=true

%starting (p: bf16[64,32]) -> bf16[512,32] {
  %p = bf16[64,32]{1,0} parameter(0)
  ROOT %all-gather.1 = bf16[512,32]{1,0} all-gather(%p), channel_id=1, replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={0}, frontend_attributes={chain_id="12"}
}

%going_on (q: bf16[64,32]) -> bf16[512,32] {
  %q = bf16[64,32]{1,0} parameter(0)
  ROOT %all-gather.2 = bf16[512,32]{1,0} all-gather(%q), channel_id=1, replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={0}, frontend_attributes={chain_id="12"}
}

ENTRY %main (a: bf16[64,32]) -> (bf16[512,32], bf16[512,32]) {
  %a = bf16[64,32]{1,0} parameter(0)
  %b = bf16[512,32]{1,0} all-gather(%a), channel_id=2, replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={0}, frontend_attributes={chain_id="13"}
  %start = bf16[512,32]{1,0} fusion(%a), kind=kCustom, calls=%starting
  %done = bf16[512,32]{1,0} fusion(%a), kind=kCustom, calls=%going_on
  ROOT %both = (bf16[512,32]{1,0}, bf16[512,32]{1,0}) tuple(%b, %done)
}
"""


def test_a_collective_that_accompanies_several_fusions_is_one():
    found = collectives.of_program(hlo.parse(ACCOMPANIED), 8)
    assert [(each.kind, each.num_bytes) for each in found] == [
        ("all-gather", 64 * 32 * 2)
    ] * 2
