"""What the project's sources define, read off their syntax trees, and whether a dotted name or a path leads to it.

A name is accused only where that can be decided. A class that inherits from a library's may have any attribute; what is
called like a module may be a variable of the file that speaks of it, and then only an attribute that no source uses is
stale.
"""

from __future__ import annotations

import ast
import builtins
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from itertools import pairwise
from typing import NamedTuple

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_ANY_NAME = re.compile(r"(?<![A-Z])(?:NAME|COMMAND|FILE)(?![A-Z])")
_OTHERS = ("core", "training", "legacy", "bridge")
"""What lies in `megatron` and is NVIDIA's."""

_LIBRARY_BASES = {
    "NamedTuple": NamedTuple("_", []),
    "Enum": Enum,
    **dict.fromkeys(("Protocol", "Generic", "ABC", "abc.ABC"), object),
}


@dataclass
class Class:
    attributes: set[str]
    bases: list[str]
    is_open: bool = False
    """Whether it makes up attributes."""


@dataclass
class Module:
    """One file, or a folder that holds some."""

    name: str
    attributes: set[str] = field(default_factory=set)
    classes: dict[str, Class] = field(default_factory=dict)
    imports: dict[str, str] = field(default_factory=dict)
    """Name in this file -> name in full."""
    variables: set[str] = field(default_factory=set)
    """Arguments, what is assigned to, and attributes that are used."""
    texts: list[tuple[int, str]] = field(default_factory=list)
    """Line and text of each docstring."""

    @property
    def is_open(self) -> bool:
        return "__getattr__" in self.attributes or "*" in self.attributes


def _names(body: Iterable[ast.stmt]) -> Iterator[str]:
    """What a module's or a class's statements define; those within `if`, `with`, `try` and loops count."""
    for node in body:
        if isinstance(node, (*_FUNCTIONS, ast.ClassDef)):
            yield node.name
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            yield from (alias.asname or alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
            yield from (each.id for each in ast.walk(node) if isinstance(each, ast.Name))
        elif not isinstance(node, (ast.Expr, ast.Return, ast.Raise)):
            if isinstance(node, (ast.For, ast.With)):
                yield from (each.id for each in ast.walk(node) if isinstance(each, ast.Name))
            for part in ("body", "orelse", "finalbody", "handlers", "cases"):
                yield from _names(getattr(node, part, ()))


def _class(node: ast.ClassDef) -> Class:
    found = Class(set(_names(node.body)), [ast.unparse(base).split("[")[0] for base in node.bases])
    found.is_open = bool({"__getattr__", "__getattribute__"} & found.attributes)
    found.is_open |= any(base.endswith(node.name) for base in found.bases)  # another of its name: which, is not said
    for method in node.body:
        if isinstance(method, _FUNCTIONS) and method.args.args:
            own = method.args.args[0].arg
            for each in ast.walk(method):
                if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store):
                    if isinstance(each.value, ast.Name) and each.value.id == own:
                        found.attributes.add(each.attr)
                elif isinstance(each, ast.Name) and each.id == "setattr":
                    found.is_open = True
    return found


