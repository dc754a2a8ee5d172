"""Safe unpickling of checkpoints: a file cannot run code.

Problem: the index of a torch_dist checkpoint (`.metadata`) is a pickle, and so are the objects beside its tensors.
torch reads both with unrestricted pickle, so a file from another source may call any function. A list of allowed names
is not enough: the pickle instruction BUILD sets any attribute of the object on top of the stack, which may be an
allowed class or function.

Solution: after `install`, every reader in this process, including megatron.core's own, uses restricted unpicklers.
Objects are read as torch reads weights. The index has its own unpickler, with which a file can only build data. A name
is read as a `_Name`, which only the instructions that make an object can use, as the tables below allow; the class
itself never reaches the stack. Attributes can be set only on new objects of the listed classes, and items only in plain
containers. All other instructions that change objects are refused.
"""

import pickle
import types
import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from enum import Enum
from importlib import import_module
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar, NamedTuple

import torch
from torch.distributed.checkpoint import default_planner, filesystem

# --- the index --------------------------------------------------------------------------------------------------------

_RECORDS = {
    "torch.distributed.checkpoint.metadata": (
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties",
        "TensorStorageMetadata",
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo", "_StoragePrefix"),
    "torch.distributed.checkpoint.planner": ("BytesIOWriteData", "SavePlan", "TensorWriteData", "WriteItem"),
    "megatron.core.dist_checkpointing.strategies.torch": ("MCoreSavePlan",),
}  # fmt: skip
"""Classes whose instances have only plain attributes: module -> names."""
_ENUMERATIONS = {
    "torch.distributed.checkpoint.metadata": ("_MEM_FORMAT_ENCODING",),
    "torch.distributed.checkpoint.planner": ("WriteItemType",),
}
_FACTORIES = {"dict": dict, "list": list, "set": set}


class _Name(NamedTuple):
    """A name in a file; it stands for a class or function without giving access to it."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


class IndexUnpickler(pickle._Unpickler):
    """The unpickler of a checkpoint's index. Raises UnpicklingError for anything that an index does not need.

    The base class is the Python implementation, since the instructions of the C implementation cannot be replaced.
    """

    dispatch: ClassVar[dict] = dict(pickle._Unpickler.dispatch)

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        named = _Name("builtins" if module == "__builtin__" else module, name)  # their name in protocol 2
        if named not in _CALLS and not _is_listed(_RECORDS, named) and not _is_listed(_ENUMERATIONS, named):
            raise pickle.UnpicklingError(f"it names {named}, which does not belong into the index of a checkpoint")
        return named

    def _make(self, named: Any, arguments: Any) -> Any:
        if type(named) is _Name and type(arguments) is tuple:
            if _is_listed(_RECORDS, named) and not arguments:
                return object.__new__(_resolve(named))
            if _is_listed(_ENUMERATIONS, named) and len(arguments) == 1:
                return _member(_resolve(named), arguments[0])
            if named in _CALLS:
                return _CALLS[named](*arguments)
        raise pickle.UnpicklingError(f"it makes an object of {_said(named)} in a way that an index does not")

    def load_reduce(self) -> None:
        arguments = self.stack.pop()
        self.stack[-1] = self._make(self.stack[-1], arguments)

    def load_newobj_ex(self) -> None:
        if self.stack.pop():
            raise pickle.UnpicklingError("it makes an object with named arguments, which an index does not")
        self.load_reduce()

    def load_build(self) -> None:
        state, record = self.stack.pop(), self.stack[-1]
        if not _is_listed(_RECORDS, _Name(type(record).__module__, type(record).__qualname__)):
            raise pickle.UnpicklingError(f"it sets attributes of {_said(record)}, which an index does not")
        if type(state) is tuple and type(record).__name__ == "TensorProperties":
            record.__setstate__(state)
        elif type(state) is dict and all(type(name) is str and not name.startswith("__") for name in state):
            record.__dict__.update(state)
        else:
            raise pickle.UnpicklingError(f"it sets attributes of a {type(record).__name__} in a way an index does not")

    def load_refused(self) -> None:
        raise pickle.UnpicklingError("it has an instruction that the index of a checkpoint does not need")


def _only_on(kinds: tuple[type, ...], instruction: Callable, *, above: Callable) -> Callable:
    """A restricted version of `instruction` that accepts only objects whose type is exactly one of `kinds`.

    `above(unpickler)`: returns the object that the instruction changes.
    """

    def checked(self: IndexUnpickler) -> None:
        changed = above(self)
        if type(changed) not in kinds:
            raise pickle.UnpicklingError(f"it adds to {_said(changed)}, which an index does not")
        instruction(self)

    return checked


def _replace_instructions() -> None:
    dispatch, containers = IndexUnpickler.dispatch, (dict, OrderedDict, defaultdict)
    dispatch[pickle.REDUCE[0]] = dispatch[pickle.NEWOBJ[0]] = IndexUnpickler.load_reduce
    dispatch[pickle.NEWOBJ_EX[0]] = IndexUnpickler.load_newobj_ex
    dispatch[pickle.BUILD[0]] = IndexUnpickler.load_build
    for code in (pickle.INST, pickle.OBJ, pickle.EXT1, pickle.EXT2, pickle.EXT4, pickle.PERSID, pickle.BINPERSID,
                 pickle.NEXT_BUFFER, pickle.READONLY_BUFFER):  # fmt: skip
        dispatch[code[0]] = IndexUnpickler.load_refused
    for kinds, one, many in (
        ((list,), pickle.APPEND, pickle.APPENDS),
        (containers, pickle.SETITEM, pickle.SETITEMS),
        ((set,), None, pickle.ADDITEMS),
    ):
        if one is not None:
            depth = -2 if one == pickle.APPEND else -3
            dispatch[one[0]] = _only_on(kinds, dispatch[one[0]], above=lambda self, depth=depth: self.stack[depth])
        dispatch[many[0]] = _only_on(kinds, dispatch[many[0]], above=lambda self: self.metastack[-1][-1])


_replace_instructions()


def _said(thing: Any) -> str:
    """The name of an object for messages; calls no methods of an object, which may be incomplete."""
    return (
        str(thing) if type(thing) is _Name else repr(thing)[:80] if type(thing) in (str, int) else type(thing).__name__
    )


def _is_listed(table: dict[str, tuple[str, ...]], named: _Name) -> bool:
    return named.name in table.get(named.module, ())


def _resolve(named: _Name) -> Any:
    return getattr(import_module(named.module), named.name)


def _member(enumeration: type[Enum], value: Any) -> Enum:
    for member in enumeration:
        if type(value) is type(member.value) and member.value == value:
            return member
    raise pickle.UnpicklingError(f"it asks for {_said(value)}, which is no value of {enumeration.__name__}")


def _enum_member(enumeration: type[Enum], name: str) -> Enum:
    """The `getattr` that a checkpoint may call, with which Python 3.11 and later pickle members of enumerations."""
    if not (isinstance(enumeration, type) and issubclass(enumeration, Enum) and name in enumeration.__members__):
        raise pickle.UnpicklingError(f"it asks for {name!r} of {enumeration!r}, which is no member of an enumeration")
    return enumeration[name]


def _named_member(named: _Name, name: str) -> Enum:
    if type(named) is not _Name or not _is_listed(_ENUMERATIONS, named) or type(name) is not str:
        raise pickle.UnpicklingError(
            f"it asks for {_said(name)} of {_said(named)}, which is no enumeration of an index"
        )
    return _enum_member(_resolve(named), name)


def _layout(text: str) -> torch.layout:
    found = getattr(torch, str(text).removeprefix("torch."), None)
    if not isinstance(found, torch.layout):
        raise pickle.UnpicklingError(f"it asks for {_said(text)}, which is no layout of tensors")
    return found


def _path(*parts: str) -> Path:
    return Path(*map(str, parts))


def _pure_path(*parts: str) -> PurePosixPath:
    return PurePosixPath(*map(str, parts))


def _defaultdict(factory: _Name | None = None) -> defaultdict:
    made = None if factory is None else _FACTORIES.get(factory.name) if type(factory) is _Name else None
    if factory is not None and made is None:
        raise pickle.UnpicklingError(f"it makes defaults with {_said(factory)}, which an index does not")
    return defaultdict(made)


_CALLS: dict[_Name, Callable] = {
    _Name("builtins", "getattr"): _named_member,
    _Name("builtins", "dict"): dict,
    _Name("builtins", "frozenset"): frozenset,
    _Name("builtins", "list"): list,
    _Name("builtins", "set"): set,
    _Name("builtins", "tuple"): tuple,
    _Name("collections", "OrderedDict"): OrderedDict,
    _Name("collections", "defaultdict"): _defaultdict,
    _Name("pathlib", "Path"): _path,
    _Name("pathlib", "PosixPath"): _path,
    _Name("pathlib", "PurePosixPath"): _pure_path,
    _Name("torch", "Size"): torch.Size,
    _Name("torch.serialization", "_get_layout"): _layout,
}
"""Name that a file may call -> the function that is called instead."""


# --- installation for all readers of this process ---------------------------------------------------------------------

_installed = False


def install() -> None:
    """Replace the readers of checkpoints in torch and megatron.core by restricted readers. Further calls do nothing."""
    global _installed
    if _installed:
        return
    _register_safe_classes()
    filesystem.pickle = _Replaced(pickle, load=lambda file: IndexUnpickler(file).load())
    default_planner.torch = _Replaced(torch, load=_load_object)
    _installed = True


class _Replaced(types.ModuleType):
    """A copy of a module with some names replaced, for a single module that uses it."""

    def __init__(self, module: types.ModuleType, **names: Any) -> None:
        super().__init__(module.__name__)
        self.__dict__.update(names)
        self.__dict__["_module"] = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_module"], name)


def _load_object(file: Any, **options: Any) -> Any:
    return torch.load(file, **options | {"weights_only": True})


def _register_safe_classes() -> None:
    torch.serialization.add_safe_globals([(_enum_member, "builtins.getattr")])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        from megatron.core.safe_globals import SAFE_GLOBALS, register_safe_globals
    register_safe_globals()
    for kind in SAFE_GLOBALS:
        if isinstance(kind, type) and issubclass(kind, Enum):
            kind.__setstate__ = _refuse_state  # torch's reader calls it instead of setting attributes


def _refuse_state(member: Enum, state: Any) -> None:
    """Refuse to set attributes of an enumeration's member, which the whole process shares."""
    raise pickle.UnpicklingError(f"it sets attributes of {member}, which the objects of a checkpoint do not")
