"""The Triton kernel has the bits of the pass on a CPU: under Triton's interpreter here, and on a GPU where one is."""

import logging
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when the kernel is defined
pytest.importorskip("triton", reason="Triton is not installed: pip install triton")
from triton.runtime import interpreter

from megatron.pipeline.runtime.update import elementwise_step, triton_step
from megatron.pipeline.runtime.update.elementwise_step import ElementwiseStep, TritonStep
from megatron.pipeline.runtime.update.provisional_step import ProvisionalStep
from tests import workers
from tests.draws import draws
from tests.pipeline.runtime.stages.module import module_cases
from tests.pipeline.runtime.stages.module.reference import Training
from tests.pipeline.runtime.update.test_elementwise_step import KNOWN
from tests.pipeline.runtime.update.test_step_with_prediction import ONE, OPTIMIZERS, PLAIN, build, equal, take

interpreted = pytest.mark.skipif(
    torch.cuda.is_available(),
    reason="the kernel is compiled for the GPU; hide it with CUDA_VISIBLE_DEVICES= to interpret",
)


def exact_root(values, *, out):
    """torch's root on a CPU may be off by one in the last place, and Triton's is not."""
    return out.copy_(torch.from_numpy(np.sqrt(values.numpy())))


def rounded(convert):
    """Triton's interpreter cuts off what BF16 does not hold, where a GPU rounds."""

    def converted(values, source, result, mode):
        if (source, result) != (triton_step.tl.float32, triton_step.tl.bfloat16):
            return convert(values, source, result, mode)
        return torch.from_numpy(np.ascontiguousarray(values)).bfloat16().view(torch.int16).numpy().view(np.uint16)

    return converted


def fused(_, x, y, z):
    """x * y + z, rounded once. Triton's interpreter rounds twice before 3.9.

    A product of two FP32 numbers is exact in FP64. Their sum with z is rounded to odd there, which leaves the rounding
    to FP32 as right as that of the exact sum.
    """
    product, addend = x.data.astype(np.float64) * y.data, z.data.astype(np.float64)
    total = product + addend
    without = total - product
    lost = (product - (total - without)) + (addend - without)
    is_even = total.view(np.int64) & 1 == 0
    total = np.where((lost != 0) & is_even, np.nextafter(total, np.copysign(np.inf, lost)), total)
    return interpreter.TensorHandle(total.astype(np.float32), z.dtype.scalar)


def use_kernel(patched, *, block=16):
    """Let the kernel step what is on the CPU, and let both passes round correctly."""
    patched.setattr(torch, "sqrt", exact_root)
    patched.setattr(interpreter, "_convert_float", rounded(interpreter._convert_float))
    patched.setattr(interpreter.InterpreterBuilder, "create_fma", fused)
    patched.setattr(triton_step, "BLOCK", block)
    patched.setitem(elementwise_step.PASSES, "cpu", lambda: TritonStep)


@interpreted
@draws(30, suppress=(HealthCheck.function_scoped_fixture,))
@given(
    made=OPTIMIZERS,
    each_of=st.lists(ONE, min_size=1, max_size=5),
    factor=st.sampled_from([1.0, 0.37]),
    share=st.sampled_from([1.5, torch.tensor(0.6), torch.tensor(0.6, dtype=torch.float64)]),
    puts_off=st.booleans(),
)
def test_it_has_the_bits_of_the_blocks(made, each_of, factor, share, puts_off):
    """Weights, state and predictions, over options, sizes around blocks, types, clipping and what is left out; also
    of a step that no prediction follows.
    """
    found = []
    for is_kernel in (False, True):
        parameters, optimizer = build(*made, [each["size"] for each in each_of])
        with pytest.MonkeyPatch.context() as patched:
            use_kernel(patched)
            patched.setattr(ProvisionalStep, "_take_on_copies", None)
            if not is_kernel:
                patched.setitem(elementwise_step.PASSES, "cpu", lambda: ElementwiseStep)
            found.append(
                take(parameters, optimizer, each_of, factor=factor, share=share, puts_off=puts_off or not is_kernel)
            )
    num_due = sum(each["has_gradient"] for each in each_of)
    assert [each[0] for each in found] == [num_due, num_due if puts_off else 0]
    assert equal(found[0][1], found[1][1])


@interpreted
@pytest.mark.parametrize("name", ["AdamW", "Nesterov"])
def test_vectors_of_several_blocks(monkeypatch, name):
    """Tensors that begin at 16 bytes and have a multiple of 8 elements are read in vectors, beside others."""
    kind, options = KNOWN[name]
    found = []
    for takes in (ElementwiseStep, TritonStep):
        use_kernel(monkeypatch, block=1024)
        monkeypatch.setitem(elementwise_step.PASSES, "cpu", lambda takes=takes: takes)
        made = build(kind, options, [8, 5 * 1024, 3000, 2049, 1])
        found.append(take(*made, [PLAIN] * 5, factor=0.5, share=1.5, puts_off=True))
    assert found[0][0] == found[1][0] == 5 and equal(found[0][1], found[1][1])


