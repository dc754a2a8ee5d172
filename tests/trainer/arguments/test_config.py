"""The configuration of a run: typed, frozen, and the only thing behind the command line that holds flags."""

import ast
import re
from collections.abc import Iterator
from dataclasses import FrozenInstanceError, fields, replace
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

import pytest

from megatron.trainer.arguments.flags.config import Derived, TrainConfig
from megatron.trainer.arguments.flags.parser import FLAGS
from tests.trainer.arguments.bert_command_line import bert_arguments
from tests.trainer.arguments.command_line import GPU, arguments

ROOT = Path(__file__).parents[3] / "megatron"
EDGE = {
    "trainer/checkpoint/arguments.py",  # what a checkpoint holds is a namespace, as Megatron-LM's
    "trainer/checkpoint/checkpoint.py",
    "trainer/dry_run/dry_run.py",
    "trainer/plan/auto_program.py",  # makes arguments of a job, before they are validated
    "trainer/plan/command.py",
    "trainer/plan/from_flags.py",
    "trainer/profile/pool.py",
    "trainer/run/entry.py",
    "trainer/run/pretraining.py",
}
"""The files of the trainer, outside of `arguments`, that know flags as argparse makes them."""
HELD = {"args", "_args", "options", "parsed", "namespace"}


def has_type(value: object, kind: Any) -> bool:
    if kind is Any:
        return True
    if get_origin(kind) in (list, tuple, dict):
        return isinstance(value, get_origin(kind)) and all(has_type(each, get_args(kind)[0]) for each in value)
    if get_origin(kind) is UnionType:
        return any(has_type(value, each) for each in get_args(kind))
    if kind is float:
        return type(value) in (int, float)
    return type(value) is kind if kind in (bool, int, str, NoneType) else isinstance(value, kind)


@pytest.mark.parametrize(
    ("flags", "size"),
    [
        ("", 1),
        ("--bf16 --rampup-batch-size 4 4 80 --profile-ranks 0 1 --swiglu --pipeline-schedule 2bw", 4),
        ("--untie-embeddings-and-output-weights --freeze-training --freeze-interval 2 --elastic-pipeline "
         "--elastic-schedule 2,1 --elastic-micro-batch-size 1,2 --pipeline-model-parallel-size 2", 2),
        ("--recompute-granularity selective --pipeline-schedule l2l", 1),
    ],
)  # fmt: skip
@pytest.mark.parametrize("make", [arguments, bert_arguments])
def test_values_have_the_types_of_their_fields(flags, size, make):
    config, types = make(flags, world_size=size), get_type_hints(TrainConfig)
    for each in fields(config):
        value = getattr(config, each.name)
        unset = value is None and (each.name in ("distributed_backend", "local_rank"))  # the process says them
        assert unset or has_type(value, types[each.name]), (each.name, value, types[each.name])


def test_every_flag_that_is_read_is_a_field_with_its_default():
    config = {each.name: each for each in fields(TrainConfig)}
    names = {flag.dest for flag in FLAGS if not flag.refused or flag.neutral}
    assert config.keys() == names | {each.name for each in fields(Derived)}
    assert all(config[flag.dest].default == flag.default for flag in FLAGS
               if flag.dest in names and not isinstance(flag.default, list))  # fmt: skip


def test_nothing_changes_behind_the_command_line():
    config = arguments(platform=GPU)
    with pytest.raises(FrozenInstanceError):
        config.num_layers = 8
    assert replace(config, num_layers=8).num_layers == 8 and config.num_layers == 4


def assigned(tree: ast.Module) -> Iterator[int]:
    """The lines that assign an attribute of arguments."""

    def is_held(node: ast.expr) -> bool:
        return getattr(node, "id", getattr(node, "attr", None)) in HELD

    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load) and is_held(node.value):
            yield node.lineno
        called = getattr(node.func, "id", None) if isinstance(node, ast.Call) else None
        if called in ("setattr", "delattr") and is_held(node.args[0]):
            yield node.lineno
        if isinstance(node, ast.Call) and getattr(node.func, "attr", None) == "update":
            inner = node.func.value
            if isinstance(inner, ast.Call) and getattr(inner.func, "id", None) == "vars" and is_held(inner.args[0]):
                yield node.lineno


COMPLETED_IN = (
    "finetuning/arguments.py", "finetuning/best.py", "finetuning/freezing_arguments.py", "finetuning/trackers.py",
)  # fmt: skip
"""Where the command line of fine-tuning is parsed and completed."""


def test_no_argument_is_assigned_after_parsing():
    """In the trainer and in fine-tuning, outside of the rooms that parse and complete a command line."""
    found = []
    for path in (*ROOT.glob("trainer/**/*.py"), *ROOT.glob("finetuning/**/*.py")):
        name = path.relative_to(ROOT).as_posix()
        if not name.startswith("trainer/arguments/") and name not in COMPLETED_IN:
            found += [f"{name}:{line}" for line in assigned(ast.parse(path.read_text()))]
    assert not found


def test_only_the_edge_knows_arguments_that_are_not_checked():
    """Neither argparse nor `Arguments` is named anywhere else."""
    knows = re.compile(r"argparse|\bArguments\b")
    found = {
        path.relative_to(ROOT).as_posix() for path in ROOT.glob("trainer/**/*.py") if knows.search(path.read_text())
    }
    assert {name for name in found if not name.startswith("trainer/arguments/")} == EDGE
