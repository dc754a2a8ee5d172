"""PipeTransformer's speed-ups (its Figures 9 to 12) on stages that sleep: predicted by the simulator, then measured.

    python -m papers.pipetransformer.elastic                            # about 20 minutes, 8 processes; tables
    python -m papers.pipetransformer.elastic --simulate                 # a few seconds; only the predictions
    python -m papers.pipetransformer.elastic --alpha 0.5 --layer-times 0.004,0.012,0.008,0.008 --stages 4 --link 4ms
    python -m papers.pipetransformer.elastic --picture elastic.png --json result.json

Problem: in the paper layers freeze over hours on eight accelerators; a test computer has two cores and little time.
Solution: stages sleep instead of computing, while engines, programs with frozen stages, transfers, reductions and
groups are real, between real processes. Each pipeline of an arm runs a few batches, from drained to drained. The median
of these batches, and then over the repeats, stands for all batches of the pipeline's intervals. Every transition is
run.

Layers freeze by the bound of the paper's rule, L (1 - (1 - alpha)^T) after interval T. The arms:

static         the pipeline with which the run begins, cut exactly, without frozen layers
freeze only    layers freeze, and the cut stays
AutoPipe       layers may be cut anew after each freeze, on any number of ranks; ranks that are set free are idle,
AutoDP         or become replicas; the batch stays the same, so each replica takes fewer microbatches
AutoCache      with `--cache-from` and more frozen layers the first rank may read the prefix's output from a cache; in
               the first epoch at a depth it reads at the depth before, computes the newly frozen layers, and writes

Each of these is used only where it saves time over the whole run; in Figure 12 alone the cache is on wherever possible.
A pipeline must fit into the memory of the static pipeline's fullest rank: a trained layer counts with weights,
gradients, optimizer state and the activations of all microbatches in flight, a frozen layer with its weights.

The given values (`--help` has the defaults) are printed above the tables: seconds of layers, reads, writes, reductions
and moved state. Measured before the predictions are: the latency of a transfer, an all-reduce of the norm over all
ranks and one of few bytes over replicas, the engine's time around a computation, and a transition in which nothing
moves.
"""

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.common.emulated import run_job
from benchmarks.common.results import parser_of, set_environment
from megatron.elastic.pipelines import Layers
from papers.pipetransformer import elastic_figures, elastic_tables
from papers.pipetransformer.elastic_plan import ARMS, Setting, depths, plan
from papers.pipetransformer.elastic_ranks import ElasticJob, ElasticRank

# ViT-B/16 as the paper trains it: 12 layers of width 768, images of 197 tokens, 400 of them in a batch of 32
# microbatches. BF16 with FP32 masters and Adam: 18 bytes a parameter.
OUTPUT_BYTES = 197 * 12.5 * 768 * 2
READ, WRITE = OUTPUT_BYTES / 6.4e9, OUTPUT_BYTES / 0.48e9
"""Seconds to read and to write a microbatch's output, at 6.4 and 0.48 GB/s, the measured rates of a bare copy from and
to a mapped file on one core."""
PARAMETERS = 7.09e6
"""The number of a layer's parameters."""
GRADIENT_BYTES, STATE_BYTES = 4 * PARAMETERS, 18 * PARAMETERS
RATE = 10e9
"""Bytes per second of a link if --link is not given."""
SAVED = 0.73
"""A layer's activations of a microbatch relative to its state: (34 + 5 * 12 * 197 / 768) bytes for each of a token's
768 numbers, over 18 bytes for each of 7.09 million parameters."""
MOVE = 3.7
"""Seconds to move a transition's state, measured for 25 million parameters between four processes, through memory."""
TIMES = {"ms": 1e-3, "s": 1.0, "": 1.0}
RATES = {"GB/s": 1e9, "MB/s": 1e6, "kB/s": 1e3, "B/s": 1.0}
"""Unit -> factor, longer units first."""


def number(text: str) -> float:
    """Parse a number such as `0.5` or `1/3`."""
    try:
        numerator, *denominators = map(float, text.split("/"))
        value = numerator / math.prod(denominators)
    except (ValueError, ZeroDivisionError):
        value = math.nan
    if not 0.0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is no number of 0 and more; give such as 0.5 or 1/3")
    return value


def seconds(text: str) -> float:
    """Parse seconds such as `0.004`, `0.004s` or `4ms`."""
    found = _measure(text, TIMES)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text} is no time; give seconds, 0 and more, such as 0.004 or 4ms")
    return found


def times(text: str) -> list[float]:
    """Parse the times of layers: one number, or several such as `0.004,0.008`."""
    found = [seconds(each) for each in text.split(",")]
    if not any(found):
        raise argparse.ArgumentTypeError("layers that take no time cannot be sped up; give times above 0")
    return found


