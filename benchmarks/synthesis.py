"""How near synthesized programs come to their bound, and how far ahead of registered orders they are.

    python benchmarks/synthesis.py                          # 24 sets of costs, 7 limits; never run as a whole
    python benchmarks/synthesis.py --sets ZB-1.5B-24 head-1.4 --limits 0.75 1 --seconds 20

Costs of even stages are the 12 published rows of zero bubble (Qi et al. 2024; microseconds of F, I, W and a transfer).
Uneven sets have a head or an embedding, a slow rank, or slow links; one is a profile of a 6.2B model that was published
with zero bubble's scheduler. A set is tried with one stage on a rank, and with two placed
in a V, where each stage has half of the layers of a rank. Limits are parts of what 1F1B's first rank holds, p
microbatches; a microbatch is held whole from F to W.

Each line has the fastest registered order that keeps the limit, the synthesized program, and the bound over both
placements. Nothing runs, so a busy machine only makes the search shorter.

`--peer DIR` adds the generators of zero bubble's authors, for even sets: the folder `.../zerobubble/scheduler` of a
checkout of their Megatron-LM fork. They know only a V with two equal stages on each rank.
"""

import importlib.util
import io
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import ModuleType

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.common import results as common
from megatron.documents.tables import print_table
from megatron.pipeline.program.edges import v
from megatron.pipeline.program.instruction import Kind
from megatron.pipeline.simulate.costs import Costs
from megatron.pipeline.synthesis.problem import Problem, Words
from megatron.pipeline.synthesis.search import bubble, synthesize
from megatron.pipeline.synthesis.timing import Clock
from megatron.processes import map_forked

LIMITS = 1 / 3, 1 / 2, 5 / 8, 3 / 4, 1, 3 / 2, 2
PUBLISHED = {
    "ZB-1.5B": ((8, 24, 18522, 18086, 9337, 601), (8, 32, 18513, 18086, 9331, 626), (8, 64, 18546, 18097, 9321, 762)),
    "ZB-6.2B": (
        (8, 24, 29718, 29444, 19927, 527),
        (8, 32, 29802, 29428, 19530, 577),
        (8, 64, 29935, 29621, 19388, 535),
    ),
    "ZB-14.6B": (
        (16, 48, 11347, 11248, 8132, 377),
        (16, 64, 11307, 11254, 8101, 379),
        (16, 128, 11325, 11308, 8109, 378),
    ),
    "ZB-28.3B": (
        (32, 96, 10419, 10207, 7715, 408),
        (32, 128, 10408, 10204, 7703, 408),
        (32, 256, 10402, 10248, 7698, 460),
    ),
}
PROFILE = (
    (30715, 29233, 29106, 29078, 28850, 28919, 28924, 41678),
    (31308, 29344, 29357, 29455, 29217, 29384, 29354, 38731),
    (18746, 18789, 19062, 19367, 19455, 19967, 20096, 32833),
)


@dataclass(frozen=True)
class Set:
    """Costs of a pipeline, before it is placed.

    Attributes:
        ranks, microbatches: their numbers.
        layers: F, I and W of the layers of each rank.
        head, embedding: F, I and W beside those of the layers, of the last and the first stage.
        transfers: seconds of a transfer over each link between neighbouring ranks.
    """

    ranks: int
    microbatches: int
    layers: tuple[tuple[float, float, float], ...]
    transfers: tuple[float, ...]
    head: tuple[float, float, float] = (0.0, 0.0, 0.0)
    embedding: tuple[float, float, float] = (0.0, 0.0, 0.0)

    def problem(self, stages_of_rank: int, part: float) -> Problem:
        """Return the problem with 1 or 2 stages on each rank, placed in a V, and this part of 1F1B's memory."""
        placement = v(self.ranks, stages_of_rank)
        kinds = [[self.layers[rank][kind] / stages_of_rank for rank in placement] for kind in range(3)]
        for kind, (head, embedding) in enumerate(zip(self.head, self.embedding, strict=True)):
            kinds[kind][-1] += head
            kinds[kind][0] += embedding
        links = [self.transfers[min(pair)] if pair[0] != pair[1] else 0.0
                 for pair in pairwise(placement)]  # fmt: skip
        forward, backward_input, backward_weight = kinds
        return Problem(
            rank_of_stage=placement,
            num_microbatches=self.microbatches,
            costs=Costs(
                forward=forward, backward_input=backward_input, backward_weight=backward_weight, latency=links,
                backward=[sum(each) for each in zip(backward_input, backward_weight, strict=True)],
            ),
            saved=1 / stages_of_rank,
            limits=part * self.ranks,
        )  # fmt: skip


