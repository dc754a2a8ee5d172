"""Who imports whom, read from the sources: nothing imports in a circle, and what plans imports no torch."""

from pathlib import Path

from benchmarks.house.imports import Modules, circles

ROOT = Path(__file__).resolve().parents[1]
WITHOUT_TORCH = (
    "pipeline.program",
    "pipeline.graph",
    "pipeline.schedules",
    "pipeline.check",
    "pipeline.simulate",
    "pipeline.synthesis",
    "pipeline.survivors",
    "pipeline.draw",
    "pipeline.placement",
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
    "start_up",
    "changes",
    "dry_run",
    "run",
    "programs",
    "profile",
)
"""The rooms of the trainer: each imports of itself and of those before it."""


MODULES = Modules(ROOT)
imports, folder = MODULES.imports, MODULES.folder


def test_circles_are_found():
    """Circles of two and of three are found, and none where many import one; a module that names itself is none."""
    arrows = [("a", "b"), ("b", "a"), ("c", "d"), ("d", "e"), ("e", "c"), ("f", "a"), ("f", "c"), ("g", "g")]
    assert sorted(circles(iter(arrows))) == [["a", "b"], ["c", "d", "e"]]


def test_no_file_imports_in_a_circle():
    """Each file, those of packages included, can run before all that import it; imports for annotations count, too."""
    assert len(MODULES.paths) > 200
    assert not MODULES.circles(types=True)


def test_no_folder_imports_upward():
    """Of neighbouring folders, at any depth, none imports the one that imports it."""
    assert not MODULES.upward()


def test_no_folder_imports_in_a_circle():
    """So can each folder; a folder within one counts by itself."""
    assert not circles(
        (folder(name), folder(each)) for name in MODULES.paths for each in imports(name) if each in MODULES.paths
    )


def test_the_trainers_rooms_have_an_order():
    """As docs/development.md says."""
    upward = []
    for name in MODULES.paths:
        for each in imports(name):
            if name.startswith("megatron.trainer.") and each.startswith("megatron.trainer."):
                room, its = name.split(".")[2], each.split(".")[2]
                if TRAINER.index(its) > TRAINER.index(room):
                    upward.append((name, each))
    assert not upward


def test_what_plans_imports_no_torch():
    """Neither torch nor megatron.core, also not within a function."""
    planning = [name for name in MODULES.paths if name.startswith(tuple(f"megatron.{room}" for room in WITHOUT_TORCH))]
    assert len(planning) > 100
    heavy = {
        (name, each)
        for name in planning
        for each in imports(name)
        if each.split(".")[0] == "torch" or each.startswith("megatron.core")
    }
    assert not heavy
