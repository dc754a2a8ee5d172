"""What linear layers have in common: the weight gradients that they put off, and the state that checkpoints save."""

import contextlib
import pickle
import queue
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ..._release import fact, pinned
from ..fp8 import _IN_RECOMPUTE, FP8GlobalStateManager, QuantizedTensorStorage, RecipeState, quantize

_dummies: dict[tuple, Tensor] = {}


@pinned
def get_dummy_wgrad(shape, dtype, zero=False) -> Tensor:
    """What a backward returns in place of a gradient that it has added to `main_grad`: nobody may read it."""
    key = (tuple(shape), dtype)
    if key not in _dummies:
        _dummies[key] = torch.empty(key[0], dtype=dtype)
    return _dummies[key].fill_(0 if zero else float("nan")).detach()


class WeightGradStore:
    """First in, first out: (tensors, function) of the weight gradients that are put off."""

    @pinned
    def __init__(self, delay_wgrad_compute=False):
        self.context = queue.Queue() if delay_wgrad_compute else None
        self.enabled = delay_wgrad_compute

    @pinned
    def delay_wgrad_compute(self) -> bool:
        return self.enabled

    @pinned
    def enable_delay_wgrad_compute(self) -> None:
        self.enabled = True

    @pinned
    def disable_delay_wgrad_compute(self) -> None:
        self.enabled = False

    @pinned
    def put(self, tensor_list, func) -> None:
        assert self.enabled, "delay_wgrad_compute is not enabled"
        self.context.put([tensor_list, func])

    @pinned
    def pop(self) -> tuple:
        assert self.enabled, "delay_wgrad_compute is not enabled"
        if self.context.empty():
            raise RuntimeError("Pop empty queue")
        tensors, function = self.context.get()
        return function(*tensors), tensors


class TransformerEngineBaseModule(torch.nn.Module):
    weight_names: list[str]
    bias_names: list[str]

    def __init__(self):
        super().__init__()
        self.fp8, self.fp8_calibration, self.fp8_meta = False, False, {"fp8_checkpoint": False}
        self.wgrad_store: WeightGradStore | None = None
        self._fp8_workspaces: dict[str, QuantizedTensorStorage] = {}
        self._hooks_of_late_gradients: list[Callable[[], None]] = []

    @pinned
    def backward_dw(self) -> None:
        if self.wgrad_store is None or not self.wgrad_store.delay_wgrad_compute():
            return
        (weight_grad, bias_grad), _ = self.wgrad_store.pop()
        if not self.fuse_wgrad_accumulation:
            set_gradient(self.weight, weight_grad, fact("weight_grad_is_set"))
        if self.use_bias:
            set_gradient(self.bias, bias_grad, fact("bias_grad_is_set"))
        self._run_hooks()

    @contextlib.contextmanager
    def prepare_forward(self, num_gemms: int = 1) -> Iterator[None]:
        """The states of the FP8 context's recipe, while a forward runs: its scales, or those that it had before."""
        manager, meta = FP8GlobalStateManager, self.fp8_meta
        is_recomputed = _IN_RECOMPUTE[1] and manager.is_fp8_enabled()
        if is_recomputed:
            manager.get_old_fp8_meta_tensors_for_recompute(meta)
        else:
            self.fp8 = meta["fp8_checkpoint"] = manager.is_fp8_enabled()
        if self.fp8 and not is_recomputed:
            self._begin_fp8(manager.get_fp8_recipe(), num_gemms)
            if self.training and _IN_RECOMPUTE[0]:
                manager.copy_forward_fp8_meta_tensors_for_recompute(meta)
        yield
        if is_recomputed:
            manager.restore_fp8_meta_tensors(meta)

    def _begin_fp8(self, recipe, num_gemms: int) -> None:
        meta = self.fp8_meta
        meta |= {"recipe": recipe, "fp8_group": FP8GlobalStateManager.get_fp8_group(), "num_gemms": num_gemms}
        if recipe.delayed():
            if "scaling_fwd" not in meta:
                self._make_states(recipe, num_gemms)
            FP8GlobalStateManager.add_fp8_tensors_to_global_buffer(meta)

    def _make_states(self, recipe, num_gemms: int) -> None:
        """Of each product input, weight and output; in backwards the gradients of output and input."""
        self.fp8_meta["scaling_fwd"] = RecipeState(recipe.amax_history_len, 3 * num_gemms)
        self.fp8_meta["scaling_bwd"] = RecipeState(recipe.amax_history_len, 2 * num_gemms)

    def cast(self, tensor: Tensor, kind: str, gemm: int = 0) -> QuantizedTensorStorage:
        """Cast the "input", "weight" or "gradient" of a product, and write its largest value down."""
        key, slot = ("scaling_bwd", 2 * gemm) if kind == "gradient" else ("scaling_fwd", 3 * gemm + (kind == "weight"))
        return quantize(tensor, self.fp8_meta["recipe"], self.fp8_meta.get(key), slot, kind)

    def cast_weight(self, weight: Tensor, is_first_microbatch: bool | None, gemm: int = 0) -> QuantizedTensorStorage:
        """The weight in FP8, which is kept for the microbatches after the first, in one place."""
        name = self.weight_names[gemm]
        if is_first_microbatch is None:
            return self.cast(weight, "weight", gemm)
        if name not in self._fp8_workspaces:
            self._fp8_workspaces[name] = self.cast(weight, "weight", gemm)
        elif is_first_microbatch:
            self._fp8_workspaces[name].quantize_(self.cast(weight, "weight", gemm))
        return self._fp8_workspaces[name]

    def register_wgrad_accumulation_and_reduce_hooks(self, wgrad_accumulation_and_reduce_hook) -> None:
        self._hooks_of_late_gradients.append(wgrad_accumulation_and_reduce_hook)

    def _run_hooks(self) -> None:
        for hook in self._hooks_of_late_gradients if fact("calls_hooks") else ():
            hook()

    def _mark_late(self) -> None:
        """Mark the parameters whose gradients `backward_dw` sets."""
        if self.wgrad_store.delay_wgrad_compute() and fact("marks_skip_backward_post_hook"):
            for name, parameter in self.named_parameters():
                if name in (*self.weight_names, *self.bias_names):
                    parameter.skip_backward_post_hook = True

    def _draw(self, weight: Tensor, device, init_method, get_rng_state_tracker, rng_tracker_name: str | None) -> None:
        if get_rng_state_tracker is None or device == "cpu":  # trackers are about the generators of CUDA
            init_method(weight)
            return
        with get_rng_state_tracker().fork(*[rng_tracker_name] if rng_tracker_name else []):
            init_method(weight)

    def set_tensor_parallel_group(self, tp_group) -> None:
        self.tp_group = tp_group

    def get_extra_state(self) -> Tensor:
        """The scales and histories of delayed scaling, pickled; else empty."""
        meta = self.fp8_meta
        if not (meta["fp8_checkpoint"] or self.fp8) or not meta["recipe"].delayed():
            return torch.empty(0, dtype=torch.uint8)
        state = {"recipe": meta["recipe"], "num_gemms": meta["num_gemms"]}
        for direction in ("fwd", "bwd"):
            history, scale = meta[f"scaling_{direction}"].tensors()
            state |= {f"amax_history_{direction}": history, f"scale_{direction}": scale}
        return torch.frombuffer(bytearray(pickle.dumps(state)), dtype=torch.uint8)

    def set_extra_state(self, state) -> None:
        if state is None or state.numel() == 0:
            return
        state = pickle.loads(state.numpy().tobytes())
        self.fp8_meta["recipe"] = state["recipe"]
        if "scaling_fwd" not in self.fp8_meta:
            self._make_states(state["recipe"], state["num_gemms"])
        for direction in ("fwd", "bwd"):
            for name, tensor in zip(("amax_history", "scale"), self.fp8_meta[f"scaling_{direction}"].tensors(),
                                    strict=True):  # fmt: skip
                tensor.copy_(state[f"{name}_{direction}"])


