"""Replacements, while a model is exported, for calls in its code that torch.export cannot follow.

- ``len(tensor)`` is a Python number, which would fix the size of the batch; in the modules of the model it is the
  tensor's symbolic size.
- ``list(tensor)``, which would do the same, gives one object for all rows, of which `torch.cat` makes one tensor again
  (the images of a batch); any other use of that object is refused.
- ``torch.nn.functional.ctc_loss`` makes a tensor whose shape depends on values, for its own backward alone. It is kept
  as one operator.
- ``torch.vmap`` leaves only a shell in the graph. If transformers makes a mask with it from a function of four indices
  (Gemma 3 with images), the function is called with all indices at once.
- ``torch._check_tensor_all`` becomes a check of each batch.
- The gated delta rule (Qwen3-Next) solves a triangular system. In an export it writes out 63 steps in each layer, which
  takes long, so it is told that nothing is exported.
- ``module.to(dtype)`` changes parameters, which torch.export does not allow; it does nothing if the dtype stays.
- A tensor that a forward leaves in an attribute of its module is fake in an export, so the attribute is restored.
- Random numbers from Python's or numpy's generator would be the same in all runs of the graph, so they are refused.
- A gradient that is written by hand (``torch.autograd.Function``, a hook) would be lost, because a captured graph has
  the gradients of its operators. It is refused.
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable, Iterator

import numpy
import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from megatron.capture.decisions import check_all

_CTC_LOSS = torch.nn.functional.ctc_loss


def ctc_loss(
    log_probs: Tensor, targets: Tensor, input_lengths: Tensor, target_lengths: Tensor, blank: int = 0,
    reduction: str = "mean", zero_infinity: bool = False,
) -> Tensor:  # fmt: skip
    """Compute ``torch.nn.functional.ctc_loss`` by torch's own kernel; of fake tensors the shape only."""
    if isinstance(log_probs, FakeTensor) or log_probs.is_meta:
        return log_probs.sum((0, 2)) if reduction == "none" else log_probs.sum()
    with torch.backends.cudnn.flags(enabled=False):
        return _CTC_LOSS(log_probs, targets, input_lengths, target_lengths, blank, reduction, zero_infinity)


_exported_ctc_loss = torch.library.custom_op("megatron_capture::ctc_loss", ctc_loss, mutates_args=())


@_exported_ctc_loss.register_fake
def _(log_probs, targets, input_lengths, target_lengths, blank=0, reduction="mean", zero_infinity=False):
    return log_probs.new_empty(log_probs.shape[1:2] if reduction == "none" else ())


class OtherGeneratorError(ValueError):
    """An error for a model that draws random numbers from another generator than torch's."""


def _to_unless_the_same(module: torch.nn.Module, *args: object, **kwargs: object) -> torch.nn.Module:
    device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
    same = device is None and all(each.dtype is dtype for each in module.parameters())
    return module if same else _TO(module, *args, **kwargs)


BY_HAND = "has a gradient that is written by hand"
_APPLY = torch.autograd.Function.__dict__["apply"]
_AS_AUTOGRAD = {
    ("transformers.models.bloom.modeling_bloom", "GeLUFunction"),  # the same derivative
    ("torch._library.autograd", None),  # of operators that the graph keeps
}


def _apply(kind: type[torch.autograd.Function], *args: object, **kwargs: object) -> object:
    known = not _AS_AUTOGRAD.isdisjoint({(kind.__module__, kind.__name__), (kind.__module__, None)})
    trains = any(isinstance(each, Tensor) and each.requires_grad for each in args)
    if torch.is_grad_enabled() and trains and not known:
        raise TypeError(f"{kind.__name__} {BY_HAND}")
    return _APPLY.__get__(None, kind)(*args, **kwargs)


def _register_hook(tensor: Tensor, hook: Callable[[Tensor], Tensor | None]) -> object:
    raise TypeError(f"a hook of a tensor {BY_HAND}")


_EXPORTING, _DELTA_RULE = "is_torchdynamo_exporting", "torch_chunk_gated_delta_rule"
_TO = torch.nn.Module.to


