"""FP8 as rounding: values are scaled, rounded to e4m3 or e5m2, and scaled back, and products run in the tensors' type.

Scales are those of the recipes. `DelayedScaling` takes them from a history of largest values ("amax"), which is written
by each cast, and read and moved on by `reduce_and_update_fp8_tensors`: at the end of the outermost FP8 context, if
autograd is on, and in the backward of the first layer of that context. It takes all layers of the process that had the
same recipe and group, and all ranks of that group.
"""

import contextlib
from collections import deque

import torch
from torch import Tensor

from .._release import pinned
from ..common.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling, Format, MXFP8BlockScaling, Recipe


class RecipeState:
    """Scales of delayed scaling, [tensors], and the history of their largest values, [length, tensors]."""

    def __init__(self, length: int, num_tensors: int):
        self.scale, self.amax_history = torch.ones(num_tensors), torch.zeros(length, num_tensors)

    def tensors(self) -> tuple[Tensor, Tensor]:
        return self.amax_history, self.scale


class _GlobalState:
    def __init__(self):
        self.enabled, self.recipe, self.group, self.depth, self.is_first = False, None, None, 0, False
        self.states: dict[tuple[bool, str, int], list[RecipeState]] = {}
        self.arguments: dict[tuple[str, int], tuple[Recipe, object]] = {}


_IN_RECOMPUTE: list[bool] = [False, False]  # in a function whose activations are recomputed; recomputing them


class FP8GlobalStateManager:
    _state = _GlobalState()

    @classmethod
    def reset(cls) -> None:
        cls._state = _GlobalState()

    @classmethod
    def is_fp8_enabled(cls) -> bool:
        return cls._state.enabled

    @classmethod
    def get_fp8_recipe(cls) -> Recipe:
        return DelayedScaling() if cls._state.recipe is None else cls._state.recipe

    @classmethod
    def get_fp8_group(cls):
        return cls._state.group

    @classmethod
    def is_first_fp8_module(cls) -> bool:
        """True once in each outermost context."""
        found, cls._state.is_first = cls._state.is_first, False
        return found

    @classmethod
    def add_fp8_tensors_to_global_buffer(cls, fp8_meta: dict) -> None:
        if fp8_meta.setdefault("is_in_buffer", False):
            return
        fp8_meta["is_in_buffer"] = True
        for forward in (True, False):
            key = (forward, str(fp8_meta["recipe"]), id(fp8_meta["fp8_group"]))
            cls._state.states.setdefault(key, []).append(fp8_meta["scaling_fwd" if forward else "scaling_bwd"])

    @classmethod
    def reduce_and_update_fp8_tensors(cls, forward: bool = True) -> None:
        for (is_forward, *key), states in cls._state.states.items():
            if is_forward is forward:
                _update(states, *cls._state.arguments[tuple(key)], forward)

    @classmethod
    def copy_forward_fp8_meta_tensors_for_recompute(cls, fp8_meta: dict) -> None:
        if fp8_meta["recipe"].delayed():
            copies = [each.clone() for each in fp8_meta["scaling_fwd"].tensors()]
            fp8_meta.setdefault("for_recompute", deque()).append(copies)

    @classmethod
    def get_old_fp8_meta_tensors_for_recompute(cls, fp8_meta: dict) -> None:
        if fp8_meta["recipe"].delayed():
            tensors = fp8_meta["scaling_fwd"].tensors()
            fp8_meta["updated"] = [each.clone() for each in tensors]
            for tensor, old in zip(tensors, fp8_meta["for_recompute"].popleft(), strict=True):
                tensor.copy_(old)

    @staticmethod
    def restore_fp8_meta_tensors(fp8_meta: dict) -> None:
        if fp8_meta["recipe"].delayed():
            for tensor, updated in zip(fp8_meta["scaling_fwd"].tensors(), fp8_meta.pop("updated"), strict=True):
                tensor.copy_(updated)


