"""FTPipe's Tables 2 and 3, simulated: the paper's models on its GPUs, GPipe against asynchronous and mixed pipelines.

    python -m papers.ftpipe.published_speedups                  # about 4 minutes of one core, nothing runs; a table
    python -m papers.ftpipe.published_speedups wic --json result.json

The costs are those of `partition_units`: a roofline of the RTX 2080 Ti in single precision, with its assumptions. Batch
and microbatches of each arm are those of the paper's Table 4; lengths and microbatch sizes are those of its program.
Units are the layers, as in the paper's runs.

gpipe      the best sequential partition for a pipeline that drains after each batch; every stage recomputes
sync       `gpipe` on a mixed partition of at most two stages a device
async      stages step without a drain; the last one does not recompute
step       the optimizer's step moves 28 bytes a parameter (AdamW in one pass: weight, gradient and two moments are
           read, all but the gradient written). Adafactor is taken to cost the same
"""

import sys
from dataclasses import asdict, dataclass, replace

from rich.table import Table

from benchmarks.common.results import parser_of, write
from benchmarks.common.tables import terminal
from megatron.capture.export import capture
from megatron.capture.tensors import fake_parameters
from megatron.partition import Graph, Partition, compete
from papers.ftpipe.asynchronous import contender_of, simulated
from papers.ftpipe.partition_units import PER_DEVICE
from papers.ftpipe.partition_units_graphs import MEMORY, RTX_2080_TI, Case, bert_large, gpt2_xl, priced, t5

STEP_BYTES = 28
EFFORT = 0.2
_T5_3B = t5(heads=32, d_ff=16384)


@dataclass(frozen=True)
class Task:
    """A row of the paper's Table 2.

    Attributes:
        batch: samples of a batch.
        gpipe, sequential, mixed: number of microbatches of a batch of GPipe, of asynchronous sequential and of
            asynchronous mixed pipelines; None: the paper has no such run.
        published: the paper's speed-ups of an epoch over GPipe on sequential stages: `sync mixed`, `async mixed`,
            `async sequential`; and of async over sync on the same mixed partition (Table 3): `async over sync`.
    """

    case: Case
    batch: int
    gpipe: int
    sequential: int
    mixed: int | None
    published: dict[str, float]


def _t5(source: int, target: int) -> Case:
    return Case(_T5_3B, {"input_ids": source, "labels": target}, 1, RTX_2080_TI, 8, 8, "")


