"""Layers of a run whose process groups were formed anew."""

import gc
import types
from collections.abc import Iterable
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from tests import workers
from tests.trainer.run.lost_rank_jobs import MODEL
from tests.trainer.run.run_case import data_flags, training_program

TENSOR = "--tensor-model-parallel-size 2"


def reachable(roots: Iterable[object]) -> Iterable[object]:
    """What the roots refer to, in any number of steps, but for what is the same for all of the process."""
    seen, waiting = set(), list(roots)
    while waiting:
        value = waiting.pop()
        if id(value) in seen or isinstance(value, (type, types.ModuleType, types.FrameType)):
            continue
        seen.add(id(value))
        yield value
        if isinstance(value, types.FunctionType):
            waiting += [value.__closure__, value.__defaults__, value.__kwdefaults__]
        else:
            waiting += gc.get_referents(value)


def case(flags: str) -> tuple[int, int, list[int]]:
    """The numbers of references to groups of several ranks before, and to the old and the new ones behind."""
    from megatron.pipeline.runtime.stages.megatron.groups import forget_groups, groups_of_layers, rebind
    from megatron.trainer.arguments import parse_args
    from megatron.trainer.run.pretraining import complete
    from megatron.trainer.start_up import initialize
    from megatron.trainer.start_up.run import setup_model_and_optimizer

    defaults, program = training_program("pretrain_gpt")
    args, _ = complete(parse_args(f"{MODEL} {data_flags()} {flags}".split(), defaults=defaults))
    args = replace(initialize.set_up(args), padded_vocab_size=256)
    built = setup_model_and_optimizer(args, program)
    roots, before = [built.chunks, built.optimizer], groups_of_layers()
    used = {id(group) for group in before.values() if group.size() > 1}
    found = sum(id(value) in used for value in reachable(roots))
    forget_groups()
    initialize.make_groups(args)
    now = groups_of_layers()
    rebind(built.chunks, built.optimizer, before)
    behind = [value for value in reachable(roots) if isinstance(value, dist.ProcessGroup)]
    new = [name for name, group in now.items() if group.size() > 1 and any(group is each for each in behind)]
    kept = {id(before[name]) for name in new}
    torch.distributed.barrier()
    built.update.close()
    return found, sum(id(each) in kept for each in behind), len(new)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("flags", "num_groups"),
    [
        (f"{TENSOR} --context-parallel-size 2 --cp-comm-type a2a --position-embedding-type rope", 7),
        (f"{TENSOR} --sequence-parallel", 6),
        ("--context-parallel-size 2", 4),
        (f"{TENSOR} --sequence-parallel --disable-bias-linear --num-experts 4", 6),
        ("--context-parallel-size 2 --num-experts 4 --optimizer muon", 4),
    ],
)
def test_layers_keep_no_group_of_before(flags, num_groups):
    """Layers, attention, experts and what they share refer to the new groups, and to none of the old ones."""
    for found, old, new in workers.run(
        4, "tests.trainer.run.test_rebound_groups:case", flags=f"{flags} --pipeline-model-parallel-size 1"
    ):
        assert found and new and (found, old, new) == (num_groups, 0, num_groups)
