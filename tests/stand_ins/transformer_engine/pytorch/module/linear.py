"""Linear layers, with a norm before them or without."""

import torch
from torch import Tensor

from ..._release import fact, pinned
from ..distributed import gather_first_dimension, scatter_sum_first_dimension, sum_of
from ..fp8 import FP8GlobalStateManager, QuantizedTensorStorage
from .base import Accumulation, TransformerEngineBaseModule, WeightGradStore, mark_tensor_parallel
from .norm import normalized


class _Linear(torch.autograd.Function):
    """The product of an input [.., in] and a weight [out, in], with the collectives of tensor ranks."""

    @staticmethod
    def forward(ctx, weight: Tensor, input: Tensor, bias: Tensor | None, module, is_first_microbatch) -> Tensor:
        ctx.save_for_backward(input, weight)
        ctx.module, ctx.sums_bias = module, bias is not None
        ctx.accumulation = Accumulation(weight, module.fuse_wgrad_accumulation, is_first_microbatch)
        store = module.wgrad_store
        ctx.store = store if fact("chooses_store_in") == "backward" or store.delay_wgrad_compute() else None
        if module.gathers_input:
            input = gather_first_dimension(input, module.tp_group)
        ctx.cast = ctx.input = None
        if module.fp8:
            shape = input.shape
            ctx.input, ctx.cast = (
                module.cast(input.flatten(0, -2), "input"),
                module.cast_weight(weight, is_first_microbatch),
            )
            ctx.reduces = any(ctx.needs_input_grad) and FP8GlobalStateManager.is_first_fp8_module()
            input, weight = ctx.input.get_data_tensors()[0].view(shape), ctx.cast.get_data_tensors()[0]
        output = torch.nn.functional.linear(input, weight, bias)
        if module.parallel_mode == "row" and module.tp_size > 1:
            reduce = scatter_sum_first_dimension if module.sequence_parallel else sum_of
            output = reduce(output, module.tp_group)
        return output

    @staticmethod
    def backward(ctx, grad: Tensor):
        input, weight = ctx.saved_tensors
        module, accumulation = ctx.module, ctx.accumulation
        if module.parallel_mode == "row" and module.sequence_parallel:
            grad = gather_first_dimension(grad, module.tp_group)
        input_grad = weight_grad = bias_grad = quantized = None
        sums_bias, rows = ctx.sums_bias, grad
        if ctx.cast is not None:
            quantized, weight = module.cast(grad.flatten(0, -2), "gradient"), ctx.cast.get_data_tensors()[1]
            rows = quantized.get_data_tensors()[0].view_as(grad)
            if sums_bias:
                sums_bias, bias_grad = False, grad.flatten(0, -2).sum(dim=0)
        if ctx.needs_input_grad[1]:
            input_grad = rows.matmul(weight)
            if module.parallel_mode == "column" and module.tp_size > 1:
                reduce = scatter_sum_first_dimension if module.sequence_parallel else sum_of
                input_grad = reduce(input_grad, module.tp_group)
        if ctx.needs_input_grad[0]:
            buffer = accumulation.buffer()

            def product(input, grad) -> tuple[Tensor, Tensor | None]:
                if isinstance(input, QuantizedTensorStorage):
                    input, grad = input.get_data_tensors()[1], grad.get_data_tensors()[1]
                return accumulation.product(buffer, input, grad), grad.sum(dim=0) if sums_bias else None

            if quantized is None and module.gathers_input:
                input = gather_first_dimension(input, module.tp_group)
            factors = [each.reshape(-1, each.shape[-1]) for each in (input, grad)]
            factors = factors if quantized is None else [ctx.input, quantized]
            if ctx.store is not None and ctx.store.delay_wgrad_compute():
                ctx.store.put(factors, product)
            else:
                weight_grad, found = product(*factors)
                bias_grad = found if sums_bias else bias_grad
            if accumulation.is_fused:
                weight_grad = accumulation.returned()
        if ctx.cast is not None and ctx.reduces:
            FP8GlobalStateManager.reduce_and_update_fp8_tensors(forward=False)
        return weight_grad, input_grad, bias_grad, None, None