TASKS = {
    "wic": Task(_t5(64, 4), 128, 8, 4, 2, {"sync mixed": 1.19, "async mixed": 2.48, "async over sync": 2.09}),
    "rte": Task(_t5(320, 8), 40, 10, 10, 5, {"sync mixed": 1.2, "async mixed": 2.71, "async over sync": 2.25}),
    "boolq": Task(_t5(512, 4), 20, 10, 10, 5, {"sync mixed": 1.08, "async mixed": 2.13, "async over sync": 2.23}),
    "multirc": Task(_t5(512, 4), 8, 8, 4, 2, {"sync mixed": 1.11, "async mixed": 3.32, "async over sync": 2.98}),
    "wikitext2": Task(
        Case(gpt2_xl, {"input_ids": 1024, "labels": 1024}, 1, RTX_2080_TI, 8, 16, ""), 8, 8, 8, None,
        {"async sequential": 1.6},
    ),
    "squad": Task(
        Case(bert_large, {"input_ids": 384, "start_positions": 0, "end_positions": 0}, 1, RTX_2080_TI, 8, 16, ""),
        24, 8, 1, None, {"async sequential": 2.04},
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """Simulated seconds of a batch by arm. `problems`: arm -> why it has none."""

    seconds: dict[str, float]
    problems: dict[str, str]

    def speedups(self) -> dict[str, float]:
        """The speed-ups of `Task.published`, and of `async sequential` for all."""
        found = {arm: self.seconds["gpipe"] / each for arm, each in self.seconds.items() if arm != "gpipe"}
        if "sync mixed" in self.seconds and "async mixed" in self.seconds:
            found["async over sync"] = self.seconds["sync mixed"] / self.seconds["async mixed"]
        return found


class Runner:
    """The arms of a task. The model is captured once, and priced for each size of a microbatch."""

    def __init__(self, name: str, task: Task) -> None:
        self.name, self.task = name, task
        with fake_parameters():
            model = task.case.build()
        self.captured = capture(model, task.case.batch(2))
        self.graphs: dict[int, Graph] = {}

    def graph(self, num_microbatches: int) -> Graph:
        if num_microbatches not in self.graphs:
            microbatch = self.task.batch // num_microbatches
            case = replace(self.task.case, microbatch=microbatch, microbatches=num_microbatches)
            self.graphs[num_microbatches] = priced(self.name, case, self.captured).graph("layers")
        return self.graphs[num_microbatches]

    def outcome(self) -> Outcome:
        task, seconds, problems = self.task, {}, {}
        arms = [
            ("gpipe", "gpipe", "sequential", task.gpipe),
            ("async sequential", "async", "sequential", task.sequential),
        ]
        if task.mixed is not None:
            arms += [("async mixed", "async", "mixed", task.mixed), ("sync mixed", "gpipe", "mixed", task.gpipe)]
        for arm, order, method, num_microbatches in arms:
            graph = self.graph(num_microbatches)
            searched = drained(graph) if order == "gpipe" else graph
            try:
                found = compete(searched, methods=[method], max_stages_per_device=PER_DEVICE, effort=EFFORT)
            except ValueError as error:
                problems[arm] = str(error)
                continue
            seconds[arm] = batch_seconds(searched, found.choice.partition, order, num_microbatches)
        return Outcome(seconds, problems)


def drained(graph: Graph) -> Graph:
    """The graph for a pipeline in which every stage recomputes."""
    plain = {"fwd_plain_ms": None, "bwd_plain_ms": None, "mem_plain_bytes": None}
    return replace(graph, nodes=tuple(replace(node, **plain) for node in graph.nodes))


def batch_seconds(graph: Graph, partition: Partition, order: str, num_microbatches: int) -> float:
    """The simulated seconds of a batch in the steady state."""
    step = STEP_BYTES / (RTX_2080_TI.gigabytes_per_second * MEMORY * 1e6)
    contender = contender_of(
        "", graph, partition, order=order, num_microbatches=num_microbatches, step_milliseconds=step
    )
    return num_microbatches * simulated(contender)


def main(argv: list[str] | None = None) -> int:
    parser = parser_of(__doc__, json="also write every number")
    parser.add_argument("tasks", nargs="*", metavar="TASK", help=f"of {', '.join(TASKS)} (default: all)")
    options = parser.parse_args(argv)
    for name in options.tasks:
        if name not in TASKS:
            parser.error(f"'{name}' is no task; choose of {', '.join(TASKS)}")
    columns = ("sync mixed", "async sequential", "async mixed", "async over sync")
    table = Table("speed-up of an epoch: simulated (published)", "gpipe, s a batch", *columns)
    found = {}
    console = terminal(150)
    for name in options.tasks or TASKS:
        task = TASKS[name]
        outcome = Runner(name, task).outcome()
        ratios = outcome.speedups()
        cells = []
        for column in columns:
            published = f" ({task.published[column]})" if column in task.published else ""
            cells.append(f"{ratios[column]:.2f}{published}" if column in ratios else published)
        table.add_row(name, f"{outcome.seconds['gpipe']:.2f}", *cells)
        print(f"{name}: {cells}", file=sys.stderr)
        for arm, reason in outcome.problems.items():
            console.print(f"{name}, {arm}: {reason}", highlight=False, soft_wrap=True)
        found[name] = {**asdict(outcome), "speedups": ratios, "published": task.published}
    console.print(table)
    write(options.json, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
