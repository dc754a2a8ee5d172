"""The sizes of the code, counted by the syntax of its sources, beside the bars that they should reach."""

from __future__ import annotations

import ast
import io
import tokenize
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from benchmarks.house.imports import Modules, parsed

WORDS = Path("megatron/pipeline/program/instruction.py")
POLICIES = Path("megatron/pipeline/program/weight_policies.py")
GENERATED = "docs/flags.md"
SMALL, LONG, TOO_LONG = 80, 400, 500
ROWS_OF_A_TABLE = 3
_LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


@dataclass(frozen=True)
class Count:
    """One figure.

    Attributes:
        name: the name of the figure.
        value: the figure.
        bar: the largest wanted value; None if there is no bar.
        rows: the counted things, if they can be listed.
    """

    name: str
    value: int
    bar: int | None = None
    rows: tuple[str, ...] = field(default=(), repr=False)


def count(root: Path) -> list[Count]:
    """Count all figures of a checkout."""
    modules = Modules(root)
    package, tests = sorted(modules.paths.values()), sorted(root.glob("tests/**/*.py"))
    outside = sorted(path for path in _python(root) if path not in set(tests))
    words = files_of_words(root, package)
    touched = sorted(words.items(), key=lambda item: (-len(item[1]), item[0]))
    asked = places_of_booleans(root, package)
    typed = [path for path in package if ("argparse", "Namespace") in _attributes(path)]
    small = small_with_one_importer(modules)
    circles, upward = modules.circles(types=True), modules.upward()
    pages = sorted(root.glob("docs/*.md"))
    page = max((each for each in pages if str(each.relative_to(root)) != GENERATED), key=_length, default=None)

    def named(paths: list[Path], say: Callable[[Path], object] | None = None) -> tuple[str, ...]:
        return tuple(str(each.relative_to(root)) + (f": {say(each)}" if say else "") for each in paths)

    def longer(most: int) -> tuple[str, ...]:
        return named([each for each in outside if _length(each) > most], _length)

    return [
        Count("lines of code in megatron/", sum(map(lines_of_code, package)), 43_700),
        Count("Python files in megatron/", len(package), 330),
        Count("lines of tests", sum(map(_length, tests)), 50_000),
        Count("lines of code outside tests", sum(map(lines_of_code, outside)), 56_429),
        Count(f"files over {LONG} lines, outside tests", len(longer(LONG)), rows=longer(LONG)),
        Count(f"files over {TOO_LONG} lines, outside tests", len(longer(TOO_LONG)), 0, longer(TOO_LONG)),
        Count("files with one importer", len(_single(modules))),
        Count(f"files under {SMALL} lines with one importer, in their folder", len(small), rows=tuple(small)),
        Count(
            "files that name the word of most", len(touched[0][1]) if touched else 0,
            rows=tuple(f"{word}: {len(paths)}" for word, paths in touched),
        ),
        *(Count(f"files that name {word}", len(words.get(word, ())), 3) for word in ("HOLD", "PREDICT", "EVICT")),
        Count("files that ask a policy's booleans", len(asked), 2, tuple(f"{k}: {v}" for k, v in asked.items())),
        Count("places that ask a policy's booleans", sum(asked.values())),
        Count("files that name argparse.Namespace", len(typed), rows=named(typed)),
        Count("circles of modules, type-only imports too", len(circles), 0, tuple(map(" ".join, circles))),
        Count("arrows upward between folders", len(upward), 0, tuple(f"{a} -> {b}" for a, b in upward)),
        Count("lines of README.md", _length(root / "README.md"), 100),
        Count("lines of the longest docs page, but the generated one", _length(page) if page else 0, 250,
              named(sorted(pages, key=_length, reverse=True)[:5], _length)),
    ]  # fmt: skip


def lines_of_code(path: Path) -> int:
    """The number of lines with code: not blank, not only a comment, and not within a string statement such as a
    docstring."""
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines()
    prose: set[int] = set()
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            prose.update(range(node.lineno, node.end_lineno + 1))
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _LAYOUT:
            code.update(line for line in range(token.start[0], token.end[0] + 1) if lines[line - 1].strip())
    return len(code - prose)


