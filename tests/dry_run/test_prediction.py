"""What a step is predicted to take: by hand from short programs, and against what is
published.
"""

import importlib.util
import json
import pathlib
import sys

import pytest

from keras_distribute.dry_run import collectives, hlo, prediction, targets, work
from keras_distribute.dry_run.calibration import CALIBRATIONS, Calibration
from keras_distribute.dry_run.hardware import HARDWARE

GPU = """\
HloModule jit_step

%fused_computation (p0: f32[1000,1000]) -> f32[1000,1000] {
  %p0 = f32[1000,1000]{1,0} parameter(0)
  ROOT %exp.1 = f32[1000,1000]{1,0} exponential(%p0)
}

%triton_computation (a: f32[64,32], b: f32[32,16]) -> f32[64,16] {
  %a = f32[64,32]{1,0} parameter(0)
  %b = f32[32,16]{1,0} parameter(1)
  ROOT %dot.1 = f32[64,16]{1,0} dot(%a, %b), lhs_contracting_dims={1}, \
rhs_contracting_dims={0}
}

ENTRY %main (x: bf16[4096,2048], y: bf16[2048,1024], z: f32[1000,1000], \
a: f32[64,32], b: f32[32,16]) -> f32[1000,1000] {
  %x = bf16[4096,2048]{1,0} parameter(0)
  %y = bf16[2048,1024]{1,0} parameter(1)
  %z = f32[1000,1000]{1,0} parameter(2)
  %a = f32[64,32]{1,0} parameter(3)
  %b = f32[32,16]{1,0} parameter(4)
  %gemm = (bf16[4096,1024]{1,0}, s8[64]{0}) custom-call(%x, %y), \
custom_call_target="__cublas$lt$matmul", backend_config={"gemm_backend_config":\
{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]}}}
  %triton = f32[64,16]{1,0} fusion(%a, %b), kind=kCustom, calls=%triton_computation
  ROOT %loop = f32[1000,1000]{1,0} fusion(%z), kind=kLoop, calls=%fused_computation
}
"""
CONVOLUTIONS = """\
HloModule jit_step

ENTRY %main (x: f16[8,56,56,64], k: f16[128,3,3,64], g: f16[8,28,28,128]) -> \
f16[8,28,28,128] {
  %x = f16[8,56,56,64]{3,2,1,0} parameter(0)
  %k = f16[128,3,3,64]{3,2,1,0} parameter(1)
  %g = f16[8,28,28,128]{3,2,1,0} parameter(2)
  %input = (f16[8,56,56,64]{3,2,1,0}, u8[0]{0}) custom-call(%g, %k), \
window={size=3x3 stride=2x2}, dim_labels=b01f_o01i->b01f, \
custom_call_target="__cudnn$convBackwardInput"
  %filter = (f16[128,3,3,64]{3,2,1,0}, u8[0]{0}) custom-call(%x, %g), \
window={size=3x3 stride=2x2}, dim_labels=b01f_o01i->b01f, \
custom_call_target="__cudnn$convBackwardFilter"
  ROOT %forward = (f16[8,28,28,128]{3,2,1,0}, u8[0]{0}) custom-call(%x, %k), \
window={size=3x3 stride=2x2}, dim_labels=b01f_o01i->b01f, \
custom_call_target="__cudnn$convForward"
}
"""
TPU = """\
HloModule jit_step, is_scheduled=true

%fused_computation (p0: bf16[64,64]) -> bf16[64,64] {
  %p0 = bf16[64,64]{1,0} parameter(0)
  ROOT %convolution.1 = bf16[64,64]{1,0} convolution(%p0, %p0), dim_labels=bf_io->bf
}

%body (s: (s32[], bf16[64,64])) -> (s32[], bf16[64,64]) {
  %s = (s32[], bf16[64,64]) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %v = bf16[64,64]{1,0} get-tuple-element(%s), index=1
  %f = bf16[64,64]{1,0} fusion(%v), kind=kOutput, calls=%fused_computation, \
backend_config={"window_config":{"estimated_cycles":"3000"}}
  ROOT %t = (s32[], bf16[64,64]) tuple(%i, %f)
}

%condition (s: (s32[], bf16[64,64])) -> pred[] {
  %s = (s32[], bf16[64,64]) parameter(0)
  ROOT %c = pred[] constant(true)
}

ENTRY %main (x: bf16[64,64], g: f32[4096]) -> f32[4096] {
  %x = bf16[64,64]{1,0} parameter(0)
  %g = f32[4096]{0} parameter(1)
  %copy-start = (bf16[64,64], bf16[64,64], u32[]) copy-start(%x)
  %copy-done = bf16[64,64]{1,0} copy-done(%copy-start)
  %zero = s32[] constant(0)
  %state = (s32[], bf16[64,64]) tuple(%zero, %copy-done)
  %loop = (s32[], bf16[64,64]) while(%state), condition=%condition, body=%body, \
backend_config={"known_trip_count":{"n":"10"}}
  %copy = f32[4096]{0} copy(%g)
  ROOT %sum = f32[4096]{0} all-reduce(%copy), replica_groups={{0,1,2,3}}, \
to_apply=%add
}
"""


def works(text):
    return {each.name: each for each in work.of_program(hlo.parse(text))}


