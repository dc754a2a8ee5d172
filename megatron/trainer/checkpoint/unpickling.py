"""Unpickling what a checkpoint holds, without running what somebody has put there.

Problem: the index of a torch_dist checkpoint (`.metadata`) is a pickle, and so are the objects beside its tensors.
torch reads both with all that pickle can do, so a file from elsewhere may name any function and have it called.

Solution: from `install` on, every reader in this process, megatron.core's own included, goes through unpicklers that
know what belongs there. The index has one of its own (index_pickle.py); objects are read as torch reads weights.
"""

import pickle
import types
import warnings
from enum import Enum
from typing import Any

import torch
from torch.distributed.checkpoint import default_planner, filesystem

from megatron.trainer.checkpoint.index_pickle import IndexUnpickler, enum_member

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
        from megatron.core.safe_globals import SAFE_GLOBALS, register_safe_globals
    register_safe_globals()
    for kind in SAFE_GLOBALS:
        if isinstance(kind, type) and issubclass(kind, Enum):
            kind.__setstate__ = _refuse_state  # torch's reader asks for it before it sets attributes


def _refuse_state(member: Enum, state: Any) -> None:
    """A member of an enumeration is the whole process's; no file has to set attributes of it, and none does."""
    raise pickle.UnpicklingError(f"it sets attributes of {member}, which the objects of a checkpoint do not")