def _even(p: int, m: int, f: float, i: float, w: float, c: float, **more: object) -> Set:
    return Set(p, m, ((f, i, w),) * p, (c,) * (p - 1), **more)


def _sets() -> dict[str, Set]:
    sets = {f"{name}-{row[1]}": _even(*row) for name, rows in PUBLISHED.items() for row in rows}
    one = 8, 24, 10.0, 10.0, 10.0, 0.2
    for part in (0.4, 0.7, 1.0, 1.4, 2.0, 3.0):
        sets[f"head-{part:g}"] = _even(*one, head=(10.0 * part, 10.0 * part, 10.0 * part))
    sets["embedding-0.5"] = _even(*one, embedding=(5.0, 0.0, 5.0))
    sets["head-embedding"] = _even(*one, head=(7.0, 7.0, 7.0), embedding=(3.0, 0.0, 3.0))
    slow = [(10.0, 10.0, 10.0)] * 8
    slow[3] = (15.0, 15.0, 15.0)
    sets["slow-rank"] = Set(8, 24, tuple(slow), (0.2,) * 7)
    sets["slow-link"] = Set(8, 24, ((10.0, 10.0, 10.0),) * 8, (0.2, 0.2, 0.2, 12.0, 0.2, 0.2, 0.2))
    sets["slow-links"] = Set(8, 24, ((10.0, 10.0, 10.0),) * 8, (5.0,) * 7)
    sets["profile-6.2B"] = Set(8, 32, tuple(zip(*PROFILE, strict=True)), (473.0,) * 7)
    return sets


SETS = _sets()


@dataclass(frozen=True)
class Result:
    """What came out for one set under one limit; seconds are None where nothing keeps the limit."""

    name: str
    limit: float
    named: tuple[str, float] | None
    seconds: float | None
    bound: float | None
    bubble: float | None
    least_bubble: float | None
    peer: tuple[str, float] | None = None


def measure(name: str, limit: float, seconds: float, rounds: int | None, peer: str | None) -> Result:
    """Synthesize with one and two stages on each rank, and return the better. `peer`: see `--peer`."""
    found = []
    for stages_of_rank in (1, 2):
        try:
            problem = SETS[name].problem(stages_of_rank, limit)
        except ValueError:  # a single microbatch is too much for the limit
            continue
        found.append(synthesize(problem, seconds=seconds / 2, rounds=rounds))
    if not found:
        return Result(name, limit, None, None, None, None, None)
    best, bound = min(found, key=lambda each: each.seconds), min(each.bound for each in found)
    named = min((each.named for each in found if each.named), key=lambda each: each[1], default=None)
    theirs = None if peer is None else _fastest_of_peer(SETS[name], found[-1].problem, Path(peer))
    return Result(name, limit, named, best.seconds, bound, best.bubble, bubble(best.problem, bound), theirs)


# --- the generators of zero bubble's authors


@cache
def _generators(folder: Path) -> dict[str, ModuleType]:
    """Load the modules of a checkout. They import each other by the names that they have in its package."""
    package = "megatron.core.pipeline_parallel.zerobubble.scheduler"
    modules = {}
    for name in ("graph", "zbv", "zbv_greedy", "v_auto_schedule"):
        spec = importlib.util.spec_from_file_location(f"{package}.{name}", folder / f"{name}.py")
        modules[name] = module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    return modules


