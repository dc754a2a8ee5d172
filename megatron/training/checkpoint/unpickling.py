"""Unpickling what a checkpoint holds, without running what somebody has put there.

Problem: the index of a torch_dist checkpoint (`.metadata`) is a pickle, and so are the objects beside its tensors.
torch reads both with all that pickle can do, so a file from elsewhere may name any function and have it called.

Solution: from `install` on, every reader in this process, megatron.core's own included, goes through unpicklers that
know which classes belong there. The index has its list below; objects are read as torch reads weights.
"""

import pickle
import types
import warnings
from enum import Enum
from typing import Any

import torch
from torch.distributed.checkpoint import default_planner, filesystem

_NAMES = {
    "torch.distributed.checkpoint.metadata": (
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties",
        "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo", "_StoragePrefix"),
    "torch.distributed.checkpoint.planner": (
        "BytesIOWriteData", "SavePlan", "TensorWriteData", "WriteItem", "WriteItemType",
    ),
    "megatron.core.dist_checkpointing.strategies.torch": ("MCoreSavePlan",),
    "torch.serialization": ("_get_layout",),
    "torch": ("Size",),
    "collections": ("OrderedDict", "defaultdict"),
    "pathlib": ("PosixPath", "PurePosixPath"),
    "builtins": ("dict", "frozenset", "list", "set", "tuple"),
}  # fmt: skip
"""What the index of a checkpoint consists of: module -> names."""

_installed = False


def install() -> None:
    """From now on torch's and megatron.core's readers of checkpoints call nothing that a file names. Again is free."""
    global _installed
    if _installed:
        return
    _register_safe_classes()
    filesystem.pickle = _Replaced(pickle, load=lambda file: IndexUnpickler(file).load())
    default_planner.torch = _Replaced(torch, load=_load_object)
    _installed = True


class IndexUnpickler(pickle.Unpickler):
    """Reads the index of a checkpoint. Raises UnpicklingError for anything that does not belong there."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return enum_member
        if name in _NAMES.get(module, ()) or (
            module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        ):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which does not belong into the index of a checkpoint")


def enum_member(enumeration: type[Enum], name: str) -> Enum:
    """What `getattr` may do in a checkpoint: Python 3.11.2 writes a member of an enumeration that way."""
    if not (isinstance(enumeration, type) and issubclass(enumeration, Enum) and name in enumeration.__members__):
        raise pickle.UnpicklingError(f"it asks for {name!r} of {enumeration!r}, which is no member of an enumeration")
    return enumeration[name]


class _Replaced(types.ModuleType):
    """A module with some of its names replaced, for one of its users."""

    def __init__(self, module: types.ModuleType, **names: Any) -> None:
        super().__init__(module.__name__)
        self.__dict__.update(names)
        self.__dict__["_module"] = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_module"], name)


def _load_object(file: Any, **options: Any) -> Any:
    return torch.load(file, **options | {"weights_only": True})


def _register_safe_classes() -> None:
    torch.serialization.add_safe_globals([(enum_member, "builtins.getattr")])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        from megatron.core.safe_globals import register_safe_globals
    register_safe_globals()
