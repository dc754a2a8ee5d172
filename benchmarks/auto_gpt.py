"""A GPT with a large head on two cores: `--pipeline-schedule auto` beside every named schedule that keeps its memory.

    python benchmarks/auto_gpt.py                   # about 15 minutes on two quiet cores; a table
    python benchmarks/auto_gpt.py --json auto.json  # also the time of every iteration

Two processes of one thread train a GPT of 8 layers (hidden size 512, sequences of 128) whose head costs as much as two
layers more (a vocabulary of 12,288), in FP32, with `pretrain_gpt.py` as a user runs it. The limit is what 1F1B takes as
`--dry-run` estimates it, less 0.3 of the activations of its first rank, so 1F1B does not keep it as it is. What a user
would do is to recompute some modules (`--recompute-granularity selective`) or some layers of each stage
(`--recompute-method block`), and each named schedule runs with the least of these with which it keeps the limit. `auto`
is given the limit and `--pipeline-recompute`. It measures its first batches, and may recompute any microbatches of any
stage.

Each round runs every contender, in an order that changes, and a contender's time in a round is the median of its last
iterations. "over auto" is the median over the rounds of the ratio within a round; "simulated" has the costs that `auto`
measured in its first run, with layers and head apart.
"""

import json
import random
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.common import results as common
from benchmarks.common.processes import torchrun
from megatron.documents.tables import print_table
from megatron.pipeline import Costs
from megatron.pipeline.synthesis import Problem
from megatron.pipeline.synthesis.search import named_points

ROOT = Path(__file__).resolve().parent.parent
LAYERS, MICROBATCHES = 8, 8
MODEL = (
    f"--num-layers {LAYERS} --hidden-size 512 --num-attention-heads 8 --seq-length 128 --max-position-embeddings 128 "
    f"--vocab-size 12288 --mock-data --tokenizer-type NullTokenizer --micro-batch-size 1 --global-batch-size "
    f"{MICROBATCHES} --lr 1e-4 --eval-iters 0 --log-interval 1 --attention-dropout 0 --hidden-dropout 0 "
    "--split 100,0,0 --num-workers 0 --transformer-impl local --pipeline-model-parallel-size 2"
).split()
GIB = 2**30
LESS = 0.3
ONE, V, TURNS = (0, 1), (0, 1, 1, 0), (0, 1, 0, 1)
NAMED = {
    "flush": (ONE, "1f1b"), "zb-h1": (ONE, "zb-h1"), "interleaved": (TURNS, "interleaved"),
    "interleaved-zb": (TURNS, "interleaved-zb"), "zbv": (V, "zbv"), "v-half": (V, "v-half"), "v-min": (V, "v-min"),
}  # fmt: skip
"""Schedule -> the ranks of its stages, and its registered order."""


@dataclass
class Contender:
    """A way to train.

    Attributes:
        recomputed: what is recomputed, in words.
        layers: the layers of each stage that are recomputed.
        simulated: seconds of a batch.
        seconds: of a batch, in each round.
    """

    name: str
    recomputed: str
    layers: int
    flags: list[str]
    simulated: float = 0.0
    seconds: list[float] = field(default_factory=list)


def recomputes(stage_layers: int) -> Iterator[tuple[str, int, list[str]]]:
    """Yield what may be recomputed, from the least on: in words, in layers of a stage, and as flags."""
    yield "nothing", 0, []
    selective = ["--recompute-granularity", "selective", "--recompute-modules", "core_attn"]
    yield "attention", 0, selective
    yield "attention, norms", 0, [*selective, "layernorm"]
    block = ["--recompute-granularity", "full", "--recompute-method", "block", "--recompute-num-layers"]
    for layers in range(1, stage_layers + 1):
        yield f"{layers} of {stage_layers} layers of a stage", layers, [*block, str(layers)]