def _update(states: list[RecipeState], recipe: DelayedScaling, group, forward: bool) -> None:
    """Reduce the largest values over the group, move histories on, and choose new scales."""
    amax = torch.cat([each.amax_history[0] for each in states])
    if recipe.reduce_amax and torch.distributed.is_initialized() and torch.distributed.get_world_size(group) > 1:
        torch.distributed.all_reduce(amax, op=torch.distributed.ReduceOp.MAX, group=group)
    largest = recipe.fp8_format.value[0 if forward else 1]
    for state, part in zip(states, amax.split([each.scale.numel() for each in states]), strict=True):
        state.amax_history[0] = part
        if recipe.amax_compute_algo == "max":
            part = state.amax_history.amax(dim=0)
        state.amax_history.copy_(state.amax_history.roll(-1, 0))
        state.amax_history[0] = 0.0
        scale = (largest / part) / 2**recipe.margin
        scale = torch.where((part > 0) & part.isfinite(), scale, state.scale)
        state.scale.copy_(scale.clamp(max=torch.finfo(torch.float32).max))


@pinned
@contextlib.contextmanager
def fp8_autocast(enabled=True, fp8_recipe=None, fp8_group=None):
    state, recipe = FP8GlobalStateManager._state, fp8_recipe or DelayedScaling()
    before = state.enabled, state.recipe, state.group, state.is_first
    state.arguments[str(recipe), id(fp8_group)] = recipe, fp8_group
    state.enabled, state.recipe, state.group = enabled, recipe, fp8_group
    if state.depth == 0:
        state.is_first = True
    state.depth += 1
    try:
        yield
    finally:
        state.enabled, state.recipe, state.group, state.is_first = before
        state.depth -= 1
        if enabled and state.depth == 0 and torch.is_grad_enabled():
            FP8GlobalStateManager.reduce_and_update_fp8_tensors(forward=True)


@pinned
def fp8_model_init(enabled=True, recipe=None, preserve_high_precision_init_val=False):
    raise NotImplementedError("the stand-in of Transformer Engine has no weights in FP8 alone")


# --- casts ------------------------------------------------------------------------------------------------------------


class QuantizedTensorStorage:
    """A tensor as products along its rows read it, and as those along its columns do; no torch tensor."""

    def __init__(self, rows: Tensor, columns: Tensor):
        self._rows, self._columns = rows, columns

    def get_data_tensors(self) -> tuple[Tensor, Tensor]:
        return self._rows, self._columns

    def quantize_(self, other: "QuantizedTensorStorage") -> None:
        """Overwrite in place."""
        for mine, theirs in zip(self.get_data_tensors(), other.get_data_tensors(), strict=True):
            mine.copy_(theirs)


def quantize(tensor: Tensor, recipe: Recipe, state: RecipeState | None, slot: int, kind: str) -> QuantizedTensorStorage:
    """Cast a tensor. `kind`: "input", "weight" or "gradient"; `slot`: that of the tensor in a delayed `state`."""
    is_wide = kind == "gradient" and recipe.fp8_format is Format.HYBRID
    dtype, values = torch.float8_e5m2 if is_wide else torch.float8_e4m3fn, tensor.detach().float()
    largest = torch.finfo(dtype).max
    if recipe.delayed():
        amax = values.abs().max() if values.numel() else torch.zeros(())
        torch.maximum(state.amax_history[0, slot], amax, out=state.amax_history[0, slot])
        scales = [state.scale[slot].clone()] * 2
    elif isinstance(recipe, Float8CurrentScaling):
        amax = values.abs().max() if values.numel() else torch.zeros(())
        scales = [torch.where(amax > 0, largest / amax, 1.0)] * 2
    elif isinstance(recipe, Float8BlockScaling):
        blocks = [(128, 128)] * 2 if kind == "weight" else [(1, 128), (128, 1)]
        scales = [_block_scales(values, *each, largest) for each in blocks]
    else:
        assert isinstance(recipe, MXFP8BlockScaling), recipe
        scales = [_block_scales(values, *each, largest) for each in ((1, 32), (32, 1))]
    return QuantizedTensorStorage(
        *(((values * scale).clamp(-largest, largest).to(dtype).float() / scale).to(tensor.dtype) for scale in scales)
    )


def _block_scales(values: Tensor, rows: int, columns: int, largest: float) -> Tensor:
    """Of each element of [r, c] the scale of its block, a power of two."""
    r, c = values.shape
    padded = torch.nn.functional.pad(values.abs(), (0, -c % columns, 0, -r % rows))
    amax = padded.unflatten(0, (-1, rows)).unflatten(2, (-1, columns)).amax(dim=(1, 3))
    scales = torch.where(amax > 0, torch.exp2(torch.floor(torch.log2(largest / amax))), 1.0)
    return scales.repeat_interleave(rows, 0)[:r].repeat_interleave(columns, 1)[:, :c]