def test_the_products_of_a_gpus_kernels():
    found = works(GPU)
    assert set(found) == {"gemm", "triton", "loop"}
    assert found["gemm"].flops == {"bfloat16": 2 * 4096 * 2048 * 1024}
    assert found["triton"].flops == {"float32": 2 * 64 * 32 * 16}
    assert found["loop"].flops == {} and found["loop"].num_bytes == 2 * 4_000_000


def test_a_convolution_has_as_many_operations_as_its_gradients():
    found = works(CONVOLUTIONS)
    each = {"float16": 2 * 8 * 28 * 28 * 128 * 3 * 3 * 64}
    assert [found[name].flops for name in ("forward", "input", "filter")] == [each] * 3


def test_a_tpus_instructions_have_the_cycles_that_its_compiler_expects():
    found = works(TPU)
    assert set(found) == {"f", "copy"}  # Nothing begun beside, nothing that names.
    assert (found["f"].cycles, found["f"].times, found["f"].flops) == (3000, 10, {})
    assert (found["copy"].cycles, found["copy"].num_bytes) == (None, 2 * 4096 * 4)


def predicted(topology, text, calibration=None, num_steps=1):
    target, module = targets.parse(topology), hlo.parse(text)
    found = collectives.of_program(module, target.num_devices)
    return prediction.of_step(target, module, found, num_steps, calibration)


def test_a_gpus_step_by_hand():
    found = predicted("a100:1", GPU, Calibration(0.5, 1.25, 2, 1))
    product = 2 * 4096 * 2048 * 1024 / 312e12
    small = 2 * 64 * 32 * 16 / 156e12
    small_bytes = (64 * 32 + 32 * 16 + 64 * 16) * 4 / 1555e9
    assert small < small_bytes
    expected = (product + small_bytes + 8e6 / 1555e9) / 0.5
    assert found.seconds == found.work == pytest.approx(expected)
    assert found.low == pytest.approx(expected / 1.25)
    assert found.high == pytest.approx(expected * 1.25)
    assert (found.num_fitted, found.num_held_out) == (2, 1)


def test_a_tpus_step_by_hand():
    found = predicted("v5e:2x2", TPU, Calibration(1.25, 1.5, 3, 3), num_steps=2)
    copy = 2 * 4096 * 4 / 819e9
    assert found.work == pytest.approx((30_000 / 1.5e9 + copy) / 1.25 / 2)
    # Two lines of 2 chips: 100 GB/s, 2 hops, there and back.
    alone = 2 * (4096 * 4 * 3 / 4 / 100e9 + 2e-6) / 2
    assert (found.overlapped, found.exposed) == (0, pytest.approx(alone))
    assert found.seconds == pytest.approx(found.work + found.exposed)


def test_a_collective_that_others_run_beside_takes_time_where_it_is_longer():
    text = TPU.replace(" all-reduce(", " all-reduce-start(")
    found = predicted("v5e:2x2", text)
    assert found.exposed == 0 and found.overlapped > 0
    assert found.seconds == max(found.work, found.overlapped)


def test_floats_without_matrix_units_run_at_their_peak():
    assert [HARDWARE[kind].is_plain("float32") for kind in ("v100", "a100", "v3")] == [
        True,
        False,
        False,
    ]
    assert not HARDWARE["v100"].is_plain("float16")
    one = work.Work("dot", 1, {"float32": 15.7e12}, 0, None)
    assert prediction.seconds_of(HARDWARE["v100"], [one], 0.5) == pytest.approx(1)
    one = work.Work("dot", 1, {"float16": 125e12}, 0, None)
    assert prediction.seconds_of(HARDWARE["v100"], [one], 0.5) == pytest.approx(2)


def test_every_tpu_has_a_clock():
    for hardware in HARDWARE.values():
        assert (hardware.clock_rate > 0) is bool(hardware.torus_axes)


def test_nothing_is_predicted_for_cpus():
    assert predicted("cpu:8", TPU) is None


BENCHMARKS = pathlib.Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def published(monkeypatch):
    """The benchmark of published steps, and its results."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    path = BENCHMARKS / "published_steps.py"
    spec = importlib.util.spec_from_file_location("published_steps", path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "published_steps", module)
    spec.loader.exec_module(module)
    results = BENCHMARKS / "results" / "published_steps.json"
    return module, json.loads(results.read_text(encoding="utf-8"))["cases"]


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_the_shares_are_those_that_fit_what_is_published(published, platform):
    module, cases = published
    known = CALIBRATIONS[platform]
    here = [name for name, case in module.CASES.items() if case.platform == platform]
    fitted = module.fitted(platform)
    assert set(cases) == set(module.CASES)
    assert known.share == module.fit(platform, cases)
    # No step is outside of its error bar, nor is the bar wider than one of them needs.
    error = module.largest_error(here, cases, known.share)
    assert error <= known.error < error + 0.05
    assert known.num_fitted == len(fitted)
    assert known.num_held_out == len(here) - len(fitted) >= len(here) / 3


def test_every_published_step_has_a_source(published):
    module, _ = published
    for case in module.CASES.values():
        known = case.source.startswith("https://") or "benchmarks/gpu.py" in case.said
        assert known and case.said and case.seconds > 0
