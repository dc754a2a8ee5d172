"""PipeTransformer's Figures 10 to 12 as rows, by simulation, and the effect of each assumption."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median, median_low

from megatron.elastic.pipelines import PipelineOption
from papers.pipetransformer.elastic_plan import ARMS, STATIC, Arm, Phase, Setting, depths, plan, seconds_of_arm

ALPHAS = (1 / 6, 1 / 5, 1 / 4, 1 / 3, 1 / 2, 2 / 3)
SHOWN = ("freeze only", "freeze + AutoPipe + AutoDP", "all")
MOST_CHUNKS = 6
"""The most microbatches for each rank; the paper searches from p to 6p."""


def speed_ups(setting: Setting, arms: Sequence[Arm] = ARMS) -> dict[str, float | None]:
    """The speed-ups of arms over the static arm; None if no pipeline fits for a stretch of the arm."""
    static = seconds_of_arm(plan(STATIC, setting), setting)
    found: dict[str, float | None] = {}
    for arm in arms:
        try:
            found[arm.name] = static / seconds_of_arm(plan(arm, setting), setting)
        except ValueError:
            found[arm.name] = None
    return found


def by_alpha(setting: Setting, own: float) -> list[dict]:
    """The rows of Figure 10, for the paper's values of alpha and for the setting's own alpha."""
    rows = []
    for alpha in sorted({*ALPHAS, own}):
        frozen = depths(len(setting.layers.forward), alpha, len(setting.depths))
        rows.append({"alpha": alpha, "depths": list(frozen), **speed_ups(replace(setting, depths=frozen))})
    return rows


def by_static_cut(setting: Setting) -> list[dict]:
    """The speed-ups of all arms under two limits of memory: that of the static pipeline's own cut, and that of the
    equally even cut that needs least memory.
    """
    least = replace(setting, limit=least_static(setting))
    return [
        {"cut": list(each.static().layers_of_rank), "limit": each.limit, **speed_ups(each)} for each in (setting, least)
    ]


def by_cache_from(setting: Setting) -> list[dict]:
    """The rows of Figure 12, with the cache always on from each number of frozen layers on.

    Each row also has the seconds of a batch on the fastest pipeline at that number of frozen layers: without a cache
    (`computed`), in a first epoch with an empty cache (`written`), and from the cache (`read`).
    """
    arms = [each for each in ARMS if each.caches]
    rows = []
    for count in range(len(setting.layers.forward)):
        row = {"cache_from": count, **speed_ups(replace(setting, cache_from=count, is_forced=True), arms)}
        for name, num_stored in (("computed", None), ("written", 0), ("read", count)):
            row[name] = _fastest_at(setting, count, num_stored) if count or num_stored is None else None
        rows.append(row)
    never = speed_ups(replace(setting, cache_from=len(setting.layers.forward)), arms)
    return [*rows, {"cache_from": None, **never, "computed": None, "written": None, "read": None}]


def _fastest_at(setting: Setting, num_frozen: int, num_stored: int | None) -> float | None:
    """The seconds of a batch on the fastest pipeline that fits; None if none fits."""
    least = {each: setting.at_least(each, num_frozen, num_stored) for each in setting.shapes(replicates=True)}
    found = math.inf
    for shape in sorted(least, key=least.__getitem__):
        pipeline = setting.of_shape(shape, num_frozen, num_stored) if least[shape] < found else None
        if pipeline is not None and setting.fits(pipeline):
            found = min(found, pipeline.seconds)
    return None if found == math.inf else found


@dataclass(frozen=True)
class Chunks:
    """The seconds of a batch on a pipeline of `num_ranks` ranks, by number of microbatches, and the best phase."""

    num_ranks: int
    seconds: dict[int, float]
    phase: Phase

    @property
    def best(self) -> int:
        return self.phase.pipeline.num_microbatches


def best_microbatches(setting: Setting, overhead: float) -> list[Chunks]:
    """The results of Figure 11: one pipeline and one batch, without frozen layers.

    `overhead`: the part of a layer's time, at the setting's number of microbatches, that does not shrink with smaller
    microbatches.
    """
    found = []
    for num_ranks in range(setting.num_stages, 0, -1):
        if setting.num_stages % num_ranks:
            continue
        tried: dict[int, tuple[Setting, PipelineOption]] = {}
        for count in range(num_ranks, MOST_CHUNKS * num_ranks + 1):
            share = overhead + (1 - overhead) * setting.num_microbatches / count
            layers = replace(
                setting.layers, forward=tuple(share * each for each in setting.layers.forward),
                backward=tuple(share * each for each in setting.layers.backward),
                occupation=setting.layers.occupation * setting.num_microbatches / count,
            )  # fmt: skip
            other = replace(setting, layers=layers, num_microbatches=count, limit=math.inf)
            pipeline = other.of_shape((num_ranks, 1), 0)
            if pipeline is not None:
                tried[count] = other, pipeline
        seconds = {count: pipeline.seconds for count, (_, pipeline) in tried.items()}
        other, pipeline = tried[min(seconds, key=seconds.__getitem__)]
        found.append(Chunks(num_ranks, seconds, Phase(other.layers, pipeline, 0, 1, transition=setting.rebuild)))
    return found


def assumptions(setting: Setting) -> list[dict]:
    """The rows of the arms' speed-ups, each under one other assumption."""
    layers = setting.layers
    rows = []
    for name, other, anew in (
        ("as told", setting, False),
        ("what is cached stays on the device", replace(setting, on_host=False), False),
        ("parameters alone count", replace(setting, layers=replace(layers, saved_bytes=0.0)), True),
        ("the same, and what is cached stays on the device",
         replace(setting, on_host=False, layers=replace(layers, saved_bytes=0.0)), True),
        ("four times the seconds of a read", replace(setting, layers=replace(layers, read=4 * (layers.read or 0.0))),
         False),
        ("memory without end", replace(setting, limit=math.inf), False),
        ("2 epochs an interval", replace(setting, epochs=2), False),
        ("5 epochs an interval", replace(setting, epochs=5), False),
        ("20 batches an interval", replace(setting, batches=20), False),
        ("3,200 batches an interval", replace(setting, batches=3200), False),
        ("transitions take no time", replace(setting, rebuild=0.0, move=0.0, move_layer=0.0), False),
        ("reads and writes take no time", replace(setting, layers=replace(layers, read=0.0, write=0.0)), False),
        ("reductions take no time", replace(setting, layers=replace(layers, reduce=0.0)), False),
    ):  # fmt: skip
        if anew:
            other = replace(other, limit=math.inf)
            other = replace(other, limit=other.static().num_bytes)
        rows.append({"assumption": name, "limit": other.limit, **speed_ups(other)})
    return rows


