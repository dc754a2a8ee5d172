"""The gain of mixed partitions on real, unbalanced models: T5s on two processes, each on a core of its own.

    python -m papers.ftpipe.finetune_speed                  # about 15 minutes; a table for each model
    python -m papers.ftpipe.finetune_speed few-layers --json result.json

few-layers      one encoder and one decoder layer, a long source and a large vocabulary. The two products of the
                encoder's feed-forward and the product of the head take most of the time, so no sequential cut is even
little-memory   four layers of each kind, long sources and short targets: the encoder has the work, the decoder as many
                weights. Both partitions keep a limit of memory

The partitioner of `tools/partition.py` finds the best sequential and the best mixed partition. `finetune.py` trains
each partition under ftpipe, in turns, on made-up words, in batches of four microbatches.

limit      seconds of a microbatch that the busiest rank computes in the same run, without its waiting times
gain       seconds of sequential over mixed: measured, and simulated from the profile
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from rich.table import Table

from benchmarks.common.processes import ROOT, environment, torchrun
from benchmarks.common.results import parser_of, write
from benchmarks.common.tables import terminal
from megatron.pipeline.program.instruction import Kind
from megatron.pipeline.simulate.timeline import Timeline
from papers.ftpipe.finetune_models import SOURCE, TARGET, write_t5


def write_cuts(*words: str) -> None:
    """Cut a model by each method, from one profile, and write the best partition of each method."""
    from megatron.finetuning.adapter_arguments import add_adapters
    from megatron.finetuning.arguments import add_data, add_microbatch, settle_precision
    from megatron.finetuning.partitioning import PlannedMachine, cut_model, num_bytes
    from megatron.finetuning.plan import captured_model
    from megatron.finetuning.samples import read_data

    parser = argparse.ArgumentParser()
    parser.add_argument("model_name_or_path")
    parser.add_argument("--devices", type=int, required=True)
    parser.add_argument("--bandwidth", type=float, default=1.0, help="between processes, 10^9 bytes per second")
    parser.add_argument("--memory", type=num_bytes, required=True)
    parser.add_argument("--output", type=Path, required=True)
    add_data(parser, required=True)
    add_microbatch(parser)
    add_adapters(parser)
    args = parser.parse_args(words)
    settle_precision(args)
    args.do_train, args.do_eval, args.seed, args.max_stages_per_device = True, False, 0, 3
    captured, batch, _ = captured_model(args, read_data(args))
    machine = PlannedMachine(args.devices, args.memory, args.bandwidth)
    _, candidates, _, _ = cut_model(captured, batch, machine, args)
    simulated = {}
    for name in ("sequential", "mixed"):
        best = min(
            (each for each in candidates if each.result.method.startswith(name)), key=lambda each: each.simulated_ms
        )
        best.file.write(args.output / f"{name}.json")
        simulated[name] = best.simulated_ms / 1000
        memory = " ".join(f"{each / 2**20:.0f}" for each in best.result.value.memory_bytes)
        print(
            f"{best.result.method}: {len(best.file.stages)} stages, {best.simulated_ms:.1f} ms, {memory} MiB",
            flush=True,
        )
    (args.output / "simulated.json").write_text(json.dumps(simulated))


@dataclass(frozen=True)
class Model:
    """A T5 and its microbatches.

    Attributes:
        samples: of a microbatch.
        target: number of tokens of a target.
        memory: the limit of each device, as `tools/partition.py --memory` takes it.
        shape: values of the configuration that `write_t5` takes.
    """

    samples: int
    target: int = TARGET
    memory: str = "64GiB"
    shape: Mapping[str, int] = field(default_factory=dict)


MODELS = {
    "few-layers": Model(4),
    "little-memory": Model(
        1, 8, "256MiB", {"d_model": 512, "num_layers": 4, "num_decoder_layers": 4, "num_heads": 8}
    ),
}  # fmt: skip
RANKS = 2
NAMES = ("sequential", "mixed")
ACCUMULATION = 4
_COMPUTATIONS = [kind for kind in Kind if kind.is_computation or kind is Kind.STEP]


def main(argv: list[str] | None = None) -> int:
    parser = parser_of(__doc__, json="also write what was measured")
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"of {', '.join(MODELS)} (default: all)")
    parser.add_argument("--repeats", type=int, default=3, help="turns of each partition (default: 3)")
    parser.add_argument("--steps", type=int, default=20, help="batches of a turn (default: 20)")
    options = parser.parse_args(argv)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for name in options.models:
        if name not in MODELS:
            parser.error(f"'{name}' is no model; choose of {', '.join(MODELS)}")
    found = {}
    for name in options.models or MODELS:
        with tempfile.TemporaryDirectory() as folder:
            found[name] = measure(Path(folder), MODELS[name], options)
        show(name, found[name])
    write(options.json, found)
    return 0


def measure(folder: Path, model: Model, options: argparse.Namespace) -> dict:
    """Run all turns of a model. Returns for each partition `seconds` and `limit` of a microbatch by turn, and
    `simulated` seconds."""
    write_t5(folder, target=model.target, **model.shape)
    task = [
        "--task", "text-to-text", "--train_file", str(folder / "train.jsonl"), "--max_seq_length", str(SOURCE),
        "--max_target_length", str(model.target), "--per_device_train_batch_size", str(model.samples),
        "--gradient_accumulation_steps", str(ACCUMULATION), "--optim", "sgd",
    ]  # fmt: skip
    cut(folder / "t5", [*task, "--memory", model.memory], folder)
    found = {}
    for name in NAMES:
        content = json.loads((folder / f"{name}.json").read_text())
        simulated = json.loads((folder / "simulated.json").read_text())[name]
        found[name] = {"simulated": simulated, "seconds": [], "limit": [], "stages": content["rank_of_stage"]}
    for _ in range(options.repeats):
        for name, each in found.items():
            run(folder, name, task, options.steps)
            seconds, limit = judged(Timeline.load(folder / "timeline" / "measured.json"))
            each["seconds"].append(seconds)
            each["limit"].append(limit)
    return found


def cut(model: Path, task: list[str], folder: Path) -> None:
    """Write `sequential.json`, `mixed.json` and `simulated.json` into the folder."""
    words = [str(model), *task, "--devices", str(RANKS), "--output", str(folder)]
    command = [sys.executable, "-m", "benchmarks.common.rank", "papers.ftpipe.finetune_speed:write_cuts", *words]
    subprocess.run(command, cwd=ROOT, env=environment(), check=True)


def run(folder: Path, name: str, task: list[str], steps: int) -> None:
    torchrun(
        RANKS, "finetune.py", "--model_name_or_path", folder / "t5", *task, "--partition", folder / f"{name}.json",
        "--learning_rate", "1e-3", "--max_steps", steps, "--output_dir", folder / name,
        "--pipeline_timeline", folder / "timeline", "--pipeline_timeline_iterations", "10",
        cwd=ROOT, check=True, capture_output=True,
    )  # fmt: skip


def judged(measured: Timeline) -> tuple[float, float]:
    """The seconds of a microbatch, and the seconds for which the busiest rank computes on it, without fill and
    drain."""
    inner = range(measured.first_batch + 2, measured.first_batch + len(measured.batches) - 2)
    spans = [span for span in measured.spans if span.instruction.kind in _COMPUTATIONS]
    busy: dict[int, float] = {}
    for span in spans:
        if batch_of(span) in inner:
            busy[span.rank] = busy.get(span.rank, 0.0) + span.end - span.start
    ends = sorted(
        max(span.end for span in spans if span.instruction.kind is Kind.STEP and span.instruction.version == batch + 1)
        for batch in (inner[0], inner[-1])
    )
    return (ends[1] - ends[0]) / (len(inner) - 1) / ACCUMULATION, max(busy.values()) / len(inner) / ACCUMULATION


def batch_of(span) -> int:
    """The batch of a span. The run begins with microbatch 0, and all batches have the same size."""
    instruction = span.instruction
    return instruction.version - 1 if instruction.kind is Kind.STEP else instruction.microbatch // ACCUMULATION


def show(model: str, found: dict) -> None:
    """Print the table of the docs for a model."""
    console = terminal(120)
    table = Table(model, "stages", "ms a microbatch", "limit, ms", "of the limit", "simulated, ms")
    for name, each in found.items():
        shares = [limit / seconds for limit, seconds in zip(each["limit"], each["seconds"], strict=True)]
        table.add_row(
            name, " ".join(map(str, each["stages"])), f"{1000 * median(each['seconds']):.1f}",
            f"{1000 * median(each['limit']):.1f}", f"{median(shares):.1%}", f"{1000 * each['simulated']:.1f}",
        )  # fmt: skip
    console.print(table)
    one, other = found["sequential"], found["mixed"]
    gains = [a / b for a, b in zip(one["seconds"], other["seconds"], strict=True)]
    console.print(
        f"sequential over mixed: {median(gains):.3f} ({min(gains):.3f} to {max(gains):.3f}) measured, "
        f"{one['simulated'] / other['simulated']:.3f} simulated"
    )


if __name__ == "__main__":
    sys.exit(main())
