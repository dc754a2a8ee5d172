"""Several runs of `finetune.py` in one job, so that its processes start only once."""

import gc
import json
from itertools import accumulate
from pathlib import Path

import torch

from megatron.capture.profile import profile
from megatron.finetuning import job
from megatron.finetuning.arguments import parse_args
from megatron.finetuning.partitioning import PlannedMachine, candidate_of, graph_of
from megatron.finetuning.plan import captured_model
from megatron.finetuning.samples import read_data
from megatron.partition import CompeteResult, Partition, evaluate
from megatron.pipeline.runtime.failure import failure_guard
from megatron.trainer.ranks import StopSignal
from megatron.trainer.start_up import initialize


def in_turn(command: list[str], num_stages: int, path: Path) -> None:
    """Write a partition of `num_stages` contiguous stages with about equal work, dealt out in turn to the ranks."""
    args = parse_args(command)
    captured, batch, _ = captured_model(args, read_data(args))
    machine = PlannedMachine(args.world_size, 2.0**40, 10.0)
    costs = profile(captured, batch)
    work = list(accumulate(each.forward_ms + each.recorded_forward_ms + each.backward_ms for each in costs))
    first = len(captured.inputs)
    stage_of_node = dict.fromkeys(range(first), 0)
    stage = 0
    for place, done in enumerate(work):
        blocks_left, stages_left = len(work) - place, num_stages - 1 - stage
        middle = done - (done - (work[place - 1] if place else 0.0)) / 2
        is_full = middle > work[-1] * (stage + 1) / num_stages
        if place and stages_left and (is_full or blocks_left <= stages_left):
            stage += 1
        stage_of_node[first + place] = stage
    partition = Partition(stage_of_node, tuple(stage % args.world_size for stage in range(num_stages)))
    value = evaluate(graph_of(captured, costs, machine, args), partition)
    candidate = candidate_of(captured, costs, batch, CompeteResult("in turn", partition, value, 0.0), machine, args)
    candidate.file.write(path)
    print(f"{num_stages} stages, depth {candidate.depth}, {candidate.simulated_ms:.1f} ms a microbatch simulated")


def run_all(listed: str) -> None:
    """Do the runs of the file `listed`: `commands`, each a list of words, and either `stages`, the number of stages of
    all runs, or `partition`, their file."""
    content = json.loads(Path(listed).read_text())
    partition = Path(content.get("partition", Path(listed).with_name("partition.json")))
    stop = StopSignal().install()
    first = parse_args(content["commands"][0])
    job.join_job(first)
    with initialize.left_in_order(), failure_guard.guard():
        if first.rank == 0 and "stages" in content:
            in_turn(content["commands"][0], content["stages"], partition)
        torch.distributed.barrier()
        for command in content["commands"]:
            job.run(job.on_this_device(parse_args([*command, "--partition", str(partition)])), stop)
            gc.collect()