def least_static(setting: Setting) -> float:
    """The least memory of a rank over all cuts whose busiest rank has the least work."""
    now = replace(setting, limit=math.inf)
    limit, work = math.inf, None
    while True:
        found = now.static()
        most = _busiest(setting, found)
        if found.num_bytes >= limit or (work is not None and most > work * (1 + 1e-9)):
            return limit
        limit, work = found.num_bytes, most
        now = replace(setting, limit=limit * (1 - 1e-6))


def _busiest(setting: Setting, pipeline: PipelineOption) -> float:
    layers, begin, most = setting.layers, 0, 0.0
    for count in pipeline.layers_of_rank:
        end = begin + count
        most = max(most, sum(layers.forward[begin:end]) + sum(layers.backward[begin:end]))
        begin = end
    return most


def median_of_runs(runs: Sequence[Sequence[float]]) -> float:
    """The lower median of the runs' medians, so that a single late run does not decide."""
    return median_low(median(each) for each in runs)


def rows_of(
    setting: Setting, alpha: float, lengths: Sequence[Chunks], runs: list[list[dict]] | None
) -> dict[str, list[dict]]:
    """The rows of all figures. `runs`: measurements for Figure 11, or None."""
    figure_11 = []
    for place, each in enumerate(lengths):
        row = {"p": each.num_ranks, "best": each.best, "seconds": {str(m): s for m, s in each.seconds.items()}}
        if runs:
            row["measured"] = median_of_runs([run[place]["batches"] for run in runs])
        figure_11.append(row)
    return {
        "static_cuts": by_static_cut(setting), "figure_10": by_alpha(setting, alpha), "figure_11": figure_11,
        "figure_12": by_cache_from(setting), "assumptions": assumptions(setting),
    }  # fmt: skip