def link(text: str) -> float:
    """Parse a link, given as seconds of a transfer or as bytes per second, to seconds of a transfer.

    A number without a unit is seconds if it is at most 1, otherwise bytes per second.
    """
    rate, found = _measure(text, RATES), _measure(text, TIMES)
    if found is not None and found > 1.0 and not text.endswith("s"):
        rate = found
    if not (rate or found):
        raise argparse.ArgumentTypeError(
            f"a link of {text} carries nothing; give seconds of a transfer, such as 4ms, or bytes per second, such as "
            "1e9 or 1GB/s"
        )
    return OUTPUT_BYTES / rate if rate else found


def _measure(text: str, units: dict[str, float]) -> float | None:
    """Parse a number of 0 or more with a unit; None for any other text."""
    unit = next((each for each in units if text.endswith(each)), None)
    try:
        value = math.nan if unit is None else float(text.removesuffix(unit)) * units[unit]
    except ValueError:
        return None
    return value if 0.0 <= value < math.inf else None


def cache_from(text: str) -> int | None:
    """Parse a number of frozen layers; None for `none` and `never`."""
    if text in ("none", "never"):
        return None
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text} is no number of layers; give 0 and more, or never")
    return int(text)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = parser_of(__doc__, json="every figure")
    parser.add_argument("--alpha", type=number, default=1 / 3, help="of what is left, frozen in an interval at most")
    parser.add_argument("--layers", type=int, help="default: 12, or as many as --layer-times")
    parser.add_argument("--stages", type=int, default=8, help="ranks, and stages of the static pipeline")
    parser.add_argument("--microbatches", type=int, default=32, help="of a batch, over all replicas")
    parser.add_argument("--intervals", type=int, default=10)
    parser.add_argument("--cache-from", type=cache_from, default=3, metavar="LAYERS",
                        help="frozen, with which a cache may begin; or never (default: 3, the paper's)")  # fmt: skip
    parser.add_argument("--layer-times", type=times, default=[0.008], metavar="SECONDS",
                        help="of a forward: one for all, or one for each, with commas (default: 8ms)")  # fmt: skip
    parser.add_argument("--backward", type=number, default=2.0, help="over a forward")
    parser.add_argument("--link", type=link, default=0.0, metavar="TIME|RATE",
                        help="between ranks: of a transfer, such as 4ms, or bytes per second, such as 1GB/s; a number "
                             "without a unit is seconds up to 1, and above bytes per second (default: the loopback "
                             "device)")  # fmt: skip
    parser.add_argument("--read", type=seconds, default=READ, help=f"of a microbatch's output (default: {READ:.4f})")
    parser.add_argument("--write", type=seconds, default=WRITE, help=f"the same (default: {WRITE:.4f})")
    parser.add_argument("--reduce", type=seconds,
                        help="of a layer's gradients over replicas (default: as --link, else at 10 GB/s)")  # fmt: skip
    parser.add_argument("--move", type=seconds,
                        help="of a transition's state (default: 3.7, and no less than what --link takes)")  # fmt: skip
    parser.add_argument("--saved", type=number, default=SAVED,
                        help="a layer's activations of a microbatch over what it holds in training; 0: the paper's "
                             "criterion, which counts parameters (default: 0.73)")  # fmt: skip
    parser.add_argument(
        "--frozen", type=number, default=1 / 6, help="what a frozen layer holds, the same (default: 1/6)"
    )
    parser.add_argument("--limit", type=number, help="of a rank, in trained layers; default: what the static one takes")
    parser.add_argument("--prefix", choices=("host", "device"), default="host",
                        help="where the weights of layers are of which the output is cached")  # fmt: skip
    parser.add_argument("--epochs", type=int, default=1, help="of an interval; the first at a depth fills the cache")
    parser.add_argument("--interval-batches", type=int, default=125,
                        help="that an interval stands for (default: 125, CIFAR-100 in batches of 400)")  # fmt: skip
    parser.add_argument("--schedule", choices=("gpipe", "flush"), default="flush")
    parser.add_argument("--batches", type=int, default=6, help="that run of each pipeline")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--payload", type=int, default=1 << 16, help="bytes that a transfer really carries")
    parser.add_argument("--overhead", type=number, default=0.1,
                        help="figure 11: of a layer's time, what does not shrink with the microbatch")  # fmt: skip
    parser.add_argument("--simulate", action="store_true", help="measure nothing; latency and rebuilding take no time")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="of all parts together, or of what is predicted")
    args = parser.parse_args(arguments)
    if args.layers is None:
        args.layers = len(args.layer_times) if len(args.layer_times) > 1 else 12
    if len(args.layer_times) not in (1, args.layers):
        parser.error(
            f"--layer-times has {len(args.layer_times)} and --layers is {args.layers}; give one for all or each"
        )
    if not 1 <= args.stages <= min(16, args.layers):
        parser.error(f"--stages is {args.stages}; give 1 to 16, and no more than the {args.layers} layers")
    if min(args.epochs, args.interval_batches, args.repeats, args.intervals) < 1 or args.batches < 3:
        parser.error("--epochs, --interval-batches, --repeats, --intervals: 1 and more; --batches: 3 and more")
    if args.payload < 4 or args.frozen > 1 or args.overhead >= 1 or args.limit == 0:
        parser.error("--payload: 4 and more; --frozen: 0 to 1; --overhead: less than 1; --limit: more than 0")
    if not 0.0 < args.alpha < 1.0:
        parser.error(f"--alpha is {args.alpha:g}; give a number between 0 and 1")
    return args