def set_gradient(parameter: Tensor, gradient: Tensor | None, when: str) -> None:
    """Assign a gradient, as the release does: always, or only where there is none. There has to be a gradient then."""
    if when == "always" or parameter.grad is None:
        parameter.grad = gradient.to(parameter.dtype)


def mark_tensor_parallel(parameter: Tensor, dimension: int) -> None:
    parameter.tensor_model_parallel, parameter.partition_dim, parameter.partition_stride = True, dimension, 1


class Accumulation:
    """Where the gradient of a weight goes: to `main_grad`, looked up when the release does, or to `.grad`."""

    def __init__(self, weight: Tensor, fused: bool, is_first_microbatch: bool | None):
        self._weight, self.is_fused = weight, fused
        self._adds = not is_first_microbatch  # the first microbatch overwrites `main_grad`
        early = fused and fact("main_grad_is_read_in") == "forward" and weight.requires_grad
        self._early = weight.main_grad if early else None

    def buffer(self) -> Tensor | None:
        """Called in the backward."""
        if not self.is_fused:
            return None
        return self._weight.main_grad if self._early is None else self._early

    def product(self, buffer: Tensor | None, input: Tensor, output_grad: Tensor) -> Tensor:
        gradient = output_grad.t().matmul(input)
        if buffer is None:
            return gradient
        return buffer.add_(gradient) if self._adds else buffer.copy_(gradient)

    def returned(self) -> Tensor | None:
        """What the backward returns for a weight whose gradient is, or will be, in `main_grad`."""
        if not hasattr(self._weight, "grad_added_to_main_grad"):
            return None
        self._weight.grad_added_to_main_grad = True
        zero = getattr(self._weight, "zero_out_wgrad", False)
        return get_dummy_wgrad(list(self._weight.main_grad.shape), self._weight.dtype, zero=zero)