def memory(flags: list[str]) -> list[dict[str, float]]:
    """Return what `--dry-run` estimates for each rank, in bytes."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        command = [sys.executable, ROOT / "pretrain_gpt.py", *MODEL, "--train-iters", "2", *flags, "--dry-run", "2"]
        command += ["--assume-packages", "none", "--dry-run-json", file.name]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=ROOT)
        return json.load(file)["memory"]


def total(rank: dict[str, float]) -> float:
    """Return a rank's bytes without those of NCCL's communicators: these ranks have gloo."""
    return rank["total_bytes"] - rank["communicators_bytes"]


def within(limit: float, schedule: str) -> Contender | None:
    """Return a named schedule that keeps a limit in bytes with the least recomputes; None if none does."""
    placement, _ = NAMED[schedule]
    flags = ["--pipeline-schedule", schedule]
    if len(placement) > 2:
        flags += ["--num-virtual-stages-per-pipeline-rank", "2"]
    for recomputed, layers, more in recomputes(LAYERS // len(placement)):
        if max(map(total, memory(flags + more))) <= limit:
            return Contender(schedule, recomputed, layers, flags + more)
    return None


def run(contender: Contender, iterations: int, last: int) -> str:
    """Train, note the median seconds of the last iterations, and return what was printed."""
    done = torchrun(2, ROOT / "pretrain_gpt.py", *MODEL, "--train-iters", iterations, *contender.flags,
                    capture_output=True, text=True, cwd=ROOT)  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{contender.name}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    took = [float(each) for each in re.findall(r"elapsed time per iteration \(ms\): ([\d.]+)", done.stdout)]
    contender.seconds.append(statistics.median(took[-last:]) / 1000)
    return done.stdout + done.stderr


def simulated(contender: Contender, measured: dict[str, list[float]], transfer: float) -> float:
    """Return the seconds of a batch by the costs that `auto` measured, where a recompute is in the I of its stage."""
    placement, order = NAMED[contender.name]
    layers = LAYERS // len(placement)
    costs = {}
    for kind in "FIW":
        layer, head = measured[kind][0] / (LAYERS // 2), measured[kind][1] - measured[kind][0]
        costs[kind] = [layers * layer] * len(placement)
        costs[kind][-1] += head
    again = contender.layers * measured["F"][0] / (LAYERS // 2)
    costs["I"] = [each + again for each in costs["I"]]
    problem = Problem(
        rank_of_stage=placement, num_microbatches=MICROBATCHES,
        costs=Costs(
            forward=costs["F"], backward_input=costs["I"], backward_weight=costs["W"], latency=transfer,
            backward=[sum(both) for both in zip(costs["I"], costs["W"], strict=True)],
        ),
    )  # fmt: skip
    return named_points(problem)[order][1] / 1000


def main(arguments: list[str] | None = None) -> int:
    parser = common.parser_of(__doc__, json="write the limit and the seconds of every round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--iterations", type=int, default=14, help="of each run")
    parser.add_argument("--last", type=int, default=6, help="of these are counted")
    options = parser.parse_args(arguments)
    common.set_environment()
    first = memory(["--pipeline-schedule", "flush"])[0]
    limit = total(first) - LESS * first["activations_bytes"]
    with ThreadPoolExecutor(2) as pool:
        named = list(filter(None, pool.map(partial(within, limit), NAMED)))
    flags = ["--pipeline-schedule", "auto", "--pipeline-recompute", "--pipeline-measured-batches", "3"]
    flags += ["--pipeline-synthesis-seconds", "5", "--pipeline-memory-limit", f"{limit / GIB:.6f}"]
    auto = Contender("auto", "as it chooses", 0, flags)
    contenders, chance = [auto, *named], random.Random(0)
    for number in range(options.rounds):
        for each in contenders if number == 0 else chance.sample(contenders, len(contenders)):
            text = run(each, options.iterations, options.last)
            print(f"round {number + 1} of {options.rounds}, {each.name}: {each.seconds[-1]:.2f} s", file=sys.stderr)
            if number == 0 and each is auto:
                print(*(line for line in text.splitlines() if "auto:" in line), sep="\n")
                found = re.search(r"in ms of a microbatch by stage: (.*), and ([\d.e-]+) of a transfer", text)
                words = (part.split() for part in found[1].split(", "))
                measured = {kind: [*map(float, times)] for kind, *times in words}
                auto.simulated = float(re.search(r"takes ([\d.e+]+) ms", text)[1]) / 1000
                for other in named:
                    other.simulated = simulated(other, measured, float(found[2]))
    rows = []
    for each in contenders:
        over = statistics.median(one / other for one, other in zip(each.seconds, auto.seconds, strict=True))
        rows.append((
            each.name, each.recomputed, f"{each.simulated:.2f}", f"{each.simulated / auto.simulated:.3f}",
            f"{statistics.median(each.seconds):.2f}", f"{over:.3f}",
        ))  # fmt: skip
    print(f"limit {limit / GIB:.4f} GiB; seconds of a batch, medians of {options.rounds} rounds")
    columns = "schedule", "recomputed", "simulated", "over auto", "measured", "over auto"
    print_table(columns, rows, right=range(2, 6))
    common.save(options, [vars(each) for each in contenders], limit=limit)
    return 0


if __name__ == "__main__":
    sys.exit(main())
