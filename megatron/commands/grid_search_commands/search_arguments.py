"""What a search is told on the command line, and each search of a sweep: model, machines and space."""

import argparse

from megatron.commands.common import command_line
from megatron.commands.grid_search_commands.search_inputs import add_model_arguments, cluster_names
from megatron.planner.search import RANK_MAPPINGS, SCOPES, offered
from megatron.planner.search.outcome import OBJECTIVES
from megatron.planner.search.space import schedules_on_device
from megatron.planner.time.calibration import DEFAULT_NAME, NAMES


def add_search_arguments(parser: argparse.ArgumentParser) -> None:
    """What is searched: of a search, and of a sweep of them."""
    model = parser.add_argument_group("model", "Besides these, every flag of pretrain_gpt.py or pretrain_bert.py.")
    add_model_arguments(model)
    model.add_argument("--precision", choices=("bf16", "fp16", "fp32"),
                       help="default: --bf16 or --fp16 among the flags, or what suits the processor")  # fmt: skip
    cluster = parser.add_argument_group("cluster")
    cluster.add_argument("--cluster", required=True, metavar="NAME|FILE",
                         help=f"{', '.join(cluster_names())}, or a YAML file as docs/grid_search.md shows")  # fmt: skip
    cluster.add_argument("--nodes", type=command_line.count, metavar="N", help="in place of the file's")
    cluster.add_argument("--gpus-per-node", type=command_line.count, metavar="N", help="likewise")
    cluster.add_argument("--price-per-gpu-hour", type=command_line.positive, metavar="PRICE", help="likewise")
    cluster.add_argument("--calibrated-on", default=DEFAULT_NAME, metavar="NAME|FILE",
                         help=f"constants of the time model: {', '.join(NAMES)}, or a file of `calibrate`")  # fmt: skip
    cluster.add_argument("--residuals", metavar="FILE",
                         help="of `validate`, for the intervals of what other constants predict")  # fmt: skip
    cluster.add_argument("--predict-from", metavar="FILE",
                         help="a profile of tools/profile_model.py, in place of the time model")  # fmt: skip
    cluster.add_argument("--network", type=command_line.positive, metavar="GB/s",
                         help="of one node, in one direction; likewise")  # fmt: skip
    space = parser.add_argument_group("space", "What is considered; lists are separated by commas.")
    space.add_argument("--objective", choices=OBJECTIVES, default="time",
                       help="what the best has least of (default: %(default)s)")  # fmt: skip
    space.add_argument("--tokens", type=command_line.tokens, metavar="N",
                       help="of the whole training, as 300B or 300e9: its days, and with a price its cost")  # fmt: skip
    space.add_argument("--simulate", type=command_line.count, metavar="K",
                       help="simulate the programs of the K best (default: 5, fewer of large ones)")  # fmt: skip
    space.add_argument("--max-safe-batch", type=command_line.count, metavar="N",
                       help="sequences: microbatches may be accumulated up to it (PipeDream-2BW, section 4.3); "
                       "--global-batch-size is then the least")  # fmt: skip
    schedules = tuple(offered())
    space.add_argument("--schedules", type=_names(schedules), metavar="LIST",
                       help=f"default: {','.join(schedules_on_device())}, and l2l where the cluster says "
                       "host_memory_gib")  # fmt: skip
    for name, what in (
        ("--tensor", "tensor parallel sizes"), ("--pipeline", "pipeline parallel sizes"),
        ("--virtual", "stages on each rank, for interleaved"), ("--microbatches", "microbatch sizes"),
    ):  # fmt: skip
        space.add_argument(name, type=command_line.counts, metavar="LIST", help=f"{what}; default: all that divide")
    for name, what in (
        ("--context-parallel-sizes", "context parallel sizes"), ("--expert-parallel-sizes", "expert parallel sizes"),
    ):  # fmt: skip
        space.add_argument(name, type=command_line.counts, metavar="LIST", help=f"{what}, which are priced and not "
                           "trained here; default: what the flags of the training say, or 1")  # fmt: skip
    scopes = [scope.value for scope in SCOPES]
    space.add_argument("--recompute", type=_names(scopes), default=tuple(scopes), metavar="LIST",
                       help=f"default: {','.join(scopes)}")  # fmt: skip
    space.add_argument("--distributed-optimizer", choices=("yes", "no", "both"), default="both",
                       help="whether optimizer state is split over replicas (default: %(default)s)")  # fmt: skip
    space.add_argument("--rank-mappings", type=_names(RANK_MAPPINGS), default=RANK_MAPPINGS, metavar="LIST",
                       help=f"default: {','.join(RANK_MAPPINGS)}")  # fmt: skip
    space.add_argument("--no-early-stopping", action="store_true",
                       help="also configurations that recompute or balance more than they need")  # fmt: skip
    space.add_argument("--require-fused-softmax", action="store_true",
                       help="leave out what cannot use Megatron's fused softmax")  # fmt: skip
    space.add_argument("--avoid-pressure", action="store_true",
                       help="leave out what the allocator slows down for want of memory")  # fmt: skip


def _names(known: tuple[str, ...] | list[str]):
    """A type of argument: a list of some of these."""

    def names(text: str) -> tuple[str, ...]:
        chosen = tuple(dict.fromkeys(text.split(",")))
        for name in chosen:
            if name not in known:
                raise argparse.ArgumentTypeError(f"{name!r} is not among {', '.join(known)}")
        return chosen

    return names
