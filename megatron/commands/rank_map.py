"""Print and draw the mapping of ranks to the GPUs of a cluster, and its cost.

    python tools/rank_map.py --rank-topology examples/topology.yaml --pipeline-model-parallel-size 16
    python tools/rank_map.py --rank-topology examples/topology.yaml --pipeline-model-parallel-size 16 \\
        --rank-mapping pair-adjacent --output map.png
    python tools/rank_map.py --rank-topology examples/topology.yaml --tensor-model-parallel-size 2 \\
        --pipeline-model-parallel-size 4 --rank-mapping optimized --num-layers 40 --hidden-size 5120 \\
        --num-attention-heads 40 --seq-length 2048 --micro-batch-size 1 --global-batch-size 64 --write-mapping map.json

Flags that pretrain_gpt.py has, too, have the same names and meanings. If the model's shape is given, the bytes and the
times of an iteration are shown as well. Nothing is executed; neither torch nor a GPU is needed.

Exit status: 0; 1 if a file or a combination of options is wrong; 2 if the command line is wrong.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from megatron.documents import command_line
from megatron.documents.files import write_whole
from megatron.documents.flag_types import count, positive
from megatron.documents.tables import console
from megatron.pipeline.placement.cost import describe_crossing, describe_need, pair_transfers
from megatron.pipeline.placement.mapping import NAMED, NAMES, Degrees, Mapping, load_mapping
from megatron.pipeline.placement.optimize import optimized
from megatron.pipeline.placement.placement_report import PlacementReport, make_report
from megatron.pipeline.placement.topology import Topology, load_topology
from megatron.pipeline.placement.traffic import Traffic, count_transfers
from megatron.pipeline.schedules import PRESETS, Schedule
from megatron.planner.memory.activations import ActivationSetting
from megatron.planner.memory.architecture import Architecture
from megatron.planner.memory.recompute import Recompute, RecomputeScope
from megatron.planner.time.traffic import CutModel

_SHAPE = ("num_layers", "hidden_size", "num_attention_heads", "seq_length", "micro_batch_size", "global_batch_size")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_args(arguments)
    given = [name for name in _SHAPE if getattr(options, name) is not None]
    missing = [_flag(name) for name in _SHAPE if name not in given]
    if given and missing:
        parser.error(f"{', '.join(missing)}: needed too, to know the model's traffic")
    if not given and options.rank_mapping == "optimized":
        parser.error(f"--rank-mapping optimized needs the model's traffic; give {', '.join(missing)}")
    if not given and options.forward_ms is not None:
        parser.error(f"--forward-ms says nothing without the model; give {', '.join(missing)}")
    return command_line.run(_run, options)


def _run(options: argparse.Namespace) -> int:
    topology = load_topology(options.rank_topology)
    degrees = _degrees(options, topology)
    schedule = _schedule(options)
    num_microbatches = _num_microbatches(options, degrees, schedule)
    schedule.validate(num_microbatches)
    cut = _cut_model(options, schedule)
    traffic = None if cut is None else cut.traffic(count_transfers(schedule, num_microbatches))
    for flag, path in (("--output", options.output), ("--write-mapping", options.write_mapping)):
        if path:
            command_line.require_file(Path(path), flag)
    mapping = _mapping(options, degrees, topology, traffic)
    report = make_report(
        options.rank_mapping, mapping, degrees, topology, traffic=traffic,
        evictors=schedule.evicting_ranks((num_microbatches,)),
        others={name: mapping(degrees) for name, mapping in NAMED.items()},
    )  # fmt: skip
    lines = _lines(options, report, cut) if schedule.balance and degrees.pipeline > 1 else []
    if options.json:
        print(json.dumps({**report.to_dict(), "pair_transfers": lines}, indent=1))
    else:
        _print(report, lines)
    if options.write_mapping:
        write_whole(Path(options.write_mapping), json.dumps(list(mapping)) + "\n")
    if options.output:
        from megatron.pipeline.placement.placement_report import draw_placement

        draw_placement(report, options.output)
        print(f"wrote {options.output}", file=sys.stderr)
    return 0


# --- meaning of the options


def _degrees(options: argparse.Namespace, topology: Topology) -> Degrees:
    t, p, slots = options.tensor_model_parallel_size, options.pipeline_model_parallel_size, topology.num_slots
    if slots % (t * p):
        raise ValueError(
            f"{slots} GPUs cannot be divided into tensor parallel size {t} x pipeline parallel size {p}; change one of "
            "these, or the topology"
        )
    return Degrees(tensor=t, pipeline=p, data=slots // (t * p))


def _schedule(options: argparse.Namespace) -> Schedule:
    v = options.num_virtual_stages_per_pipeline_rank
    return Schedule.preset(
        options.pipeline_schedule, num_stages=options.pipeline_model_parallel_size * v, num_virtual_stages=v,
        balance=options.balance_activations,
    )  # fmt: skip


def _num_microbatches(options: argparse.Namespace, degrees: Degrees, schedule: Schedule) -> int:
    """The number of microbatches of one replica in a batch; without a model, enough to fill the pipeline."""
    if options.global_batch_size is None:
        return schedule.weights.batch_size or 2 * degrees.pipeline
    per_microbatch = options.micro_batch_size * degrees.data
    if options.global_batch_size % per_microbatch:
        raise ValueError(
            f"--global-batch-size {options.global_batch_size} is not divisible by {degrees.data} replicas x "
            f"--micro-batch-size {options.micro_batch_size}; change one"
        )
    return options.global_batch_size // per_microbatch


def _cut_model(options: argparse.Namespace, schedule: Schedule) -> CutModel | None:
    """The model cut into stages, or None if the options do not describe a model."""
    if options.num_layers is None:
        return None
    model = Architecture.gpt3(
        num_layers=options.num_layers, hidden_size=options.hidden_size,
        num_attention_heads=options.num_attention_heads, sequence_length=options.seq_length,
        vocabulary_size=options.vocab_size,
    )  # fmt: skip
    setting = ActivationSetting(
        tensor=options.tensor_model_parallel_size, micro_batch_size=options.micro_batch_size,
        sequence_parallel=options.sequence_parallel, recompute=Recompute.of(RecomputeScope(options.recompute)),
    )  # fmt: skip
    return CutModel(
        model=replace(model, tied_embeddings=not options.untie_embeddings_and_output_weights),
        setting=setting,
        schedule=schedule,
        layers=(options.num_layers / schedule.num_stages,) * schedule.num_stages,
    )


def _mapping(options: argparse.Namespace, degrees: Degrees, topology: Topology, traffic: Traffic | None) -> Mapping:
    if options.rank_mapping in NAMED:
        return NAMED[options.rank_mapping](degrees)
    if options.rank_mapping == "optimized":
        assert traffic is not None
        return optimized(degrees, traffic, topology)
    return load_mapping(options.rank_mapping, degrees.world_size)


# --- output


def _lines(options: argparse.Namespace, report: PlacementReport, cut: CutModel | None) -> list[str]:
    """Sentences about the transfers between the stages of a pair."""
    topology = report.topology
    nodes = [node.gpus for node in topology.nodes]
    lines = [describe_crossing(report.mapping, report.degrees, nodes, report.evictors)]
    if cut is None:
        return lines
    transfers = pair_transfers(report.mapping, report.degrees, topology, cut.moved_bytes, report.evictors)
    if transfers:
        forward = options.forward_ms / 1e3 if options.forward_ms else None
        if forward is None and topology.teraflops_per_gpu is not None:
            forward = cut.forward_seconds(teraflops=topology.teraflops_per_gpu)
        lines.append(describe_need(transfers, forward_seconds=forward))
    return lines


def _print(report: PlacementReport, lines: list[str]) -> None:
    from megatron.pipeline.placement.placement_report import tables

    plain, out = not sys.stdout.isatty(), console()
    for title, table in tables(report, plain=plain):
        out.print(title, style="" if plain else "bold")
        out.print(table)
        out.print()
    for line in lines:
        print(line)


# --- the command line


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _parser() -> argparse.ArgumentParser:
    parser = command_line.parser_of(__doc__)
    parser.add_argument(
        "--rank-topology", required=True, metavar="FILE", help="nodes, GPUs and bandwidths: YAML or JSON"
    )
    parser.add_argument("--rank-mapping", default="standard", metavar="|".join((*NAMES, "FILE")),
                        help="a name, or a file with the rank of each slot (default: %(default)s)")  # fmt: skip
    parser.add_argument("--tensor-model-parallel-size", type=count, default=1, metavar="T")
    parser.add_argument("--pipeline-model-parallel-size", type=count, default=1, metavar="P")
    parser.add_argument("--pipeline-schedule", choices=tuple(PRESETS), default="bpipe",
                        help="decides what stages and pairs send (default: %(default)s)")  # fmt: skip
    parser.add_argument("--balance-activations", action="store_true", help="pairs move activations, as under bpipe")
    parser.add_argument("--num-virtual-stages-per-pipeline-rank", type=count, default=1, metavar="V")
    model = parser.add_argument_group("model", "All or none of the first six; with them, traffic is estimated.")
    for name in _SHAPE:
        model.add_argument(_flag(name), type=count, metavar="N")
    model.add_argument("--vocab-size", type=count, default=51200, metavar="N", help="default: %(default)s")
    scopes = [scope.value for scope in RecomputeScope]
    model.add_argument("--recompute", choices=scopes, default="none", help="what is recomputed (default: %(default)s)")
    model.add_argument("--sequence-parallel", action="store_true", help="activations are split over tensor ranks")
    model.add_argument("--untie-embeddings-and-output-weights", action="store_true")
    model.add_argument("--forward-ms", type=positive, metavar="MS",
                       help="measured forward of a microbatch; default: estimated where the topology gives "
                       "teraflops_per_gpu")  # fmt: skip
    output = parser.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="print everything as JSON")
    output.add_argument("--write-mapping", metavar="FILE", help="write the mapping, for --rank-mapping FILE")
    output.add_argument("--output", "-o", metavar="FILE", help="picture to write: .png, .svg or .pdf")
    return parser