def _of_peer(each: Set, limit: int, folder: Path) -> Iterator[tuple[str, list[list[tuple[int, int]]]]]:
    """Yield the rows of their generators: for each rank, kinds (0: F, 1: I, 2: W) and whether they are on its way back.

    `limit`: the most stages that a rank holds activations of.
    """
    modules, p, m = _generators(folder), each.ranks, each.microbatches
    costs = *(seconds / 2 for seconds in each.layers[0]), each.transfers[0]
    auto, graph = modules["v_auto_schedule"], modules["graph"]
    auto.transform_schedule = lambda rows, *_: rows  # into nodes, which say less
    letters = {letter: (place // 2, (place % 2) ^ (place > 1)) for place, letter in enumerate("FfBbWw")}
    rows = auto.schedule(p, m, costs, limit)
    if rows is not None:  # it has some within this limit
        yield "v_auto_schedule", [[letters[letter] for letter in row if letter.strip()] for row in rows]
    kinds = {graph.F: 0, graph.B: 1, graph.W: 2}
    for name, made in (
        ("zbv", lambda: modules["zbv"].PipelineGraph(p, m, *costs, 2, -1, -1, max_mem=2 * limit)),
        ("v-half", lambda: modules["zbv_greedy"].PipelineGraph(p, m, "half", *costs)),
        ("v-min", lambda: modules["zbv_greedy"].PipelineGraph(p, m, "min", *costs)),
    ):
        try:
            nodes = made().create_schedule(graph.GraphConfig.basic_config(*map(float, costs[:3]), p, m, 2))
        except AssertionError:  # zbv needs the memory of 1F1B
            continue
        yield name, [[(kinds[node.type], node.chunk) for node in row] for row in nodes]


def _fastest_of_peer(each: Set, problem: Problem, folder: Path) -> tuple[str, float] | None:
    """Return the fastest of their schedules that keeps the limits, timed by our clock; None for uneven sets."""
    if any(each.head) or any(each.embedding) or len({*each.layers}) > 1 or len({*each.transfers}) > 1:
        return None
    found, last = [], problem.num_stages - 1
    order = Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT
    with redirect_stdout(io.StringIO()):
        rows_of = dict(_of_peer(each, int(2 * problem.limit_of(0) * (1 + 1e-9)), folder))
    for name, rows in rows_of.items():
        words: Words = [
            [problem.number_of[order[kind], last - rank if is_back else rank] for kind, is_back in row]
            for rank, row in enumerate(rows)
        ]
        times = Clock(problem).times(words)
        if times is not None and all(problem.is_in_order(word, rank) for rank, word in enumerate(words)):
            found.append((name, times.seconds))
    return min(found, key=lambda pair: pair[1], default=None)


def _line(result: Result) -> tuple[str, ...]:
    if result.seconds is None:
        return result.name, f"{result.limit:.3g}", "-", "-", "-", "-", "no microbatch fits", "-"
    ahead, order = "-", "none keeps the limit"
    if result.named is not None:
        ahead, order = f"{result.named[1] / result.seconds:.3f}", result.named[0]
    above = max(0.0, result.seconds / result.bound - 1)
    return (
        result.name, f"{result.limit:.3g}", f"{result.bubble:.2%}", f"{result.least_bubble:.2%}", f"{above:.2%}",
        ahead, order, "-" if result.peer is None else f"{result.peer[0]} {result.peer[1] / result.seconds:.3f}",
    )  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    parser = common.parser_of(__doc__, json="write the results")
    parser.add_argument("--sets", nargs="+", choices=SETS, default=list(SETS), metavar="NAME")
    parser.add_argument("--limits", nargs="+", type=float, default=LIMITS, help="parts of 1F1B's memory")
    parser.add_argument("--seconds", type=float, default=30.0, help="of search for each set and limit (default: 30)")
    parser.add_argument("--rounds", type=int, help="rounds of search for each placement, in place of --seconds")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--peer", metavar="DIR", help="with the generators of zero bubble's authors in this folder")
    options = parser.parse_args(arguments)
    cases = [(name, limit) for name in options.sets for limit in options.limits]
    results = map_forked(
        lambda case: measure(*case, options.seconds, options.rounds, options.peer), cases, options.processes,
        taken=lambda number: print(f"{number + 1}/{len(cases)}: {cases[number][0]}", file=sys.stderr, flush=True),
    )  # fmt: skip
    columns = (
        "costs",
        "limit",
        "bubble",
        "least",
        "above the bound",
        "over the order",
        "fastest registered order",
        "the peer's",
    )
    print_table(columns, [_line(each) for each in results], right=range(1, 6))
    others = [(each, other) for each in results for other in (each.named, each.peer) if other is not None]
    slower = [(each, other) for each, other in others if each.seconds > other[1] * (1 + 1e-9)]
    for each, other in slower:
        print(f"{each.name} at {each.limit:.3g} is slower than {other[0]}")
    common.save(options, [asdict(each) for each in results])
    return 1 if slower else 0


if __name__ == "__main__":
    sys.exit(main())
