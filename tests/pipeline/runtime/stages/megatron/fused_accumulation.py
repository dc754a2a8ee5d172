"""Training with megatron.core's fused gradient accumulation where there is no CUDA.

The kernel adds a weight's gradient to `main_grad` inside the backward of a linear layer. A stand-in of torch operations
does the same in the same order, so that fused and unfused training have to agree bit by bit.
"""

from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor

from megatron.core.tensor_parallel import layers
from tests.pipeline.runtime.stages.megatron import megatron_cases as cases


class StandIn:
    """The stand-in of Apex's module `fused_weight_gradient_mlp_cuda`. `num_calls`: so far."""

    def __init__(self) -> None:
        self.num_calls = 0

    def wgrad_gemm_accum_fp32(self, total_input: Tensor, grad_output: Tensor, main_grad: Tensor) -> None:
        assert main_grad.dtype == torch.float32
        self.num_calls += 1
        main_grad.add_(grad_output.t().matmul(total_input))


@contextmanager
def stand_in():
    """megatron.core finds a kernel that is a `StandIn`."""
    kernel = StandIn()
    layers.fused_weight_gradient_mlp_cuda, layers._grad_accum_fusion_available = kernel, True
    try:
        yield kernel
    finally:
        del layers.fused_weight_gradient_mlp_cuda
        layers._grad_accum_fusion_available = False


@contextmanager
def without_repair():
    """megatron.core's linear as the wheel has it."""
    linear = layers.LinearWithGradAccumulationAndAsyncCommunication
    repaired = linear.forward, linear.backward
    linear.forward, linear.backward = (staticmethod(function.__wrapped__) for function in repaired)
    try:
        yield
    finally:
        linear.forward, linear.backward = map(staticmethod, repaired)


def train_fused(**options) -> dict:
    """`cases.train` with the stand-in; the result has its number of calls."""
    with stand_in() as kernel:
        result = cases.train(fused=True, **options)
    return result | {"num_calls": kernel.num_calls}


def train_without_repair(**options) -> dict:
    with without_repair():
        return train_fused(**options)


def train_on_cuda(device: str = "cuda:0", **options) -> list[tuple[float, float]]:
    """(loss, norm) of each batch; all ranks on one GPU. Fused with Apex's kernel where it is installed, else with the
    stand-in."""
    torch.cuda.set_device(device)
    case = cases.Case(**options)
    has_kernel = layers._grad_accum_fusion_available
    with nullcontext() if has_kernel or not case.fused else stand_in(), cases.parallel(case):
        stages, update = cases.build(case)
        engine = cases.engine_of(case, stages, update, device=device, backend="gloo")
        reports = []
        for batch in range(len(case.batches)):
            info = cases.batch_info(case, batch)
            reports += engine.run_batch(info.num_microbatches, info.num_samples)
        reports += engine.drain()
        engine.close()
        return [(report.losses["lm loss"], report.grad_norm) for report in reports]