class _LinearModule(TransformerEngineBaseModule):
    weight_names, bias_names = ["weight"], ["bias"]

    def _set_up(
        self, in_features, out_features, sequence_parallel, fuse_wgrad_accumulation, tp_group, tp_size, bias,
        return_bias, parallel_mode, delay_wgrad_compute,
    ) -> None:  # fmt: skip
        self.tp_group, self.tp_size = tp_group, tp_size if tp_group is None else tp_group.size()
        self.in_features = in_features // self.tp_size if parallel_mode == "row" else in_features
        self.out_features = out_features // self.tp_size if parallel_mode == "column" else out_features
        self.parallel_mode, self.sequence_parallel = parallel_mode, self.tp_size > 1 and sequence_parallel
        self.gathers_input = parallel_mode == "column" and self.sequence_parallel
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.use_bias, self.return_bias = bias, return_bias
        self.apply_bias = bias and not return_bias
        self.gemm_bias_unfused_add = parallel_mode == "row" and self.apply_bias
        self.wgrad_store = WeightGradStore(delay_wgrad_compute)
        self.save_original_input = False  # what a backward casts again has the same bits, so nothing reads it

    def _make_weights(self, dtype, device, init_method, get_rng_state_tracker, rng_tracker_name=None) -> None:
        self.weight = torch.nn.Parameter(torch.empty(self.out_features, self.in_features, dtype=dtype, device=device))
        if self.use_bias:
            self.bias = torch.nn.Parameter(torch.zeros(self.out_features, dtype=dtype, device=device))
        else:
            self.bias = torch.empty(0, dtype=dtype)
        init_method = init_method or (lambda weight: torch.nn.init.normal_(weight, 0.0, 0.023))
        with torch.no_grad():
            self._draw(self.weight, device, init_method, get_rng_state_tracker, rng_tracker_name)
        mark_tensor_parallel(self.weight, 1 if self.parallel_mode == "row" else 0)
        if self.use_bias and self.parallel_mode == "row":
            self.bias.sequence_parallel = self.sequence_parallel
        elif self.use_bias and self.parallel_mode == "column":
            mark_tensor_parallel(self.bias, 0)
        self._mark_late()

    def _multiply(self, input: Tensor, is_first_microbatch: bool | None) -> Tensor | tuple[Tensor, Tensor]:
        inside = self.bias if self.apply_bias and not self.gemm_bias_unfused_add else None
        with self.prepare_forward():
            output = _Linear.apply(self.weight, input, inside, self, is_first_microbatch)
        if self.gemm_bias_unfused_add:
            output = output + self.bias
        return (output, self.bias) if self.return_bias else output


class Linear(_LinearModule):
    @pinned
    def __init__(
        self, in_features, out_features, sequence_parallel=False, fuse_wgrad_accumulation=False, tp_group=None,
        tp_size=1, get_rng_state_tracker=None, rng_tracker_name=None, init_method=None, bias=True, return_bias=False,
        params_dtype=None, parallel_mode=None, device="cuda", ub_name=None, delay_wgrad_compute=False,
    ):  # fmt: skip
        TransformerEngineBaseModule.__init__(self)
        self._set_up(in_features, out_features, sequence_parallel, fuse_wgrad_accumulation, tp_group, tp_size, bias,
                     return_bias, parallel_mode, delay_wgrad_compute)  # fmt: skip
        self._make_weights(params_dtype, device, init_method, get_rng_state_tracker, rng_tracker_name)

    @pinned
    def forward(self, inp, is_first_microbatch=None) -> Tensor | tuple[Tensor, Tensor]:
        return self._multiply(inp, is_first_microbatch)


class LayerNormLinear(_LinearModule):
    @pinned
    def __init__(
        self, in_features, out_features, eps=1e-5, sequence_parallel=False, fuse_wgrad_accumulation=False,
        tp_group=None, tp_size=1, get_rng_state_tracker=None, init_method=None, bias=True, normalization="LayerNorm",
        return_bias=False, params_dtype=None, parallel_mode=None, zero_centered_gamma=False, device="cuda",
        ub_name=None, delay_wgrad_compute=False,
    ):  # fmt: skip
        TransformerEngineBaseModule.__init__(self)
        self._set_up(in_features, out_features, sequence_parallel, fuse_wgrad_accumulation, tp_group, tp_size, bias,
                     return_bias, parallel_mode, delay_wgrad_compute)  # fmt: skip
        self.eps, self.normalization, self.zero_centered_gamma = eps, normalization, zero_centered_gamma
        fill = torch.zeros if zero_centered_gamma else torch.ones
        self.layer_norm_weight = torch.nn.Parameter(fill(in_features, dtype=params_dtype, device=device))
        self.layer_norm_weight.sequence_parallel = self.sequence_parallel
        self.layer_norm_bias = None
        if normalization == "LayerNorm":
            self.layer_norm_bias = torch.nn.Parameter(torch.zeros(in_features, dtype=params_dtype, device=device))
            self.layer_norm_bias.sequence_parallel = self.sequence_parallel
        self._make_weights(params_dtype, device, init_method, get_rng_state_tracker)

    @pinned
    def forward(self, inp, is_first_microbatch=None) -> Tensor | tuple[Tensor, Tensor]:
        norm = normalized(inp, self.layer_norm_weight, self.layer_norm_bias, eps=self.eps,
                          zero_centered=self.zero_centered_gamma)  # fmt: skip
        return self._multiply(norm, is_first_microbatch)
