"""The command `tools/schedule.py synthesize`: a program made for given costs and memory, with a bound beside it."""

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.commands.synthesis_rows import above, order_of, print_rows, rows_of, steady_rows
from megatron.documents import command_line
from megatron.documents.command_line import add_flags, progress_bars
from megatron.documents.flag_types import count, count_from_0, positive, times
from megatron.documents.picture import one_panel, require_picture
from megatron.documents.tables import print_table
from megatron.pipeline.program.edges import rank_of_stage
from megatron.pipeline.simulate.costs import Costs, measured_costs
from megatron.pipeline.simulate.timeline import Timeline

if TYPE_CHECKING:  # the other commands of tools/schedule.py start without the search and its processes
    from megatron.pipeline.synthesis import Problem, Steady, Synthesis

SUMMARY = "make the program of one batch for given costs and memory, and say how far from a lower bound it is"
_ONE, _BEST, _SOME = "one", "best", "some"
_COSTS = ("forward", "backward", "backward_input", "backward_weight", "recompute", "transfer", "latency", "swap_out",
          "swap_in", "evict", "load")  # fmt: skip
_MOVES = {"host": "swap_out", "pair": "evict"}  # the choices of --moves, and the costs that these need


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `synthesize`."""
    add_flags(
        parser.add_argument_group("pipeline"),
        ("--ranks", count, "P", "pipeline ranks"),
        ("--microbatches", count, "M", "microbatches of the batch", {"required": True}),
        ("--weights", str, None, "flush, where each batch drains, or 2bw, where batches follow one another: the least "
         "period within the limits, and at this period the least memory (default: flush)",
         {"choices": ("flush", "2bw"), "default": "flush"}),
        ("--virtual-stages", count, "V", "stages of a rank under v, round-robin, best (default: 2)", {"default": 2}),
        ("--placement", str, "NAME", "one (stage a rank), v, round-robin, best (of these two), or the rank of each "
         "stage: 0,1,1,0 (default: one, or that of --measured)"),
    )  # fmt: skip
    add_flags(
        parser.add_argument_group("costs", "In any unit of time; one number, or one for each stage or edge."),
        ("--measured", str, "FILE", "measured.json of a run with --pipeline-timeline: its mean times"),
        ("--forward", times, "T[,T...]", "time of a microbatch's forward at a stage (default: 1)"),
        ("--backward", times, "T[,T...]", "time of its whole backward (default: 2)"),
        ("--backward-input", times, "T[,T...]", "time of I (default: half of --backward)"),
        ("--backward-weight", times, "T[,T...]", "time of W (default: the rest of --backward)"),
        ("--recompute-time", times, "T[,T...]", "time of a recompute (default: as --forward)", {"dest": "recompute"}),
        ("--transfer", times, "T[,T...]", "time for which a transfer occupies its edge (default: 0)"),
        ("--latency", times, "T[,T...]", "time from the end of the sending to the arrival (default: 0)"),
        ("--swap-out", times, "T[,T...]", "time to copy what a microbatch saves to the host, for --moves"),
        ("--swap-in", times, "T[,T...]", "time to copy it back (default: as --swap-out)"),
        ("--evict", times, "T[,T...]", "time to move what a microbatch saves to the other rank of a pair, for --moves"),
        ("--load", times, "T[,T...]", "time to move it back (default: as --evict)"),
        ("--whole-backwards", None, "", "backwards are not split into I and W"),
    )
    add_flags(
        parser.add_argument_group("memory", "In any unit, such as microbatches or GiB."),
        ("--saved", times, "X[,X...]", "what a microbatch holds at a stage from F to I (default: 1 for all of a rank)"),
        ("--deferred", times, "X[,X...]", "what it holds from I to W (default: as --saved)"),
        ("--stage-input", times, "X[,X...]", "what it holds from F to its recompute (default: 0)", {"default": 0.0}),
        ("--limit", times, "X[,X...]", "the most that a rank may hold, one for each rank or for all (default: any)"),
        ("--recompute", str, None, "recompute no stage, all, some microbatches of each, or the best of these and of "
         "the stages of the first or of the last ranks (default: none)",
         {"choices": ("none", "all", _SOME, _BEST), "default": "none", "dest": "recompute_stages"}),
        ("--moves", str, None, "where saved activations may wait: nowhere but on their rank, on the host, on the other "
         "rank of a pair, or the best of these (default: none)",
         {"choices": ("none", *_MOVES, _BEST), "default": "none"}),
    )  # fmt: skip
    add_flags(
        parser.add_argument_group("search"),
        ("--seconds", positive, "S", "how long to search (default: 30)", {"default": 30.0}),
        ("--rounds", count, "N", "rounds of each process, in place of --seconds: the result depends on no clock"),
        ("--seed", count_from_0, "N", "seed of the search (default: 0)", {"default": 0}),
        ("--processes", count, "N", "processes of the search (default: 1)", {"default": 1}),
    )
    add_flags(
        parser.add_argument_group("output"),
        ("--csv", str, "FILE", "write the program, for --pipeline-program ('-': to the terminal)"),
        ("--json", str, "FILE", "write the certificate"),
        ("--frontier", str, "X,X,...", "search under each of these limits of all ranks, and print time against memory"),
        ("--picture", str, "FILE", "draw the frontier, with the registered orders as points"),
    )


def run(options: argparse.Namespace) -> int:
    """Run `synthesize`. Raises ValueError for options that do not go together or allow no program."""
    limits = _limits_of_frontier(options)
    for each in filter(None, (options.csv, options.json, options.picture)):
        if each != "-":
            command_line.require_file(Path(each))
    _require_costs_of_moves(options)
    if options.weights != "flush":
        best = _steady(options)
        print_rows(steady_rows(best))
        _write(options, best.csv, best.certificate())
    elif not limits:
        best = _search(options, None)
        print_rows(rows_of(best))
        _write(options, best.csv, best.certificate())
    else:
        _frontier(options, limits)
    return 0


def _require_costs_of_moves(options: argparse.Namespace) -> None:
    if options.moves != "none" and options.weights != "flush":
        raise ValueError("--moves are for --weights flush; under 2bw add --pipeline-offload-activations to the run")
    for way, cost in _MOVES.items():
        flag, is_used = f"--{cost.replace('_', '-')}", options.moves in (way, _BEST)
        if is_used and getattr(options, cost) is None:
            raise ValueError(f"--moves {options.moves} needs the time of a move; add {flag}")
        back = {"swap_out": "swap_in", "evict": "load"}[cost]
        if not is_used and (getattr(options, cost) is not None or getattr(options, back) is not None):
            raise ValueError(f"{flag} and --{back.replace('_', '-')} are times of moves; add --moves {way} or best")


def _limits_of_frontier(options: argparse.Namespace) -> tuple[float, ...]:
    if options.picture and not options.frontier:
        raise ValueError("--picture draws a frontier; add --frontier with some limits")
    if not options.frontier:
        return ()
    if options.weights != "flush":
        raise ValueError("--frontier is for --weights flush; under 2bw search with one --limit after another")
    if options.csv or options.json or options.limit is not None:
        raise ValueError("--frontier searches under several limits; leave --limit, --csv and --json out")
    if options.picture:
        require_picture(Path(options.picture))
    try:
        limits = tuple(map(positive, options.frontier.split(",")))
    except argparse.ArgumentTypeError as error:
        raise ValueError(f"--frontier {options.frontier}: {error}; give limits such as 4,5,6,8") from error
    return tuple(sorted(limits))


# --- the problem


def _placements(options: argparse.Namespace, measured: Timeline | None) -> list[tuple[int, ...]]:
    """The placements to try."""
    name = options.placement
    if name is None and measured is not None:
        return [tuple(measured.rank_of_stage)]
    if name is not None and name[:1].isdigit():
        try:
            return [tuple(map(int, name.split(",")))]
        except ValueError as error:
            raise ValueError(
                f"--placement {name} is no list of ranks; give the rank of each stage, such as 0,1,1,0"
            ) from error
    if options.ranks is None:
        raise ValueError("the number of ranks is not known; give --ranks, --measured, or the rank of each stage")
    if name in (None, _ONE):
        return [tuple(range(options.ranks))]
    names = ("v", "round-robin") if name == _BEST else (name,)
    return [rank_of_stage(each, options.ranks, options.virtual_stages) for each in names]


def _costs(options: argparse.Namespace, measured: Timeline | None) -> Costs:
    given = {name: getattr(options, name) for name in _COSTS if getattr(options, name) is not None}
    if "transfer" in given:
        given |= {"forward_bytes": given.pop("transfer"), "bandwidth": 1.0}
    if measured is None:
        return Costs(**given)
    costs = measured_costs(measured)
    has_halves = any(costs.backward_input or ()) or not given.keys().isdisjoint(("backward_input", "backward_weight"))
    if not options.whole_backwards and not has_halves:
        raise ValueError(
            f"{options.measured} has no backwards in halves; measure a run of zb-h1 or zbv, give --backward-input, or "
            "add --whole-backwards"
        )
    if options.whole_backwards and not (any(costs.backward) or "backward" in given):
        raise ValueError(f"{options.measured} has no whole backwards; leave --whole-backwards out")
    return replace(costs, **given)


def _problems(options: argparse.Namespace, limit: float | None) -> "list[Problem]":
    """The problems to solve: for each placement, without recompute or with it, as the options allow.

    Raises ValueError where the limit allows none of them.
    """
    from megatron.pipeline.synthesis import Problem

    measured = Timeline.load(options.measured) if options.measured else None
    costs = _costs(options, measured)
    problems, refusal = [], None
    for placement in _placements(options, measured):
        most = max(placement.count(rank) for rank in placement)
        for recomputed in _recomputed(options.recompute_stages, placement):
            try:
                problems.append(Problem(
                    rank_of_stage=placement,
                    num_microbatches=options.microbatches,
                    costs=costs,
                    saved=1 / most if options.saved is None else options.saved,
                    deferred=options.deferred,
                    stage_input=options.stage_input,
                    limits=next((each for each in (limit, options.limit) if each is not None), math.inf),
                    splits=not options.whole_backwards,
                    recomputed=recomputed,
                ))  # fmt: skip
            except ValueError as error:
                refusal = error
    if not problems:
        raise refusal
    return problems


def _recomputed(name: str, placement: Sequence[int]) -> list[frozenset[int]]:
    """The sets of recomputed stages to try."""
    from megatron.pipeline.synthesis.several_problems import recomputed_sets

    none, every, *parts = recomputed_sets(placement)
    return {"none": [none], "all": [every], _SOME: [every], _BEST: [none, every, *parts]}[name]


def _search(options: argparse.Namespace, limit: float | None, known: "Sequence[Synthesis]" = ()) -> "Synthesis":
    """Search for the fastest program. `known`: programs for smaller limits."""
    from megatron.pipeline.synthesis.several_problems import synthesize_fastest

    some = options.recompute_stages in (_SOME, _BEST)
    with _progress() as report:
        return synthesize_fastest(
            _problems(options, limit), recomputes_some=some, moves=options.moves, seconds=options.seconds,
            rounds=options.rounds, seed=options.seed, processes=options.processes, known=known, done=report,
        )  # fmt: skip


def _steady(options: argparse.Namespace) -> "Steady":
    """Search for the program of batches that follow one another."""
    if options.recompute_stages == _SOME:
        raise ValueError(f"--recompute {_SOME} is for --weights flush; under 2bw give all or {_BEST}")
    from megatron.pipeline.program.weight_policies import weight_policy
    from megatron.pipeline.synthesis import synthesize_steady

    problems, found, refusal = _problems(options, None), [], None
    with _progress() as report:
        for number, problem in enumerate(problems):

            def done(part: float, number: int = number) -> None:
                report((number + part) / len(problems))

            try:
                found.append(synthesize_steady(
                    problem, weights=weight_policy(options.weights), seconds=options.seconds / len(problems),
                    rounds=options.rounds, seed=options.seed, processes=options.processes, done=done,
                ))  # fmt: skip
            except ValueError as error:
                refusal = error
    if not found:
        raise refusal
    return min(found, key=lambda each: (round(each.seconds, 9), each.fullness))


@contextmanager
def _progress() -> Iterator[Callable[[float], None]]:
    """Show the part of the search that is over as a bar on standard error, if that is a terminal."""
    with progress_bars() as report:
        yield partial(report, "searching", total=1.0) if report else lambda _: None


# --- the answer


def _write(options: argparse.Namespace, csv: str, certificate: dict[str, object]) -> None:
    from megatron.documents.files import write_whole

    if options.csv == "-":
        sys.stdout.write(csv)
    elif options.csv:
        write_whole(Path(options.csv), csv)
    if options.json:
        write_whole(Path(options.json), json.dumps(certificate, indent=1) + "\n")


def _frontier(options: argparse.Namespace, limits: Sequence[float]) -> None:
    rows, points, known = [], [], []
    for limit in limits:
        try:
            best = _search(options, limit, known)
        except ValueError as error:
            rows.append((f"{limit:g}", "-", "-", "-", "-", str(error)))
            continue
        known.append(best)
        points.append((limit, best.seconds, best.bound))
        rows.append((
            f"{limit:g}", f"{best.seconds:g}", f"{best.bubble:.2%}", f"{best.bound:g}",
            above(best.seconds, best.bound), order_of(best, "none keeps the limit"),
        ))  # fmt: skip
    print_table(("limit", "time", "bubble", "bound", "above it", "best registered order"), rows, right=range(5))
    if options.picture:
        if not points:
            raise ValueError(f"no limit of --frontier allows a program: {rows[0][-1]}")
        from megatron.pipeline.synthesis.search import named_points

        orders = {name: point for each in _problems(options, math.inf) for name, point in named_points(each).items()}
        _draw(Path(options.picture), points, orders)
        print(f"wrote {options.picture}")


def _draw(path: Path, points: Sequence[tuple[float, float, float]], orders: dict[str, tuple[float, float]]) -> None:
    limits, seconds, bounds = zip(*points, strict=True)
    with one_panel(path, 7.5, 4.5, title="time of a batch against memory") as axes:
        axes.plot(limits, seconds, marker="o", label="synthesized")
        axes.plot(limits, bounds, linestyle="--", color="grey", label="lower bound")
        for number, (name, (held, time)) in enumerate(orders.items()):
            axes.plot([held], [time], linestyle="", marker="sD^vPX*p"[number % 8], label=name)
        axes.set_xlabel("most that a rank holds")
        axes.set_ylabel("time of a batch")
        axes.set_ylim(bottom=0.95 * min(bounds))