def read_module(name: str, source: str) -> Module:
    tree = ast.parse(source)
    found = Module(name, set(_names(tree.body)))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            found.variables.add(node.attr)
        elif isinstance(node, ast.Name):
            if isinstance(node.ctx, ast.Store):
                found.variables.add(node.id)
        elif isinstance(node, ast.arg):
            found.variables.add(node.arg)
        elif isinstance(node, ast.Expr):
            if isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
                found.texts.append((node.lineno, node.value.value))
        elif isinstance(node, ast.ClassDef):
            found.classes[node.name] = _class(node)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                first = alias.name.partition(".")[0]
                found.imports[alias.asname or first] = alias.name if alias.asname else first
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                found.imports[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return found


class Project:
    """The modules of a project by their full names, and its files."""

    def __init__(self, modules: Iterable[Module], files: Iterable[str] = ()):
        self.modules = {module.name: module for module in modules}
        for name in list(self.modules):
            parts = name.split(".")
            for size in range(1, len(parts)):
                package = ".".join(parts[:size])
                self.modules.setdefault(package, Module(package)).attributes.add(parts[size])
        self.classes: dict[str, list[Class]] = defaultdict(list)
        self.by_last_part: dict[str, list[Module]] = defaultdict(list)
        for name, module in self.modules.items():
            self.by_last_part[name.rpartition(".")[2]].append(module)
            for each, its in module.classes.items():
                self.classes[each].append(its)
                self.classes[each.lower()].append(its)  # an instance, as texts call it
        attributes = {name for each in self.classes.values() for its in each for name in its.attributes}
        self.used = attributes.union(*(module.variables for module in self.modules.values()))
        """What may be an attribute of something."""
        self.imported = {name for module in self.modules.values() for name in module.imports}
        self.defined = set(self.by_last_part).union(*(module.attributes for module in self.modules.values()))
        """What modules define."""
        self.libraries = {
            full.partition(".")[0]
            for module in self.modules.values()
            for full in module.imports.values()
            if not self._is_ours(full)
        } - set(self.modules)
        self.path_ends, self.folders = set(), set()
        for file in files:
            parts = file.split("/")
            self.folders.update(parts[:-1])
            for end in range(1, len(parts) + 1):
                self.path_ends.update("/".join(parts[start:end]).removesuffix(".py") for start in range(end))

    def _is_ours(self, full: str) -> bool:
        """Whether a full name lies in the project, or should."""
        first, _, rest = full.partition(".")
        return first in self.modules and not (first == "megatron" and rest.split(".")[0] in _OTHERS)

    def _class_has(self, its: Class, name: str) -> bool:
        if its.is_open or name in its.attributes or name.startswith("__"):
            return True
        for base in its.bases:
            bases = self.classes.get(base.rpartition(".")[2], [])
            library = _LIBRARY_BASES.get(base, getattr(builtins, base, None))
            if library is None and not bases:
                return True
            if hasattr(library, name) or any(self._class_has(each, name) for each in bases):
                return True
        return False

    def _module_has(self, module: Module, parts: list[str]) -> bool:
        first, *rest = parts
        inner = self.modules.get(f"{module.name}.{first}")
        if module.is_open or (inner is not None and (not rest or self._module_has(inner, rest))):
            return True
        if first not in module.attributes or not rest:
            return first in module.attributes
        if first in module.classes:
            return self._class_has(module.classes[first], rest[0])
        full = module.imports.get(first, "")
        if full in self.modules:
            return self._module_has(self.modules[full], rest)
        home, _, name = full.rpartition(".")
        if home in self.modules and home != module.name:
            return self._module_has(self.modules[home], [name, *rest])
        return inner is None  # a function or a value, whose attributes nobody has written down

    def is_stale(self, name: str, file: Module | None) -> bool:
        """Whether a dotted name in a text, of a source file or of a page, leads nowhere in the project."""
        first, second, *_ = parts = name.split(".")
        full = first if file is None else file.imports.get(first, first)
        if (
            first in ("self", "cls")
            or parts[-1] == "NAME"
            or first in self.libraries
            or not (full == first or self._is_ours(full))
        ):
            return False
        if first == "megatron":
            return self._is_ours(name) and not self._module_has(self.modules[first], parts[1:])
        for part, attribute in pairwise(parts):
            named = self.classes.get(part, []) if part[0].isupper() else []
            if named and not any(self._class_has(its, attribute) for its in named):
                return True
        called_so = [self.modules[full]] if full in self.modules else self.by_last_part.get(first, [])
        if any(self._module_has(module, parts[1:]) for module in called_so):
            return False
        if any(self._class_has(its, second) for its in self.classes.get(first.replace("_", ""), [])):
            return False
        if first not in self.by_last_part:  # no module: stale where the attribute is a module's alone
            return second in self.defined and second not in self.used
        is_variable = first in (file.variables if file is not None else self.used)
        return second not in self.used or (second in self.defined and not is_variable)

    def lacks(self, path: str) -> bool:
        """Whether a path in a text should be one of the project's files or folders, or its end, and is none.

        A folder's name in front makes it one, or that it is Python; not if a part of it stands for any name.
        """
        path = re.sub(r"^(\.\./)+", "", path).rstrip("/")
        first, *rest = path.split("/")
        if _ANY_NAME.search(path) or (rest and first == "megatron" and not self._is_ours(f"{first}.{rest[0]}")):
            return False
        is_written = path.endswith(".jsonl")  # by commands; the repository holds none
        is_judged = path.endswith(".py") or (bool(rest) and first in self.folders and not is_written)
        return is_judged and path.removesuffix(".py") not in self.path_ends

    def is_raised(self, name: str) -> bool:
        """Whether what a text says is raised may be an error, of the project or of others."""
        if name not in self.classes:
            return hasattr(builtins, name) or name in self.used or name in self.imported
        bases = [base.rpartition(".")[2] for its in self.classes[name] for base in its.bases]
        return any(
            base.endswith(("Error", "Exception", "Exit")) or (base in self.classes and self.is_raised(base))
            for base in bases
        )