def _of_all_indices(mask_function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def mask(*indices: Tensor) -> Tensor:
        """A mask of all indices of four dimensions."""
        places = [each.view([-1 if at == place else 1 for at in range(4)]) for place, each in enumerate(indices)]
        return mask_function(*places).expand([each.shape[0] for each in indices])

    return mask


_MASKS = {"_vmap_expansion_sdpa": _of_all_indices, "TransformGetItemToIndex": contextlib.nullcontext}


class _Rows:
    """All rows of a tensor whose number depends on the batch."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        rows = args[0] if args else ()
        along = (kwargs or {}).get("dim", args[1] if args[1:] else 0)
        if function is torch.cat and along == 0 and len(rows) == 1 and isinstance(rows[0], cls):
            return rows[0]._tensor.flatten(0, 1)
        raise TypeError(_LOOP)

    def __getitem__(self, index: object) -> Tensor:
        raise TypeError(_LOOP)

    def __getattr__(self, name: str) -> object:
        raise TypeError(_LOOP)


_LOOP = "a loop over the samples of a batch, whose number differs"


def _iter(tensor: Tensor) -> Iterator[Tensor | _Rows]:
    return iter((_Rows(tensor),)) if _has_any_length(tensor) else _ITER(tensor)


def _len(tensor: Tensor) -> int:
    if _has_any_length(tensor):
        raise TypeError("the length of a batch as a Python number, which differs")  # list() goes on without it
    return _LEN(tensor)


def _has_any_length(tensor: Tensor) -> bool:
    """Whether the number of rows differs from batch to batch by its shape, not by its values."""
    size = tensor.shape[0] if tensor.dim() else 0
    return isinstance(size, torch.SymInt) and not size.node.expr.is_number and not free_unbacked_symbols(size)


_ITER, _LEN = Tensor.__iter__, Tensor.__len__


def _symbolic_len(value: object) -> int | torch.SymInt:
    return value.shape[0] if isinstance(value, Tensor) else len(value)


@contextlib.contextmanager
def standing_in(model: torch.nn.Module) -> Iterator[None]:
    """A block in which torch.export can trace `model`: functions that it cannot trace are replaced.

    Raises OtherGeneratorError at its end if the forward drew from another generator than torch's.
    """
    sources = {type(module).__module__ for module in model.modules()}
    places = [sys.modules[name] for name in sources if name in sys.modules and not name.startswith("torch.")]
    replaced = [(place, "len", _symbolic_len) for place in places if "len" not in vars(place)]
    replaced += [
        (place, _EXPORTING, lambda: False) for place in places if vars(place).keys() >= {_DELTA_RULE, _EXPORTING}
    ]
    places = [module for name, module in sys.modules.items() if name == "transformers.masking_utils"]
    replaced += [(place, name, value) for place in places for name, value in _MASKS.items() if name in vars(place)]
    replaced += [
        (torch.nn.functional, "ctc_loss", _exported_ctc_loss), (torch.nn.Module, "to", _to_unless_the_same),
        (torch, "_check_tensor_all", check_all), (torch.autograd.Function, "apply", classmethod(_apply)),
        (Tensor, "register_hook", _register_hook), (Tensor, "__iter__", _iter), (Tensor, "__len__", _len),
    ]  # fmt: skip
    originals = [(place, name, vars(place).get(name)) for place, name, _ in replaced]
    attributes = {module: dict(vars(module)) for module in model.modules()}
    drawn = _other_generators()
    try:
        for place, name, value in replaced:
            setattr(place, name, value)
        yield
    finally:
        for place, name, value in originals:
            if value is None:
                delattr(place, name)
            else:
                setattr(place, name, value)
        for module, before in attributes.items():
            for name, value in list(vars(module).items()):
                if isinstance(value, FakeTensor) and before.get(name) is not value:
                    delattr(module, name)
                    vars(module).update({name: before[name]} if name in before else {})
    if _other_generators() != drawn:
        raise OtherGeneratorError(
            f"{type(model).__name__} draws from Python's or numpy's generator in its forward, and a captured graph "
            "would repeat the drawn values forever; set apply_spec_augment to false and layerdrop to 0.0 in its "
            "configuration (config.json), where it has them, or draw with torch.nn.Dropout"
        )


def _other_generators() -> tuple:
    _, keys, position, *_ = numpy.random.get_state()
    return random.getstate(), keys.tobytes(), position


def settle_stand_ins(graph: fx.Graph) -> None:
    """Replace the operators that an export has kept whole by the functions that compute them."""
    for node in graph.nodes:
        if node.target is torch.ops.megatron_capture.ctc_loss.default:
            node.target = ctc_loss
