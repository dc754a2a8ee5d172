"""torch's operations as work of streams.

The dispatcher tells what each operation reads and writes (its schema does); views touch no memory. Reading a value from
Python is seen as `_local_scalar_dense`, or, where a CPU tensor needs no operation for it, as the method of the tensor.
Collectives of torch's own groups are seen as operations, too.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_READS = {torch.Tensor.tolist, torch.Tensor.cpu, torch.Tensor.numpy}
_WAITS = {"aten::equal", "aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::unique_dim"}
"""Operations whose result's shape, or a truth, the host has to read."""
_INDEXING = {"aten::index", "aten::index_put_", "aten::_index_put_impl_"}
_NO_ACCESS = {"aten::set_", "aten::resize_", "aten::lift_fresh", "aten::alias", "aten::detach", "aten::_unsafe_view"}
_LIKE = ("aten::empty_like", "aten::zeros_like", "aten::ones_like", "aten::full_like", "aten::rand", "aten::new_")
"""Operations that only look at the shape of their argument."""


class Operations(TorchDispatchMode):
    """Notes every operation of the thread."""

    def __init__(self, recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        schema = getattr(func, "_schema", None)
        if schema is None:
            return func(*args, **kwargs)
        if schema.name == "aten::_local_scalar_dense":
            self._recorder.read(args[0], "item")
            return func(*args, **kwargs)
        if schema.name.startswith("c10d::"):
            self._recorder.use(f"group {_group_name(args)}", schema.name)
        if schema.name in _WAITS or (schema.name in _INDEXING and _is_sized_by_mask(args)):
            self._recorder.read(args[0], schema.name)
        if schema.name == "aten::copy_" and not (kwargs.get("non_blocking") or (len(args) > 2 and args[2])):
            self._recorder.copy(args[0], args[1])
        result = func(*args, **kwargs)
        if schema.name not in _NO_ACCESS:
            reads, writes = _touched(schema, args, kwargs, result)
            if schema.name.startswith(_LIKE):
                self._recorder.make_like(reads, writes)
                reads = []
            if reads or writes:
                self._recorder.launch(self._recorder.current, reads, writes, schema.name)
        return result


def _touched(schema, args, kwargs, result) -> tuple[list[Tensor], list[Tensor]]:
    """Tensors that an operation reads and writes."""
    outputs = result if isinstance(result, (tuple, list)) else [result]
    is_view = any(each.alias_info is not None and not each.alias_info.is_write for each in schema.returns)
    if schema.name.startswith("c10d::"):
        tensors = [each for each in tree_leaves(args) if isinstance(each, Tensor)]
        return [], tensors
    reads, writes = [], []
    values = [*args, *(kwargs.get(each.name) for each in schema.arguments[len(args) :])]
    for argument, value in zip(schema.arguments, values, strict=False):
        tensors = [each for each in tree_leaves(value) if isinstance(each, Tensor)]
        if argument.alias_info is not None and argument.alias_info.is_write:
            writes += tensors
        elif not is_view:
            reads += tensors
    if not is_view:
        for returned, output in zip(schema.returns, outputs, strict=False):
            if returned.alias_info is None:
                writes += [each for each in tree_leaves(output) if isinstance(each, Tensor)]
    return [each for each in reads if _is_plain(each)], [each for each in writes if _is_plain(each)]


def _is_sized_by_mask(args) -> bool:
    """Whether the host has to count a mask; torch fills one with a single value without."""
    has_mask = any(isinstance(each, Tensor) and each.dtype is torch.bool for each in tree_leaves(args[1]))
    return has_mask and not (len(args) > 2 and args[2].numel() == 1)


def _is_plain(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and tensor.device.type == "cpu"


def _group_name(args) -> str:
    for each in args:
        if isinstance(each, torch.ScriptObject):
            try:
                return torch.distributed.ProcessGroup.unbox(each).group_name
            except RuntimeError:
                continue
    return "?"


class Values(TorchFunctionMode):
    """Notes what only Python sees: values that are read without an operation, tensors that are asked for on a device,
    and copies between host and device, which a CPU leaves out.
    """

    def __init__(self, recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        recorder = self._recorder
        if func in _READS and recorder.read(args[0], func.__name__) and func is torch.Tensor.cpu:
            return recorder.on_host(args[0])
        if func is torch.Tensor.to and isinstance((*args[1:2], kwargs.get("device"))[0], torch.device):
            dtype = next((each for each in (*args[2:3], kwargs.get("dtype")) if each is not None), args[0].dtype)
            as_it_is = kwargs.get("non_blocking", False) and dtype is args[0].dtype  # or the host converts first
            return recorder.on_device(args[0], non_blocking=as_it_is).to(dtype)
        result = func(*args, **kwargs)
        asked = kwargs.get("device")  # by the name "cpu" where the host is meant on CUDA, too
        if asked not in (None, "cpu") and isinstance(result, Tensor) and not isinstance(func, type(Tensor.to)):
            recorder.mark_on_device(result)
            if getattr(func, "__name__", "") in ("tensor", "as_tensor"):
                recorder.copied_from_python(result)
        return result


def watch_this_thread(recorder) -> None:
    """From now on, as long as the calling thread lives."""
    Operations(recorder).__enter__()
    Values(recorder).__enter__()
