"""The stages of a study of `finetune.py`, and the simulated time of a batch with each number of frozen layers."""

import json
from dataclasses import replace
from pathlib import Path

from megatron.capture.profile import profile
from megatron.finetuning.arguments import parse_args
from megatron.finetuning.freezing import layers_of_parameters
from megatron.finetuning.partitioning import simulated_seconds, stage_costs
from megatron.finetuning.plan import make_plan, with_frozen
from megatron.finetuning.samples import read_data
from megatron.partition import Partition
from papers.ftpipe.finetune_runs import in_turn


def plan(listed: str) -> None:
    """Write `partition.json`, a stage for each rank, and `simulated.json`, number of frozen layers -> seconds."""
    path = Path(listed).with_name("partition.json")
    [command] = json.loads(Path(listed).read_text())["commands"]
    args = parse_args([*command, "--partition", str(path)])
    if args.rank:
        return
    in_turn(command, args.world_size, path)
    made = make_plan(args, read_data(args))
    layer_of, num_layers = layers_of_parameters(made.captured)
    partition = Partition(made.partition.stage_of_node, made.partition.rank_of_stage)
    seconds = []
    for count in range(num_layers):
        frozen = with_frozen(made, args, {name for name, layer in layer_of.items() if layer < count})
        stages = stage_costs(frozen.captured, profile(frozen.captured, frozen.batch), partition)
        file, size = replace(made.partition, stages=stages), args.gradient_accumulation_steps
        seconds.append(size * simulated_seconds(frozen.schedule, file, frozen.edge_bytes, size))
    path.with_name("simulated.json").write_text(json.dumps(seconds))