@interpreted
def test_one_launch_takes_all_parameters_of_a_group(monkeypatch):
    """Of both steps, and one more of the next group, which has another type of results."""
    use_kernel(monkeypatch)
    launches, launch = [], triton_step._launch
    monkeypatch.setattr(triton_step, "_launch", lambda rows, *rest: (launches.append(len(rows)), launch(rows, *rest)))
    parameters, optimizer = build(torch.optim.AdamW, {}, [8, 16, 24, 32, 40, 48])
    each_of = [PLAIN, PLAIN | {"target": torch.bfloat16}] * 3
    take(parameters, optimizer, each_of, factor=0.5, share=1.5, puts_off=True)
    assert launches == [3, 3]


@interpreted
def test_a_momentum_that_ends_between_step_and_prediction(monkeypatch):
    """The two have other kernels."""
    found = []
    for takes in (ElementwiseStep, TritonStep):
        use_kernel(monkeypatch)
        monkeypatch.setitem(elementwise_step.PASSES, "cpu", lambda takes=takes: takes)
        parameter, target = torch.linspace(-1, 1, 40).requires_grad_(), torch.zeros(40)
        optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
        provisional = ProvisionalStep(optimizer)
        for _ in range(2):
            parameter.grad = torch.linspace(1, 2, 40)
            provisional.step(puts_off=True)
        assert len(provisional.due) == 1
        optimizer.param_groups[0]["momentum"] = 0.0
        provisional.take(lambda each: (torch.ones(40), 1.0), lambda each, target=target: target)
        found.append([parameter.detach(), target, optimizer.state[parameter]["momentum_buffer"]])
    assert equal(*found)


@interpreted
def test_types_that_it_does_not_know_are_stepped_on_copies(monkeypatch):
    """Gradients of double precision, behind a step that it takes."""
    use_kernel(monkeypatch)
    copied, on_copies = [], ProvisionalStep._take_on_copies
    monkeypatch.setattr(ProvisionalStep, "_take_on_copies", lambda *args: (copied.append(1), on_copies(*args)))
    made = build(torch.optim.AdamW, {}, [40])
    num_due, values = take(*made, [PLAIN | {"partial": torch.float64}], factor=1.0, share=1.5, puts_off=True)
    expected = take(*build(torch.optim.AdamW, {}, [40]), [PLAIN], factor=1.0, share=1.5, puts_off=True)
    assert copied == [1] and num_due == 1
    torch.testing.assert_close(values, expected[1], rtol=1e-6, atol=1e-7)


@interpreted
def test_kernels_are_loaded_before_they_are_needed(monkeypatch):
    """For vectors and without, for the types that predictions will have, and of the rule of each group."""
    use_kernel(monkeypatch)
    loaded = []
    monkeypatch.setattr(triton_step, "_launch", lambda rows, *variant: loaded.append(variant))
    parameters = [torch.zeros(3, requires_grad=True)]
    types = {(torch.float32, torch.bfloat16), (torch.float64, torch.float64)}  # the latter go on copies
    ProvisionalStep(torch.optim.SGD(parameters, momentum=0.9), types)
    full, half = (triton_step.ELEMENT_TYPES[dtype] for dtype in (torch.float32, torch.bfloat16))
    wanted = {("momentum", full, target, is_aligned) for target in (full, half) for is_aligned in (True, False)}
    assert len(loaded) == 4 and set(loaded) == wanted
    monkeypatch.undo()
    with pytest.MonkeyPatch.context() as patched:
        use_kernel(patched)
        for rule in ("adam", "sgd", "momentum", "nesterov"):
            triton_step.warm_up(rule, torch.bfloat16, torch.float16, torch.device("cpu"))


