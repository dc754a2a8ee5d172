"""Who imports whom, read from the sources: nothing imports in a circle, and what plans imports no torch."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import networkx

ROOT = Path(__file__).resolve().parents[1]
WITHOUT_TORCH = (
    "pipeline/program",
    "pipeline/schedules",
    "pipeline/check",
    "pipeline/simulate",
    "pipeline/draw",
    "placement",
    "planner",
    "partition",
    "documents",
    "processes",
)

TRAINER = (
    "files",
    "arguments",
    "ranks",
    "report",
    "models",
    "plan",
    "checkpoint",
    "data",
    "optimizer",
    "start_up",
    "changes",
    "dry_run",
    "run",
    "programs",
    "profile",
)
"""The rooms of the trainer: each imports of itself and of those before it."""


@cache
def modules() -> dict[str, Path]:
    """Name of each module of the project -> its file."""
    found = {}
    for path in ROOT.glob("megatron/**/*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(name: str) -> Iterator[str]:
    """The modules that a module imports when it runs, at its top or later; not what only annotations need."""
    for_annotations: set[ast.AST] = set()
    for node in ast.walk(ast.parse(modules()[name].read_text())):
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            for_annotations.update(node.body)
        if node in for_annotations:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"{name} imports from where it lies; name the module in full"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield full if full in modules() else node.module


def runs(name: str) -> Iterator[str]:
    """The modules of the project that run when a module does: what it imports, and the packages in which that lies."""
    for each in imports(name):
        parts = each.split(".")
        for size in range(2, len(parts) + 1):
            package = ".".join(parts[:size])
            if package in modules() and not name.startswith(f"{package}."):
                yield package


def folder(name: str) -> str:
    return str(modules()[name].parent.relative_to(ROOT))


def circles(arrows: Iterator[tuple[str, str]]) -> list[list[str]]:
    graph = networkx.DiGraph((source, target) for source, target in arrows if source != target)
    return [sorted(circle) for circle in networkx.strongly_connected_components(graph) if len(circle) > 1]


def test_circles_are_found():
    """Circles of two and of three are found, and none where many import one; a module that names itself is none."""
    arrows = [("a", "b"), ("b", "a"), ("c", "d"), ("d", "e"), ("e", "c"), ("f", "a"), ("f", "c"), ("g", "g")]
    assert sorted(circles(iter(arrows))) == [["a", "b"], ["c", "d", "e"]]


def test_no_file_imports_in_a_circle():
    """Each file, those of packages included, can run before all that import it."""
    assert len(modules()) > 400
    assert not circles((name, each) for name in modules() for each in runs(name))


def test_no_folder_imports_in_a_circle():
    """So can each folder; a folder within one counts by itself."""
    assert not circles(
        (folder(name), folder(each)) for name in modules() for each in imports(name) if each in modules()
    )


def test_the_trainers_rooms_have_an_order():
    """As docs/development.md says."""
    upward = []
    for name in modules():
        for each in imports(name):
            if name.startswith("megatron.trainer.") and each.startswith("megatron.trainer."):
                room, its = name.split(".")[2], each.split(".")[2]
                if TRAINER.index(its) > TRAINER.index(room):
                    upward.append((name, each))
    assert not upward


def test_what_plans_imports_no_torch():
    """Neither torch nor megatron.core, also not within a function."""
    planning = [
        name for name in modules() if folder(name).startswith(tuple(f"megatron/{room}" for room in WITHOUT_TORCH))
    ]
    assert len(planning) > 100
    heavy = {
        (name, each)
        for name in planning
        for each in imports(name)
        if each.split(".")[0] == "torch" or each.startswith("megatron.core")
    }
    assert not heavy
