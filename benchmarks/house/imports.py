"""The imports between the modules of a source tree, read from the sources without running them.

`runs` and `imports` give the modules that are imported when a module runs; with `types` also those that only
annotations need. Circles are strongly connected components. An arrow leads from importer to imported. If sibling
folders, each with all its subfolders, import in a circle, the arrows with the fewest imports count as upward.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cache, cached_property
from pathlib import Path

import networkx


@cache
def parsed(path: Path) -> ast.Module:
    """The syntax tree of a file."""
    return ast.parse(path.read_text(encoding="utf-8"))


class Modules:
    """The modules of one package in a source tree, and the imports between them."""

    def __init__(self, root: Path, package: str = "megatron") -> None:
        self.root, self.package = root, package

    @cached_property
    def paths(self) -> dict[str, Path]:
        """Name of a module -> its file."""
        found = {}
        for path in sorted(self.root.glob(f"{self.package}/**/*.py")):
            parts = path.relative_to(self.root).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
        return found

    def imports(self, name: str, *, types: bool = False) -> Iterator[str]:
        """Yield the modules that a module imports when it runs, at its top or in functions.

        With `types` also the modules that only annotations need.
        """
        for_annotations: set[ast.AST] = set()
        for node in ast.walk(parsed(self.paths[name])):
            is_guard = isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
            if is_guard and not types:
                for_annotations.update(node.body)
            if node in for_annotations:
                continue
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0 and node.module, f"{name} imports from where it lies; name the module in full"
                for alias in node.names:
                    full = f"{node.module}.{alias.name}"
                    yield full if full in self.paths else node.module

    def runs(self, name: str, *, types: bool = False) -> Iterator[str]:
        """Yield the modules that run when a module is imported: its imports, and the packages that contain them."""
        for each in self.imports(name, types=types):
            parts = each.split(".")
            for size in range(2, len(parts) + 1):
                package = ".".join(parts[:size])
                if package in self.paths and not name.startswith(f"{package}."):
                    yield package

    def arrows(self, *, types: bool = False) -> set[tuple[str, str]]:
        """The pairs (importer, imported) of all modules, without the packages that contain the imported modules."""
        return {
            (name, each) for name in self.paths for each in self.imports(name, types=types) if each in self.paths
        } - {(name, name) for name in self.paths}

    def folder(self, name: str) -> str:
        return str(self.paths[name].parent.relative_to(self.root))

    def circles(self, *, types: bool = False) -> list[list[str]]:
        """The groups of modules that import in a circle."""
        return circles((name, each) for name in self.paths for each in self.runs(name, types=types))

    def upward(self) -> list[tuple[str, str]]:
        """The upward arrows between sibling folders at any depth, without type-only imports."""
        beside: dict[str, Counter[tuple[str, str]]] = {}
        for source, target in self.arrows():
            one, other = (self.paths[each].relative_to(self.root).parts for each in (source, target))
            depth = next(index for index, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
            if depth < min(len(one), len(other)) - 1:
                beside.setdefault("/".join(one[:depth]), Counter())[one[depth], other[depth]] += 1
        return [
            (f"{folder}/{a}", f"{folder}/{b}")
            for folder, counts in beside.items()
            for a, b in _thinnest_against(counts)
        ]


def circles(arrows: Iterable[tuple[str, str]]) -> list[list[str]]:
    graph = networkx.DiGraph((source, target) for source, target in arrows if source != target)
    return sorted(sorted(circle) for circle in networkx.strongly_connected_components(graph) if len(circle) > 1)


def _thinnest_against(counts: Counter[tuple[str, str]]) -> list[tuple[str, str]]:
    """The arrows to remove until no circle is left: repeatedly the arrow of a circle with the fewest imports."""
    left, taken = dict(counts), []
    while inner := circles(left):
        taken.append(min((number, pair) for pair, number in left.items() if set(pair) <= set(inner[0]))[1])
        del left[taken[-1]]
    return taken