def files_of_words(root: Path, package: list[Path]) -> dict[str, set[Path]]:
    """Kind of instruction -> the files that name it: as Kind.STEP, or by the name or the text of its code."""
    kinds = set()
    for node in ast.walk(parsed(root / WORDS)):
        if isinstance(node, ast.ClassDef) and node.name == "Kind":
            kinds = {target.id for each in node.body if isinstance(each, ast.Assign) for target in each.targets}
    found: dict[str, set[Path]] = {kind: set() for kind in kinds if not kind.startswith("_")}
    for path in package:
        names = _codes_named(path)
        for kind in found:
            if kind in names or ("Kind", kind) in _attributes(path):
                found[kind].add(path)
    return found


def _codes_named(path: Path) -> set[str]:
    """What a file imports, assigns or uses by name, and the words that it gives to `codes_of` as text."""
    names = set()
    for node in ast.walk(parsed(path)):
        match node:
            case ast.Name(id=name) | ast.alias(name=name):
                names.add(name)
            case ast.Call(func=ast.Name(id="codes_of"), args=[ast.Constant(value=str(words))]):
                names.update(words.split())
    return names


def places_of_booleans(root: Path, package: list[Path]) -> dict[str, int]:
    """File -> the number of places that read an attribute, of any object, with the name of a policy's boolean."""
    names: set[str] = set()
    for node in ast.walk(parsed(root / POLICIES)):
        if isinstance(node, ast.ClassDef) and node.name == "WeightPolicy":
            names = set(_booleans(node))
    found = {}
    for path in package:
        if path != root / POLICIES:
            places = sum(number for (_, name), number in _attributes(path).items() if name in names)
            if places:
                found[str(path.relative_to(root))] = places
    return found


def small_with_one_importer(modules: Modules) -> list[str]:
    """The files of fewer than `SMALL` lines that only one module imports, in the same folder, except rows of a table.

    A row of a table is a module that its importer names, beside at least two others, in one list, tuple, set or dict
    that is assigned at module level.
    """
    return [
        f"{name} <- {importer}"
        for name, importer in sorted(_single(modules).items())
        if modules.paths[name].name != "__init__.py"
        and modules.folder(name) == modules.folder(importer)
        and _length(modules.paths[name]) < SMALL
        and name not in _table_of(modules, importer)
    ]


def _single(modules: Modules) -> dict[str, str]:
    """Module with exactly one importer -> its importer. Type-only imports count."""
    importers = defaultdict(set)
    for importer, imported in modules.arrows(types=True):
        importers[imported].add(importer)
    return {name: next(iter(found)) for name, found in importers.items() if len(found) == 1}


def _table_of(modules: Modules, name: str) -> set[str]:
    """The modules that are rows of a table at the module level of `name`."""
    tree, origin = parsed(modules.paths[name]), {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                origin[alias.asname or alias.name] = full if full in modules.paths else node.module
    found: set[str] = set()
    for node in tree.body:
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and isinstance(
            node.value, (ast.List, ast.Tuple, ast.Set, ast.Dict)
        ):
            of = {origin[each.id] for each in ast.walk(node.value) if isinstance(each, ast.Name) and each.id in origin}
            found |= of if len(of) >= ROWS_OF_A_TABLE else set()
    return found


def _booleans(policy: ast.ClassDef) -> Iterator[str]:
    for node in policy.body:
        if isinstance(node, ast.AnnAssign) and _is_bool(node.annotation):
            yield node.target.id
        elif isinstance(node, ast.FunctionDef) and node.returns is not None and _is_bool(node.returns):
            yield node.name


def _is_bool(annotation: ast.expr) -> bool:
    return isinstance(annotation, ast.Name) and annotation.id == "bool"


@cache
def _attributes(path: Path) -> Counter[tuple[str, str]]:
    """The number of places of each (owner, attribute) in a file. The owner is "" unless it is a plain name."""
    return Counter(
        (node.value.id if isinstance(node.value, ast.Name) else "", node.attr)
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Attribute)
    )


def _python(root: Path) -> Iterator[Path]:
    yield from root.glob("*.py")
    for folder in ("benchmarks", "docs", "examples", "megatron", "papers", "tests", "tools"):
        yield from root.glob(f"{folder}/**/*.py")


def _length(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())
