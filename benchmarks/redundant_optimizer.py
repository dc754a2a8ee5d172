"""What copies of the distributed optimizer's shards cost (`--redundant-optimizer`): time of an iteration, and memory.

    python benchmarks/redundant_optimizer.py                      # some minutes, 2 processes on 2 cores
    python benchmarks/redundant_optimizer.py --hidden-sizes 64 --turns 2
    python benchmarks/redundant_optimizer.py --json found.json

Two replicas train a GPT on one stage. Turns of some iterations with copies and turns without alternate in the same
processes; the first pair is not counted.

ratio       seconds of an iteration with copies over those without, each the median of a turn, within a pair of turns
processor   the same of the time that the process, with all its threads, was on a core: also on a busy machine
sends       seconds of an iteration in which a rank sends the gradients of its shard and gets those of its copy
steps       seconds of an iteration in which the copy is stepped, beside what the rank does else
host        the copy's bytes on a rank's host, with the gradients that step it, and for each parameter of the rank

Figures are medians with least and greatest in parentheses, on the slowest rank. On CPUs, the copy's step takes the time
of a core that would compute else; a host beside a GPU has cores to spare.
"""

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.common.processes import run_group
from benchmarks.common.results import parser_of, write
from benchmarks.common.tables import spread


@dataclass(frozen=True)
class Job:
    """A run: its flags, and how many turns of how many iterations it takes with copies, and as many without."""

    flags: str
    turns: int
    iterations: int


def flags_of(options: argparse.Namespace, hidden: int, microbatches: int) -> str:
    return (
        f"--num-layers {options.layers} --hidden-size {hidden} --num-attention-heads {max(1, hidden // 64)} "
        f"--seq-length 128 --max-position-embeddings 128 --micro-batch-size 1 --global-batch-size {2 * microbatches} "
        "--train-iters 100000 --lr 1e-3 --mock-data --tokenizer-type NullTokenizer --vocab-size 1000 --eval-iters 0 "
        f"--num-workers 0 --transformer-impl local --pipeline-schedule {options.schedule} {options.precision} "
        "--use-distributed-optimizer --redundant-optimizer --go-on-without-lost-ranks --log-interval 100000"
    )


def report(name: str, found: dict, say: Callable[[str], None] = print) -> float:
    """Print the results of a job. Returns the median ratio."""
    ratios = [one / other for one, other in zip(found["with"], found["without"], strict=True)]
    processor = [one / two for one, two in zip(found["processor with"], found["processor without"], strict=True)]
    whole, sends, steps = ([1e3 * each for each in found[part]] for part in ("without", "sends", "steps"))
    say(f"{name}: {found['parameters'] / 1e6:.1f}M parameters on a rank, {spread(whole, 1)} ms an iteration")
    say(f"  ratio {spread(ratios, 3)}, of processor time {spread(processor, 3)}")
    say(f"  sends {spread(sends, 2)} ms, steps {spread(steps, 2)} ms")
    share = found["host_bytes"] / found["parameters"]
    say(f"  host {found['host_bytes'] / 1e6:.1f} MB a rank, {share:.2f} bytes for each parameter")
    return statistics.median(ratios)


def main(argv: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__, json="every single figure goes here")
    parser.add_argument("--hidden-sizes", type=int, nargs="+", default=(128, 256, 512))
    parser.add_argument("--microbatches", type=int, nargs="+", default=(4, 16), help="of a replica")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--schedule", choices=("flush", "2bw"), default="flush")
    parser.add_argument("--precision", choices=("", "--bf16"), default="", help="default: FP32")
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--iterations", type=int, default=5, help="of a turn")
    options = parser.parse_args(argv)
    results = {}
    for hidden in options.hidden_sizes:
        for microbatches in options.microbatches:
            name = f"hidden size {hidden}, {microbatches} microbatches of 128 tokens"
            job = Job(flags_of(options, hidden, microbatches), options.turns, options.iterations)
            results[name] = run_group(2, "benchmarks.redundant_turns:take_turns", job)
            report(name, results[name])
    write(options.json, results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