def trained(*, is_kernel: bool, **options):
    """Reports, true weights and predictions of a run on this rank."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("TRITON_INTERPRET", "1")
        use_kernel(patched, block=64)
        if not is_kernel:
            patched.setitem(elementwise_step.PASSES, "cpu", lambda: ElementwiseStep)
        training = Training(batches=(4,) * 5)
        found = module_cases.run(
            preset="2bw", predict=True, training=training, drains=(2,), look_at_predictions=True, **options
        )
        return [report.losses for report in found.reports], found.parameters, found.predictions


@interpreted
def test_a_pipeline_trains_with_it():
    """Two stages with a drain in between, after which a step comes without a prediction."""
    expected, found = (
        workers.run(2, f"{__name__}:trained", is_kernel=is_kernel, timeout=200) for is_kernel in (False, True)
    )
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-6, atol=1e-7)


def test_without_triton_copies_are_stepped_and_a_note_says_so(monkeypatch, caplog):
    """Once, however many predictions are made."""
    monkeypatch.setattr(elementwise_step, "find_spec", lambda name: None)
    monkeypatch.setitem(elementwise_step.PASSES, "cpu", elementwise_step._on_gpu)
    elementwise_step._on_gpu.cache_clear()
    try:
        with caplog.at_level(logging.WARNING):
            made = build(torch.optim.AdamW, {}, [40, 8])
            num_due, values = take(*made, [PLAIN] * 2, factor=0.5, share=1.5, puts_off=True)
    finally:
        elementwise_step._on_gpu.cache_clear()
    assert num_due == 0 and caplog.text.count("note: Triton is not installed") == 1
    monkeypatch.undo()
    expected = take(*build(torch.optim.AdamW, {}, [40, 8]), [PLAIN] * 2, factor=0.5, share=1.5, puts_off=False)
    assert equal(values, expected[1])


COMPILED = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from megatron.pipeline.runtime.update import triton_step

torch, names = triton_step.torch, triton_step._kernel.arg_names
signature = {"table": "*i64", "numbers": "*fp32", "num_rows": "i32"}
types = triton_step.ELEMENT_TYPES
for rule in ("adam", "sgd", "momentum", "nesterov"):
    for target in types.values():
        constants = {"RULE": rule, "GRADIENT": triton_step.tl.float32, "TARGET": target, "ALIGNED": True,
                     "BLOCK": triton_step.BLOCK, "NUMBERS": triton_step.NUM_NUMBERS}
        source = ASTSource(fn=triton_step._kernel, constexprs=constants,
                           signature={name: signature.get(name, "constexpr") for name in names})
        for capability in (80, 90):
            options = {"enable_fp_fusion": False}
            made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
            ptx = made.asm["ptx"]
            assert "ld.global.v4" in ptx and "st.global.v4" in ptx, (rule, target)
            steps = 2 * triton_step.BLOCK // (32 * made.metadata.num_warps)
            assert ptx.count("fma.rn.f32") == steps * {"adam": 4, "sgd": 2, "momentum": 3, "nesterov": 4}[rule], rule
            assert ("cvt.rn.bf16x2.f32" in ptx) == (target is types[torch.bfloat16])
            assert not any(f"{each}.approx" in ptx or f"{each}.full" in ptx for each in ("div", "sqrt")), rule
print("compiled")
"""


@pytest.mark.full
def test_it_compiles_for_gpus(tmp_path):
    """Triton compiles without a GPU: in vectors, with no operation fused that is not said to be, rounded correctly."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    path = tmp_path / "compiled.py"
    path.write_text(COMPILED)
    done = subprocess.run([sys.executable, str(path)], env=environment, capture_output=True, text=True, timeout=300)
    assert done.stdout == "compiled\n", done.stderr


@pytest.mark.gpu
@pytest.mark.parametrize("name", KNOWN)
def test_on_a_device(monkeypatch, name):
    """Two steps and predictions have the bits of the pass on a CPU, where both begin with the same moments."""
    monkeypatch.setattr(torch, "sqrt", exact_root)
    kind, options = KNOWN[name]
    found = []
    for device in ("cpu", "cuda"):
        parameters, made = build(kind, options, [8, 5 * 1024, 3000, 1])
        moved = [each.detach().to(device).requires_grad_() for each in parameters]
        optimizer = kind([{"params": moved[::2]}, {"params": moved[1::2], "lr": 0.02}], **options)
        optimizer.load_state_dict(made.state_dict())
        provisional = ProvisionalStep(optimizer, {(torch.bfloat16, torch.bfloat16)})
        generator = torch.Generator().manual_seed(4)
        targets = {each: torch.zeros_like(each, dtype=torch.bfloat16) for each in moved}
        for puts_off in (True, False):
            for each in moved:
                each.grad = torch.randn(each.shape, generator=generator).to(device)
            partial = {each: torch.randn(each.shape, generator=generator).bfloat16().to(device) for each in moved}
            provisional.step(0.5, puts_off=puts_off or device == "cpu")
            provisional.take(lambda each, partial=partial: (partial[each], 1.5), targets.__getitem__)
        state = [value for each in moved for value in optimizer.state[each].values()]
        found.append([value.detach().cpu() for value in (*moved, *targets.values(), *state)])
    assert equal(*found)