def seconds_of_state(args: argparse.Namespace) -> tuple[float, float, float]:
    """The seconds to reduce a layer's gradients; the least seconds to move a transition's state; and the seconds to
    move it for each trained layer that a rank gets.

    A ring sends and receives gradients twice, whatever the number of replicas. All ranks get the state of their new
    layers at the same time, each over its own link, so the rank that gets most decides. The least time is the measured
    one over fast links, with planning, copies and checksums. Without --link only the least time counts.
    """
    rate = OUTPUT_BYTES / args.link if args.link else RATE
    reduce = 2 * GRADIENT_BYTES / rate if args.reduce is None else args.reduce
    if args.move is not None:
        return reduce, args.move, 0.0
    return reduce, MOVE, STATE_BYTES / rate if args.link else 0.0


def setting_of(args: argparse.Namespace, found: dict[str, float] | None = None) -> Setting:
    """The setting of all arms. `found`: measured seconds; None: they are 0.

    Raises:
        ValueError: the static pipeline is impossible, or does not fit into memory.
    """
    latency, norm, reduction, around, rebuild = (
        (found or {}).get(each, 0.0) for each in ("latency", "norm", "reduction", "around", "transition")
    )
    reduce, move, move_layer = seconds_of_state(args)
    forward = tuple(args.layer_times * (args.layers if len(args.layer_times) == 1 else 1))
    layers = Layers(
        forward, tuple(args.backward * each for each in forward), frozen_bytes=args.frozen, saved_bytes=args.saved,
        read=args.read, write=args.write, occupation=args.link, latency=0.0 if args.link else latency,
        reduce=reduce, reduce_latency=reduction, norm=norm, around=around,
    )  # fmt: skip
    setting = Setting(
        layers=layers, num_stages=args.stages, num_microbatches=args.microbatches,
        depths=depths(args.layers, args.alpha, args.intervals), epochs=args.epochs,
        cache_from=args.layers if args.cache_from is None else args.cache_from, batches=args.interval_batches,
        preset=args.schedule, on_host=args.prefix == "host", limit=args.limit or math.inf, rebuild=rebuild, move=move,
        move_layer=move_layer,
    )  # fmt: skip
    held = setting.static().num_bytes
    if args.limit and held > args.limit * (1 + 1e-9):
        raise ValueError(f"the static pipeline takes {held:g} of a rank, and --limit is {args.limit:g}; give more")
    return setting if args.limit else replace(setting, limit=held)


def calibrated(args: argparse.Namespace) -> Setting:
    """The setting with the measured seconds of transfers, reductions, the engine and a transition on this computer."""
    setting = setting_of(args)
    shapes = [each for each in setting.shapes(replicates=True) if each[0] < args.stages == math.prod(each)]
    others = [setting.of_shape(each, 0) for each in shapes[-1:]]
    trial = tuple(each for each in (setting.static(), *others) if each is not None)
    job = ElasticJob(trial=trial, layers=setting.layers, arms={}, **of_job(args))
    return setting_of(args, run_job(job, ElasticRank))


def measured(args: argparse.Namespace, arms: dict) -> dict[str, list[list[dict]]]:
    return run_job(ElasticJob(arms=arms, **of_job(args)), ElasticRank)["arms"]


def of_job(args: argparse.Namespace) -> dict:
    return {
        "num_stages": args.stages, "payload_bytes": args.payload, "batches": args.batches, "repeats": args.repeats,
    }  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse(arguments)
    set_environment()
    try:
        setting = setting_of(args) if args.simulate else calibrated(args)
        phases = {arm.name: plan(arm, setting) for arm in ARMS}
    except ValueError as error:
        print(f"elastic.py: {error}", file=sys.stderr)
        return 2
    elastic_tables.show_setting(setting, args)
    elastic_tables.show_predicted(phases, setting)
    lengths = elastic_figures.best_microbatches(setting, args.overhead)
    runs = {}
    if not args.simulate:
        runs = measured(args, phases | {"figure 11": tuple(each.phase for each in lengths)})
    rows = elastic_tables.rows_of(phases, setting, runs)
    figures = elastic_figures.rows_of(setting, args.alpha, lengths, runs.get("figure 11"))
    elastic_tables.show(rows, figures)
    if args.picture:
        elastic_tables.draw(rows[-1]["phases"], phases[ARMS[-1].name], setting, args.picture)
    if args.json:
        settings = {name: value for name, value in vars(args).items() if name not in ("json", "picture")}
        found = _without_infinity({"settings": settings, "rows": rows, **figures})
        args.json.write_text(json.dumps(found, indent=1, allow_nan=False) + "\n")
    return 0


def _without_infinity(value: Any) -> Any:
    """Replace infinity, which JSON cannot express, by None."""
    if isinstance(value, dict):
        return {name: _without_infinity(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_without_infinity(each) for each in value]
    return None if value == math.inf else value


if __name__ == "__main__":
    sys.exit(main())
