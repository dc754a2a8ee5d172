"""The table of `grid_search validate`: each test with its bar, its result, and whether the result reaches the bar.

Bars are data. A group of runs without a bar is reported, too. The error of a run is its predicted over its published
value, less 1; the value is a time or an MFU, as published. `mean_time_error` takes the times of all runs. If a run was
slower than predicted, the error of its time is smaller than the error of its MFU: 33% and 50% for 1.5 times as slow.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from megatron.planner.published.entries import Entry
from megatron.planner.published.interval import LEVEL, without_run, without_source
from megatron.planner.published.residuals import Residual
from megatron.planner.published.validation import TOP, Judged, RowError, TableChoice

PRESSURE = "allocator"  # a word in the note of an entry whose authors saw memory pressure


@dataclass(frozen=True, kw_only=True)
class ValidationOutcome:
    """A line of the table.

    Attributes:
        test: the name of the test.
        bar: the bar in words; empty: there is none.
        found: the result in words.
        reached: whether the result reaches the bar; None without a bar.
        numbers: the result for programs.
    """

    test: str
    bar: str = ""
    found: str
    reached: bool | None = None
    numbers: dict[str, float]


@dataclass(frozen=True, kw_only=True)
class _Group:
    test: str
    has: Callable[[Entry], bool]
    mean: float | None = None
    worst: float | None = None


def _is_of(source: str, model: str = "") -> Callable[[Entry], bool]:
    return lambda entry: source in entry.source and model in entry.model_name and entry.seconds is not None


def _is_sharded(entry: Entry, source: str) -> bool:
    return entry.configuration.sharding is not None and _is_of(source)(entry)


_GROUPS = (
    _Group(
        test="BPipe Table 7, GPT-3 96B, without allocator pressure",
        has=lambda entry: _is_of("BPipe (ICML 2023) Table 7", "96B")(entry) and PRESSURE not in entry.note,
        mean=0.025,
    ),
    _Group(test="BPipe, all runs of GPT-3 96B, under pressure or not", has=_is_of("BPipe", "96B"), mean=0.05),
    _Group(
        test="Korthikanti et al., 22B and 175B",
        has=lambda entry: _is_of("Korthikanti")(entry) and entry.model_name in ("22B", "175B"),
        mean=0.04,
        worst=0.07,
    ),
    _Group(
        test="vTrain, several nodes",
        has=lambda entry: _is_of("vTrain")(entry) and len(entry.cluster.topology.nodes) > 1,
        mean=0.09,
    ),
    _Group(test="without a pipeline: torchtitan's FSDP", has=lambda entry: _is_sharded(entry, "torchtitan")),
    _Group(test="without a pipeline: DeepSpeed's ZeRO-3", has=lambda entry: _is_sharded(entry, "ZeRO-3")),
)
_CHOICE_BARS = {"BPipe (ICML 2023) Table 7": 0.01}
_MOST_WRONG = 0
_MOST_IMPLIED_WRONG = 0.02  # of those that are implied


def validate(
    rows: Sequence[RowError],
    judged: Sequence[Judged],
    tables: Sequence[TableChoice],
    ranked: Sequence[Entry],
    throughput: Callable[[Entry], float],
) -> list[ValidationOutcome]:
    """All lines of the table.

    Args:
        rows: errors of runs.
        judged: facts about memory.
        tables: the choices in tables of runs.
        ranked: entries of tables that print a throughput and which configuration their planner chose.
        throughput: predicted sequences per second of such an entry.
    """
    found = [_error(group.test, rows, group) for group in _GROUPS if any(group.has(row.entry) for row in rows)]
    others = [row for row in rows if not any(group.has(row.entry) for group in _GROUPS)]
    for title in dict.fromkeys(_title(row.entry) for row in others):
        found.append(_error(title, others, _Group(test=title, has=lambda entry, title=title: _title(entry) == title)))
    pressed = [row for row in rows if PRESSURE in row.entry.note]
    if pressed:
        found.append(_flags(rows, pressed))
    found += _peaks(rows)
    found += [_choice(each) for each in tables]
    found += _facts(judged)
    found += _ranks(ranked, throughput)
    return found


def _title(entry: Entry) -> str:
    return f"{entry.source}: {entry.model_name}" if entry.model_name and "Table" in entry.source else entry.source


def _error(test: str, rows: Sequence[RowError], group: _Group) -> ValidationOutcome:
    chosen = [row for row in rows if group.has(row.entry)]
    errors = [abs(error) for row in chosen for error in row.prediction.published_errors.values()]
    of_time = [abs(error) for row in chosen for error in row.errors.values()]
    left_out = sum(row.left_out for row in chosen)
    unflagged = [row for row in chosen if not row.prediction.estimate.under_pressure]
    calm = [abs(error) for row in unflagged for error in row.prediction.published_errors.values()]
    numbers = {
        "num_runs": len(chosen), "num_left_out": left_out, "mean_error": _mean(errors), "max_error": max(errors),
        "mean_time_error": _mean(of_time), "num_flagged": len(chosen) - len(unflagged),
        "mean_error_unflagged": _mean(calm),
    }  # fmt: skip
    how = "left out" if left_out == len(chosen) else "no refit" if not left_out else f"{left_out} left out"
    text = f"mean {_percent(numbers['mean_error'])}, max {_percent(numbers['max_error'])} of {len(chosen)} ({how})"
    if any(row.entry.published_mfu for row in chosen):
        text = f"MFU {text}; times {_percent(numbers['mean_time_error'])}"
    if 0 < len(unflagged) < len(chosen):
        text += f"; {_percent(numbers['mean_error_unflagged'])} of the {len(unflagged)} that are not flagged"
    limits = [
        (kind, limit, numbers[f"{kind}_error"]) for kind, limit in (("mean", group.mean), ("max", group.worst)) if limit
    ]
    return ValidationOutcome(
        test=test,
        bar=", ".join(f"{kind} <= {_percent(limit)}" for kind, limit, _ in limits),
        found=text,
        reached=all(value <= limit for _, limit, value in limits) if limits else None,
        numbers=numbers,
    )


def _flags(rows: Sequence[RowError], pressed: Sequence[RowError]) -> ValidationOutcome:
    flagged = sum(row.prediction.estimate.under_pressure for row in pressed)
    calm = [row for row in rows if row.left_out and PRESSURE not in row.entry.note]
    false = sum(row.prediction.estimate.under_pressure for row in calm)
    return ValidationOutcome(
        test="runs noted as slowed by the allocator are flagged",
        found=f"{flagged} of {len(pressed)}; of the {len(calm)} others that were fitted {false}",
        numbers={"num_pressed": len(pressed), "num_flagged": flagged, "num_calm": len(calm), "num_false": false},
    )


def _peaks(rows: Sequence[RowError]) -> Iterable[ValidationOutcome]:
    """The errors of the most memory that runs printed, with the CUDA context and the losses of the allocator."""
    found = {row.entry.id: row.prediction.peak_error for row in rows if row.entry.peak_gib is not None}
    if found:
        errors = [abs(error) for error in found.values()]
        yield ValidationOutcome(
            test="most memory of a GPU, where it was printed",
            found=f"mean {_percent(_mean(errors))}, max {_percent(max(errors))} of {len(errors)}",
            numbers={"num_runs": len(errors), "mean_error": _mean(errors), "max_error": max(errors), **found},
        )


def _choice(choice: TableChoice) -> ValidationOutcome:
    bar = next((limit for source, limit in _CHOICE_BARS.items() if source in choice.source), None)
    best = "the best" if choice.chosen == choice.best else f"{choice.chosen}, {_percent(choice.regret)} slower"
    return ValidationOutcome(
        test=f"choice in {choice.title}",
        bar=f"<= {_percent(bar)} slower in the top {TOP}" if bar else "",
        found=f"{best}; {_percent(choice.regret_of_top)} slower in the top {TOP} of {choice.num_runs}",
        reached=choice.regret_of_top <= bar if bar else None,
        numbers={"regret": choice.regret, "regret_of_top": choice.regret_of_top, "num_runs": choice.num_runs},
    )


def _facts(judged: Sequence[Judged]) -> Iterable[ValidationOutcome]:
    for model, strength in dict.fromkeys((each.fact.model, each.fact.strength) for each in judged):
        facts = [each for each in judged if (each.fact.model, each.fact.strength) == (model, strength)]
        wrong = [each for each in facts if not each.is_right]
        stated = strength == "stated"
        text = f"{len(wrong)} wrong of {len(facts)}"
        if wrong:
            worst = max(wrong, key=lambda each: abs(each.verdict.spare_gib))
            text += f"; the farthest: {worst.fact}, by {abs(worst.verdict.spare_gib):.1f} GiB"
        yield ValidationOutcome(
            test=f"memory of {model}, {strength}",
            bar=f"<= {_MOST_WRONG} wrong" if stated else f"<= {_percent(_MOST_IMPLIED_WRONG)} wrong",
            found=text,
            reached=len(wrong) <= (_MOST_WRONG if stated else _MOST_IMPLIED_WRONG * len(facts)),
            numbers={"num_facts": len(facts), "num_wrong": len(wrong)},
        )


def _ranks(ranked: Sequence[Entry], throughput: Callable[[Entry], float]) -> Iterable[ValidationOutcome]:
    tables: dict[tuple[str, str, str, int], list[Entry]] = {}
    for entry in ranked:
        key = (entry.source, entry.model_name, entry.cluster.gpu, entry.configuration.num_gpus)
        tables.setdefault(key, []).append(entry)
    for (source, model, gpu, num_gpus), entries in tables.items():
        if len(entries) < 2:
            continue
        first = max(entries, key=throughput)
        yield ValidationOutcome(
            test=f"{source}: {model} on {num_gpus} {gpu}",
            bar="the paper's choice comes first",
            found=f"{first.id} comes first" + ("" if first.chosen else ", which the paper did not choose"),
            reached=bool(first.chosen),
            numbers={each.id: throughput(each) for each in entries},
        )


def interval_coverage(runs: Sequence[Residual]) -> list[ValidationOutcome]:
    """The number of runs that lie in the interval of the other runs, and in the interval of runs of other sources."""
    outcomes = []
    for how, found in (("each run", without_run(runs)), ("each source", without_source(runs))):
        if found.num_runs:
            outcomes.append(
                ValidationOutcome(
                    test=f"intervals of {LEVEL:.0%}, {how} left out",
                    found=f"{found.num_inside} of {found.num_runs} inside ({found.share:.0%})"
                    + (f"; {found.num_without} of too few runs" if found.num_without else ""),
                    numbers={"num_runs": found.num_runs, "num_inside": found.num_inside, "share": found.share},
                )
            )
    return outcomes


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _percent(value: float) -> str:
    return f"{100 * value:.1f}%"
