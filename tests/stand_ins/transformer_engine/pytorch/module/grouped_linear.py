"""The linear layers of experts, one after the other."""

import torch
from torch import Tensor

from ..._release import fact, pinned
from ..fp8 import FP8GlobalStateManager, QuantizedTensorStorage
from .base import Accumulation, TransformerEngineBaseModule, WeightGradStore, mark_tensor_parallel, set_gradient


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, input: Tensor, splits: list[int], module, is_first_microbatch, *parameters: Tensor) -> Tensor:
        weights, biases = parameters[: module.num_gemms], parameters[module.num_gemms :]
        ctx.save_for_backward(input, *weights)
        ctx.splits, ctx.module, ctx.sums_biases = splits, module, bool(biases)
        fused = module.fuse_wgrad_accumulation
        ctx.accumulations = [Accumulation(weight, fused, is_first_microbatch) for weight in weights]
        store = module.wgrad_store
        ctx.store = store if fact("chooses_store_in") == "backward" or store.delay_wgrad_compute() else None
        inputs, ctx.inputs, ctx.casts = input.split(splits), None, None
        if module.fp8:
            if unaligned := [each for each in splits if each % 16]:
                raise ValueError(f"FP8 execution requires numbers of tokens that 16 divides, not {unaligned}")
            ctx.inputs = [module.cast(each, "input", gemm) for gemm, each in enumerate(inputs)]
            ctx.casts = [module.cast_weight(each, is_first_microbatch, gemm) for gemm, each in enumerate(weights)]
            ctx.reduces = any(ctx.needs_input_grad) and FP8GlobalStateManager.is_first_fp8_module()
            inputs, weights = ([each.get_data_tensors()[0] for each in kind] for kind in (ctx.inputs, ctx.casts))
        parts = zip(inputs, weights, biases or [None] * len(weights), strict=True)
        return torch.cat([torch.nn.functional.linear(*part) for part in parts])

    @staticmethod
    def backward(ctx, grad: Tensor):
        input, *weights = ctx.saved_tensors
        inputs, grads, number = list(input.split(ctx.splits)), list(grad.split(ctx.splits)), len(weights)
        weight_grads, bias_grads, sums_biases = [None] * number, [None] * number, ctx.sums_biases
        rows, module = grads, ctx.module
        if ctx.casts is not None:
            if sums_biases:
                sums_biases, bias_grads = False, [each.sum(dim=0) for each in grads]
            weights = [each.get_data_tensors()[1] for each in ctx.casts]
            inputs, grads = ctx.inputs, [module.cast(each, "gradient", gemm) for gemm, each in enumerate(grads)]
            rows = [each.get_data_tensors()[0] for each in grads]
        input_grad = torch.cat([each.matmul(weight) for each, weight in zip(rows, weights, strict=True)])
        if ctx.needs_input_grad[4]:
            accumulations = ctx.accumulations
            buffers = [each.buffer() for each in accumulations]
            results = list(buffers) if module.fuse_wgrad_accumulation else [torch.empty_like(w) for w in weights]

            def product(inputs: list, grads: list, results: list[Tensor]) -> tuple:
                if isinstance(inputs[0], QuantizedTensorStorage):
                    inputs, grads = ([each.get_data_tensors()[1] for each in kind] for kind in (inputs, grads))
                for number, (accumulation, buffer) in enumerate(zip(accumulations, buffers, strict=True)):
                    found = accumulation.product(buffer, inputs[number], grads[number])
                    if buffer is None:
                        results[number].copy_(found)
                return results, [each.sum(dim=0) if sums_biases else None for each in grads], None

            if ctx.store is not None and ctx.store.delay_wgrad_compute():
                ctx.store.put([inputs, grads, results], product)
            else:
                weight_grads, found, _ = product(inputs, grads, results)
                bias_grads = found if sums_biases else bias_grads
            if module.fuse_wgrad_accumulation:
                weight_grads = [each.returned() for each in accumulations]
        if ctx.casts is not None and ctx.reduces:
            FP8GlobalStateManager.reduce_and_update_fp8_tensors(forward=False)
        return input_grad, None, None, None, *weight_grads, *(bias_grads if ctx.sums_biases else ())


class GroupedLinear(TransformerEngineBaseModule):
    @pinned
    def __init__(
        self, num_gemms, in_features, out_features, sequence_parallel=False, fuse_wgrad_accumulation=False,
        tp_group=None, tp_size=1, get_rng_state_tracker=None, rng_tracker_name=None, init_method=None,
        bias=True, return_bias=False, params_dtype=None, parallel_mode=None, device="cuda", ub_name=None,
        delay_wgrad_compute=False,
    ):  # fmt: skip
        TransformerEngineBaseModule.__init__(self)
        self.num_gemms, self.in_features, self.out_features = num_gemms, in_features, out_features
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.use_bias, self.return_bias, self.apply_bias = bias, return_bias, bias and not return_bias
        self.tp_group, self.tp_size, self.parallel_mode = tp_group, tp_size, parallel_mode
        self.wgrad_store = WeightGradStore(delay_wgrad_compute)
        self.weight_names = [f"weight{number}" for number in range(num_gemms)]
        self.bias_names = [f"bias{number}" for number in range(num_gemms)] if bias else []
        init_method = init_method or (lambda weight: torch.nn.init.normal_(weight, 0.0, 0.023))
        for name in self.weight_names:
            weight = torch.nn.Parameter(torch.empty(out_features, in_features, dtype=params_dtype, device=device))
            with torch.no_grad():
                self._draw(weight, device, init_method, get_rng_state_tracker, rng_tracker_name)
            mark_tensor_parallel(weight, 1 if parallel_mode == "row" else 0)
            setattr(self, name, weight)
        for name in self.bias_names:
            setattr(self, name, torch.nn.Parameter(torch.zeros(out_features, dtype=params_dtype, device=device)))
        self._mark_late()

    @pinned
    def forward(self, inp, m_splits, is_first_microbatch=None) -> Tensor | tuple[Tensor, list[Tensor]]:
        weights = [getattr(self, name) for name in self.weight_names]
        biases = [getattr(self, name) for name in self.bias_names]
        splits = [int(each) for each in m_splits]
        inside = biases if self.apply_bias else []
        with self.prepare_forward(self.num_gemms):
            output = _GroupedLinear.apply(inp, splits, self, is_first_microbatch, *weights, *inside)
        return (output, biases) if self.return_bias else output

    @pinned
    def backward_dw(self) -> None:
        if not self.wgrad_store.delay_wgrad_compute():
            return
        (_, bias_grads, _), (_, _, weight_grads) = self.wgrad_store.pop()
        for number, name in enumerate(self.weight_names if not self.fuse_wgrad_accumulation else ()):
            set_gradient(getattr(self, name), weight_grads[number], fact("weight_grad_is_set"))
        for number, name in enumerate(self.bias_names):
            set_gradient(getattr(self, name), bias_grads[number], fact("bias_grad_is_set"))
        self._run_hooks()
