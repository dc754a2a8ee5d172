"""The output of `elastic.py`: the given values, the predictions, and the measurements beside them."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median, median_low

from benchmarks.common.tables import show_table, terminal
from megatron.documents.picture import new_figure, save
from megatron.elastic.pipelines import schedule_of, work_of_stages
from megatron.pipeline.simulate import simulate
from papers.pipetransformer.elastic_figures import SHOWN, median_of_runs
from papers.pipetransformer.elastic_plan import ARMS, STATIC, Phase, Setting, seconds_of, seconds_of_arm

_COLOURS = {"predicted": "#3873b8", "measured": "#c8102e", "p": "#8457ae", "d": "#3d9140", "frozen": "#e58a00"}
_SAMPLES = 400
"""The number of samples in a batch, as in the paper."""


def draw(rows: Sequence[dict], phases: Sequence[Phase], setting: Setting, path: Path) -> None:
    """Draw the phases of an arm over time. `rows`: the phases' rows. Times are measured, or else predicted."""
    begin, spans = 0.0, []
    for row, phase in zip(rows, phases, strict=True):
        transition = row.get("measured_transition", phase.transition)
        seconds = row.get("measured_seconds", seconds_of(phase, setting))
        spans.append((begin, begin + transition, begin + seconds))
        begin += seconds
    figure = new_figure(9, 5, layout="constrained")
    measured = "measured_batch" in rows[0]
    figure.suptitle("Layers freeze, the pipeline shrinks, replicas are added", fontsize=11)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(2, 3))
    for axes in (above, below):
        axes.tick_params(labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
        for start, end, _ in spans:
            axes.axvspan(start, end, color="#d9d9d9", linewidth=0)
    for name, label in (("p", "pipeline ranks p"), ("d", "replicas d"), ("frozen", "frozen layers")):
        _steps(above, spans, [row[name] for row in rows], color=_COLOURS[name], linewidth=1.6, label=label)
    above.set_ylabel("number", fontsize=8.5)
    above.legend(fontsize=7.5, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    _steps(below, spans, [_SAMPLES / row["batch"] for row in rows], color=_COLOURS["predicted"], linewidth=2.2,
           label="predicted")  # fmt: skip
    if measured:
        _steps(below, spans, [_SAMPLES / row["measured_batch"] for row in rows], color=_COLOURS["measured"],
               linewidth=1.0, linestyle="--", label="measured")  # fmt: skip
    below.set_ylim(bottom=0)
    below.set_ylabel(f"samples/s, batches of {_SAMPLES}", fontsize=8.5)
    below.set_xlabel(f"seconds, intervals of {setting.batches} batches; transitions are grey", fontsize=8.5)
    below.legend(fontsize=7.5, frameon=False, loc="upper left")
    save(figure, path, dpi=110)


def _steps(axes, spans: Sequence[tuple[float, float, float]], values: Sequence[float], **style) -> None:
    """Draw a level for each phase, with gaps at transitions."""
    xs, ys = [], []
    for (_, begin, end), value in zip(spans, values, strict=True):
        xs += [begin, end, end]
        ys += [value, value, float("nan")]
    axes.plot(xs, ys, **style)


Runs = dict[str, list[list[dict]]]


def rows_of(phases: dict[str, tuple[Phase, ...]], setting: Setting, runs: Runs) -> list[dict]:
    """A row for each arm, with the rows of its phases: seconds of all batches of all intervals, with transitions."""
    static = seconds_of_arm(phases[STATIC.name], setting)
    rows = []
    for arm in ARMS:
        own = phases[arm.name]
        row = {
            "arm": arm.name, "paper": arm.paper, "predicted": seconds_of_arm(own, setting),
            "predicted_speed_up": static / seconds_of_arm(own, setting),
            "phases": [_phase_row(each, setting, [run[place] for run in runs.get(arm.name, [])])
                       for place, each in enumerate(own)],
        }  # fmt: skip
        if runs:
            row["measured"] = sum(each["measured_seconds"] for each in row["phases"])
            row["error"] = row["predicted"] / row["measured"] - 1
            row["measured_speed_up"] = rows[0]["measured"] / row["measured"] if rows else 1.0
        rows.append(row)
    return rows


def _phase_row(phase: Phase, setting: Setting, runs: Sequence[dict]) -> dict:
    pipeline = phase.pipeline
    row = {
        "interval": phase.interval, "intervals": phase.intervals, "frozen": pipeline.num_frozen,
        "cache": _cache(phase), "p": pipeline.num_ranks, "d": pipeline.num_replicas, "m": pipeline.num_microbatches,
        "layers_of_rank": list(pipeline.layers_of_rank), "bytes": pipeline.num_bytes, "batch": pipeline.seconds,
        "transition": phase.transition, "busiest": _busiest(phase),
    }  # fmt: skip
    if runs:
        batch = median_of_runs([run["batches"] for run in runs])
        taken = [run["transition"] for run in runs if run["transition"] is not None]
        transition = median_low(taken) if taken else 0.0
        schedule, costs = schedule_of(phase.layers, pipeline)
        whole = simulate(schedule.build((pipeline.num_microbatches,) * (len(runs[0]["batches"]) + 1)), costs).makespan
        run_seconds = median_low(run["run"] for run in runs)
        row |= {
            "measured_batch": batch, "measured_transition": transition,
            "busy": median(run["busy"] for run in runs),
            "measured_seconds": seconds_of(phase, setting, batch, transition), "error": pipeline.seconds / batch - 1,
            "measured_run": run_seconds, "run_error": whole / run_seconds - 1,
            "every_batch": [run["batches"] for run in runs],
        }  # fmt: skip
    return row


def _busiest(phase: Phase) -> float:
    """The seconds of a microbatch on the busiest rank."""
    of_rank: dict[int, float] = {}
    for stage in work_of_stages(phase.layers, phase.pipeline):
        of_rank[stage.rank] = of_rank.get(stage.rank, 0.0) + stage.forward + stage.backward
    return max(of_rank.values())


def _cache(phase: Phase) -> str:
    pipeline = phase.pipeline
    if not pipeline.cached:
        return ""
    if pipeline.num_stored == pipeline.num_frozen:
        return "read"
    new = pipeline.num_frozen - pipeline.num_stored
    return f"{'read, ' if pipeline.num_stored else ''}compute {new}, write"


# --- tables


def _table(title: str, rows: Sequence[dict], columns: dict[str, Callable[[dict], str]]) -> None:
    show_table(title, columns, rows, left=("", "cache", "layers"), width=160)


def _spaced(numbers: Sequence[int]) -> str:
    return " ".join(map(str, numbers))


def _speed_up(name: str) -> Callable[[dict], str]:
    return lambda row: "fits nowhere" if row[name] is None else f"{row[name]:.2f}"


def show_setting(setting: Setting, args: argparse.Namespace) -> None:
    """Print the assumptions."""
    layers, static = setting.layers, setting.static()
    times = sorted(set(layers.forward))
    forward = f"{1e3 * times[0]:g}" if len(times) == 1 else f"{1e3 * times[0]:g} to {1e3 * times[-1]:g}"
    move_layer = f", and at least {setting.move_layer:.3g} for each that a rank gets" if setting.move_layer else ""
    is_told = "is told" if args.limit else f"is what the static pipeline takes ({_spaced(static.layers_of_rank)})"
    weights = "on the host" if setting.on_host else "on the device"
    lines = (
        f"{len(layers.forward)} layers, a forward {forward} ms, a backward {args.backward:g} times that; "
        f"{setting.num_stages} ranks, {setting.num_microbatches} microbatches a batch, {setting.preset}",
        f"frozen layers by interval (alpha {args.alpha:.3g}): {_spaced(setting.depths)}; an interval is "
        f"{setting.batches} batches, {setting.epochs} epoch(s) of the data",
        f"told, ms: read {1e3 * layers.read:.2f} and write {1e3 * layers.write:.2f} a microbatch, with nothing of it "
        f"hidden; reduce {1e3 * layers.reduce:.2f} a layer; a transfer {1e3 * layers.occupation:.4g}; told, s: move "
        f"{setting.move:g} where layers change ranks{move_layer}",
        f"measured before, ms: latency {1e3 * layers.latency:.2f}, norm {1e3 * layers.norm:.2f}, the least "
        f"reduction {1e3 * layers.reduce_latency:.2f}, the engine around a computation {1e3 * layers.around:.2f}; s: a "
        f"transition in which nothing moves {setting.rebuild:.2f}",
        f"memory: a trained layer is 1, its activations of a microbatch {layers.saved_bytes:g}, a frozen layer "
        f"{layers.frozen_bytes:.3g}; the limit {setting.limit:.2f} {is_told}; "
        f"weights of what is cached are {weights}",
    )
    for line in lines:
        terminal(160).print(line, highlight=False)


def show_predicted(phases: dict[str, tuple[Phase, ...]], setting: Setting) -> None:
    for arm in ARMS:
        total = seconds_of_arm(phases[arm.name], setting)
        speed_up = seconds_of_arm(phases[STATIC.name], setting) / total
        terminal(160).print(f"predicted: {arm.name} {total:,.1f} s, {speed_up:.2f}", highlight=False)


def show(rows: list[dict], figures: dict[str, list[dict]]) -> None:
    measured = "measured" in rows[0]
    paper = lambda row: "" if row["paper"] is None else f"{row['paper']:.2f}"  # noqa: E731
    columns = {
        "": lambda row: row["arm"], "seconds, simulated": lambda row: f"{row['predicted']:,.1f}",
        "speed-up": lambda row: f"{row['predicted_speed_up']:.2f}",
    }  # fmt: skip
    if measured:
        columns |= {
            "measured": lambda row: f"{row['measured']:,.1f}", "error %": lambda row: f"{100 * row['error']:+.2f}",
            "speed-up, measured": lambda row: f"{row['measured_speed_up']:.2f}",
            "transitions, s": lambda row: f"{sum(each['measured_transition'] for each in row['phases']):.1f}",
        }  # fmt: skip
    _table("all intervals, over the static pipeline", rows, columns | {"paper": paper})
    _table("speed-ups under the limit that the static pipeline sets as it is cut, and as the even cut does that takes "
           "least", figures["static_cuts"],
           {"cut": lambda row: _spaced(row["cut"]), "limit": lambda row: f"{row['limit']:.2f}"}
           | {arm.name: _speed_up(arm.name) for arm in ARMS})  # fmt: skip
    _show_phases(rows, measured)
    _show_figures(figures)


def _show_phases(rows: list[dict], measured: bool) -> None:
    columns = {
        "interval": lambda row: str(row["interval"]),
        "for": lambda row: f"{row['intervals']:g}", "frozen": lambda row: str(row["frozen"]),
        "cache": lambda row: row["cache"], "p": lambda row: str(row["p"]), "d": lambda row: str(row["d"]),
        "m": lambda row: str(row["m"]), "layers": lambda row: _spaced(row["layers_of_rank"]),
        "memory": lambda row: f"{row['bytes']:.2f}", "batch ms": lambda row: f"{1e3 * row['batch']:.1f}",
    }  # fmt: skip
    if measured:
        columns |= {
            "measured": lambda row: f"{1e3 * row['measured_batch']:.1f}",
            "error %": lambda row: f"{100 * row['error']:+.1f}",
            "drained, error %": lambda row: f"{100 * row['run_error']:+.1f}",
            "transition s": lambda row: f"{row['transition']:.1f}" if row["transition"] else "",
            "took": lambda row: f"{row['measured_transition']:.1f}" if row["transition"] else "",
            "busy %": lambda row: f"{100 * row['busy']:.0f}",
        }  # fmt: skip
    for row in rows:
        _table(row["arm"], row["phases"], columns)


def _show_figures(figures: dict[str, list[dict]]) -> None:
    def milliseconds(name: str) -> Callable[[dict], str]:
        return lambda row: "" if row.get(name) is None else f"{1e3 * row[name]:.1f}"

    arms = {name: _speed_up(name) for name in SHOWN}
    _table("figure 10: speed-ups by alpha", figures["figure_10"],
           {"alpha": lambda row: f"{row['alpha']:.3f}",
            "frozen layers by interval": lambda row: _spaced(row["depths"]), **arms})  # fmt: skip
    lengths = figures["figure_11"]
    _table(
        "figure 11: microbatches of one pipeline's batch, by its ranks; nothing frozen, p to 6p tried", lengths,
        {
            "p": lambda row: str(row["p"]), "best m": lambda row: str(row["best"]),
            "ms": lambda row: f"{1e3 * row['seconds'][str(row['best'])]:.1f}",
            "measured": milliseconds("measured"),
            "m = p, ms": lambda row: f"{1e3 * next(iter(row['seconds'].values())):.1f}",
            "m = 6p, ms": lambda row: f"{1e3 * list(row['seconds'].values())[-1]:.1f}",
        },
    )  # fmt: skip
    _table(
        "figure 12: speed-ups with the cache forced, on from so many frozen layers whether it pays or not; and ms of a "
        "batch at so many",
        figures["figure_12"],
        {
            "frozen": lambda row: "never" if row["cache_from"] is None else str(row["cache_from"]),
            "AutoPipe + AutoCache": _speed_up("freeze + AutoPipe + AutoCache"), "all": _speed_up("all"),
            "computed": milliseconds("computed"), "first epoch": milliseconds("written"), "read": milliseconds("read"),
        },
    )  # fmt: skip
    _table("what an assumption is worth: speed-ups under another one", figures["assumptions"],
           {"": lambda row: row["assumption"], "limit": lambda row: f"{row['limit']:.2f}", **arms})  # fmt: skip
