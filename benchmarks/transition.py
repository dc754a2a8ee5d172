"""The time to change a run's degrees, with its state moved through the ranks' memory or by a checkpoint on tmpfs.

    python benchmarks/transition.py                             # about 5 minutes, 4 processes
    python benchmarks/transition.py --hidden-size 128 --layers 4 --repeats 1
    python benchmarks/transition.py --json found.json

A GPT whose optimizer state is filled with random numbers changes from p=4, d=1 to p=2, d=2 and back, alternately
through memory and through a checkpoint in /dev/shm, in the same processes. Both ways build groups, chunks and optimizer
anew.

state       describe and hand over, or save and load: the part in which the two ways differ
transition  the state, and building the groups, chunks and optimizer of the new degrees
ratio       seconds of the state through memory over those through a checkpoint, within a repeat
bounded by  seconds of the same bytes, sent round a ring by all ranks at the same time: bare transfers, one copy into a
            message and one out of it, and a checksum at either end. The rest is planning, pickled lists, and waiting.

Figures are medians of the repeats with least and greatest in parentheses, on the slowest rank.
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
    """A run: its `flags` without the degrees, its numbers of stages before and after, and the folder of checkpoints."""

    flags: str
    world_size: int
    stages: tuple[int, int]
    repeats: int
    directory: str


OPTIMIZERS = {"plain": "", "distributed": "--use-distributed-optimizer"}


def flags_of(options: argparse.Namespace, optimizer: str) -> str:
    heads = max(1, options.hidden_size // 64)
    return (
        f"--num-layers {options.layers} --hidden-size {options.hidden_size} --num-attention-heads {heads} "
        "--seq-length 32 --max-position-embeddings 32 --micro-batch-size 1 --global-batch-size 8 --train-iters 100 "
        "--lr 1e-3 --mock-data --tokenizer-type NullTokenizer --vocab-size 1000 "
        "--untie-embeddings-and-output-weights --pipeline-schedule "
        f"{options.schedule} {options.precision} {OPTIMIZERS[optimizer]}"
    )


def report(optimizer: str, found: dict, say: Callable[[str], None] = print) -> float:
    """Print one optimizer's results. Returns the median ratio of the state's seconds."""
    turns = {way: [each["seconds"] for each in found["turns"] if each["memory"] == way] for way in (True, False)}
    state = {
        True: [each["describe"] + each["hand over"] for each in turns[True]],
        False: [each["save"] + each["load"] for each in turns[False]],
    }
    ratios = [one / other for one, other in zip(state[True], state[False], strict=True)]
    sent = next(each["sent"] for each in found["turns"] if each["memory"])
    say(
        f"\n{optimizer} optimizer: {found['parameters'] / 1e6:.1f}M parameters on the ranks, "
        f"{found['state_bytes'] / 1e9:.3f} GB of state held, {sent / 1e9:.3f} GB sent"
    )
    for way, name in ((True, "memory"), (False, "checkpoint")):
        phases = ", ".join(f"{phase} {spread([each[phase] for each in turns[way]], 2)}" for phase in turns[way][0])
        whole = spread([sum(each.values()) for each in turns[way]], 2)
        say(f"  {name:<10}  state {spread(state[way], 2)} s, transition {whole} s   [{phases}]")
    say(f"  ratio       {spread(ratios, 2)}; the bar is 0.50")
    per_gigabyte = [each["hand over"] / (sent / 1e9) for each in turns[True]]
    parts = ", ".join(f"{name} {spread([each[name] for each in found['bare']], 3)}" for name in found["bare"][0])
    say(f"  hand over   {spread(per_gigabyte, 2)} s for each GB sent; bounded by: {parts} s")
    return statistics.median(ratios)


def main(argv: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__, json="every single figure goes here")
    parser.add_argument("--hidden-size", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--schedule", choices=("flush", "2bw"), default="flush")
    parser.add_argument("--precision", choices=("", "--bf16"), default="", help="default: FP32")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--stages", type=int, nargs=2, default=(4, 2), help="before and after (default: 4 2)")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--optimizers", nargs="+", choices=OPTIMIZERS, default=list(OPTIMIZERS))
    parser.add_argument("--directory", default="/dev/shm/transition", help="of the checkpoints")
    options = parser.parse_args(argv)
    results = {}
    for optimizer in options.optimizers:
        job = Job(flags_of(options, optimizer), options.ranks, tuple(options.stages), options.repeats,
                  options.directory)  # fmt: skip
        results[optimizer] = run_group(job.world_size, "benchmarks.transition_turns:take_turns", job)
        report(optimizer, results[optimizer])
    write(options.json, results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
