"""The graphs of the tiny models, captured once in each process.

Problem: torch.export takes a second for a tiny model, each rank of each run captures its model anew, and most runs of
the tests have the same few. Solution: a process that captures what it has captured before gets a copy of that graph
with the parameters and buffers of the new model. What is captured is compared whole: modules with all their settings,
parameters, buffers, the batch with its values, and the options. The captures themselves are tested in tests/capture.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import hashlib
import inspect
from collections.abc import Iterator, Mapping
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensor

from megatron.capture.export import Captured, capture
from megatron.finetuning import pretrained

_KNOWN: dict[bytes, tuple[Captured, torch.nn.Module]] = {}


@contextlib.contextmanager
def remembered() -> Iterator[None]:
    """In the block fine-tuning captures a model only if this process has not captured the same one."""
    with mock.patch.object(pretrained, "capture", _capture):
        yield


def _capture(model: torch.nn.Module, batch: Mapping[str, torch.Tensor], **options: object) -> Captured:
    key = _key(model, batch, options)
    if key not in _KNOWN:
        captured = capture(model, batch, **options)
        _KNOWN[key] = _copied(captured, model, model), model  # the run may change its own
        return captured
    return _copied(*_KNOWN[key], model)


def _key(model: torch.nn.Module, batch: Mapping[str, torch.Tensor], options: Mapping[str, object]) -> bytes:
    """What is captured, in a few bytes."""
    words = [
        [(name, type(module), _settings(module)) for name, module in model.named_modules()],
        [(name, _form(each), each.requires_grad) for name, each in model.named_parameters(remove_duplicate=False)],
        [(name, _form(each), _values(each)) for name, each in model.named_buffers(remove_duplicate=False)],
        [(name, _form(each), _values(each)) for name, each in batch.items()],
        [(name, _said(value)) for name, value in sorted(options.items())],
    ]
    return hashlib.sha256(repr(words).encode()).digest()


def _form(tensor: torch.Tensor) -> tuple:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device


def _values(tensor: torch.Tensor) -> bytes:
    if tensor.is_meta or isinstance(tensor, FakeTensor):
        return b""
    return hashlib.sha256(tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()).digest()


def _settings(module: torch.nn.Module) -> list[tuple[str, str]]:
    own = {name: value for name, value in vars(module).items() if name not in ("_parameters", "_buffers", "_modules")}
    return sorted((name, _said(value)) for name, value in own.items())


def _said(value: object) -> str:
    """A setting in words: whole for plain values, containers of them and configurations, else its type alone."""
    if isinstance(value, (list, tuple)):
        return f"{type(value).__name__}({', '.join(map(_said, value))})"
    if isinstance(value, (set, frozenset)):
        return f"{type(value).__name__}({', '.join(sorted(map(_said, value)))})"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{_said(name)}: {_said(each)}' for name, each in value.items())}}}"
    if isinstance(value, (str, int, float, type(None), torch.dtype, torch.device, type)):
        return repr(value)
    if dataclasses.is_dataclass(value) or hasattr(value, "to_dict"):
        return f"{type(value).__name__}({_said(vars(value))})"
    if inspect.isfunction(value):
        closure = [_said(cell.cell_contents) for cell in value.__closure__ or ()]
        return f"{value.__module__}.{value.__qualname__} {closure}"
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _copied(captured: Captured, old: torch.nn.Module, new: torch.nn.Module) -> Captured:
    """A copy whose parameters and buffers are those of `new`, where `captured` has those of `old`."""
    memo: dict[int, object] = {}
    for kind in ("named_parameters", "named_buffers"):
        pairs = zip(*(dict(getattr(each, kind)(remove_duplicate=False)).values() for each in (old, new)), strict=True)
        memo |= {id(one): other for one, other in pairs}
    graph_module = copy.deepcopy(captured.graph_module, memo)
    graphs = captured.graph_module.graph, graph_module.graph
    of_old = dict(zip(*(each.nodes for each in graphs), strict=True))
    assert all((node.op, node.name) == (copied.op, copied.name) for node, copied in of_old.items())
    return dataclasses.replace(
        captured,
        graph_module=graph_module,
        nodes=tuple(of_old[node] for node in captured.nodes),
        parameters={name: memo[id(each)] for name, each in captured.parameters.items()},
        loss=of_old[captured.loss],
        kept={name: of_old[node] for name, node in captured.kept.items()},
    )
