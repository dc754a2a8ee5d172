"""The pictures of docs/scaling.md, from the data of `scaling.py`; each has one message, which is its title."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks import scaling_study as study
from megatron.documents.picture import new_figure, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLOURS = {
    "flush": "#3873b8", "gpipe": "#7f7f7f", "interleaved": "#e58a00", "interleaved+balance": "#a85f00",
    "bpipe": "#8457ae", "2bw": "#3d9140", "2bw+balance": "#1f5c22",
}  # fmt: skip
_PARTS = {
    "compute": "#5b94d3", "step": "#c8102e", "fill and drain": "#cfcfcf", "reductions": "#e58a00",
    "transfers": "#555555", "moves": "#8457ae",
}  # fmt: skip
_MEMORY = {
    "weights": "#7c97c4", "gradients": "#8dbb86", "optimizer": "#b9b9b9", "activations": "#f2b66d",
    "workspace": "#d7c9a6", "transfers": "#c65b52",
}  # fmt: skip
_CAPACITY, _HIGHEST = 79.25, 118  # GiB: the GPU's memory, and the top of the picture


def draw_all(data: dict, folder: Path) -> None:
    for name, draw in (("lost", _lost), ("flush", _flush), ("memory", _memory), ("traffic", _traffic), ("best", _best)):
        figure = draw(data)
        save(figure, folder / f"scaling_{name}.png", dpi=110)


def _figure(width: float, height: float, columns: int, title: str, rows: int = 1) -> "tuple[Figure, list[Axes]]":
    figure = new_figure(width, height, layout="constrained")
    figure.suptitle(title, fontsize=11)
    panels = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axes in panels:
        axes.tick_params(labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    return figure, panels


def _models(panels: "list[Axes]") -> "Iterator[tuple[study.Model, Axes]]":
    for model, axes in zip(study.MODELS, panels, strict=True):
        axes.set_title(f"GPT {model.name}: t={model.tensor}, p={model.pipeline}", fontsize=9, loc="left")
        yield model, axes


def _gpus(axes: "Axes", counts: Sequence[int]) -> None:
    """Make the x axis logarithmic, with as many of the numbers `counts` below it as are legible."""
    ticks = []
    for count in reversed(counts):
        if not ticks or count * 1.6 < ticks[-1]:
            ticks.append(count)
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [f"{each:,}" for each in ticks], rotation=45, fontsize=7.5)
    axes.minorticks_off()
    axes.set_xlabel("GPUs", fontsize=8.5)


def _lost(data: dict) -> "Figure":
    title = "A fixed batch over more replicas: flushes lose ever more of an iteration, 2bw does not"
    figure, panels = _figure(11, 3.4, 4, title)
    for model, axes in _models(panels):
        of = study.rows_of(data, model.name)
        for schedule in ("flush", "interleaved", "2bw"):
            found = [row for row in of.values() if row["schedule"] == schedule and "refused" not in row]
            name = f"interleaved, v={model.virtual}" if schedule == "interleaved" else schedule
            style = {"color": _COLOURS[schedule], "marker": "o", "markersize": 3.5, "linewidth": 1.6, "label": name}
            axes.plot([row["gpus"] for row in found], [100 * study.lost(row) for row in found], **style)
        _gpus(axes, [model.gpus(each) for each in model.data])
        axes.set_ylim(0, 60)
        axes.legend(fontsize=7.5, frameon=False, loc="upper left")
    panels[0].set_ylabel("% of an iteration in which the\nbusiest rank computes nothing", fontsize=8.5)
    return figure


def _flush(data: dict) -> "Figure":
    figure, panels = _figure(11, 3.6, 4, "What a flush costs: filling and draining, and reductions that nothing hides")
    names = ("flush", "interleaved", "2bw")
    for model, axes in _models(panels):
        of = study.rows_of(data, model.name)
        common = [each for each in model.data if all("parts" in of.get((each, name), {}) for name in names)]
        chosen = [common[0], common[len(common) // 2], common[-1]]
        places, labels = [], []
        for group, replicas in enumerate(chosen):
            for offset, name in enumerate(names):
                row, place, foot = of[replicas, name], group * 4 + offset, 0.0
                whole = of[replicas, "flush"]["seconds"]
                for part, colour in _PARTS.items():
                    height = 100 * row["parts"][part] / whole
                    axes.bar(place, height, 0.85, bottom=foot, color=colour, label=part if not places else None)
                    foot += height
                places.append(place)
                labels.append(name)
            axes.text(group * 4 + 1, 103, f"{model.gpus(replicas):,} GPUs", ha="center", fontsize=7.5)
        axes.set_xticks(places, labels, rotation=90, fontsize=7)
        axes.set_ylim(0, 112)
    panels[0].set_ylabel("% of flush's iteration", fontsize=8.5)
    handles, labels = panels[0].get_legend_handles_labels()
    used = [(handle, label) for handle, label in zip(handles, labels, strict=True) if label != "moves"]
    figure.legend(*zip(*used, strict=True), loc="outside lower center", ncols=6, fontsize=8, frameon=False)
    return figure


def _memory(data: dict) -> "Figure":
    title = "The fullest GPU: 2bw pays with weights and gradients, 1F1B's first stage with activations"
    figure, panels = _figure(11, 3.8, 4, title)
    for model, axes in _models(panels):
        rows = {row["schedule"]: row for row in data["memory"] if row["model"] == model.name}
        for place, schedule in enumerate(study.REMEMBERED):
            row, foot = rows[schedule], 0.0
            if "refused" in row:
                axes.text(place, 2, "refused", rotation=90, ha="center", va="bottom", fontsize=7)
                continue
            for part, colour in _MEMORY.items():
                axes.bar(place, row["parts"][part], 0.8, bottom=foot, color=colour, label=part if not place else None)
                foot += row["parts"][part]
            if foot > _HIGHEST:
                axes.text(place, _HIGHEST - 2, f"{foot:.0f}", ha="center", va="top", fontsize=7)
        axes.axhline(_CAPACITY, color="#c8102e", linewidth=1, linestyle="--")
        axes.set_xticks(range(len(study.REMEMBERED)), study.REMEMBERED, rotation=90, fontsize=7.5)
        axes.set_ylim(0, _HIGHEST)
        axes.set_xlabel(f"{rows['flush']['gpus']:,} GPUs", fontsize=8.5)
    panels[0].set_ylabel("GiB; dashed: an A100-80", fontsize=8.5)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=6, fontsize=8, frameon=False)
    return figure


def _traffic(data: dict) -> "Figure":
    title = "With more replicas a GPU sends less for its microbatches, and as much as ever for its gradients"
    figure, panels = _figure(11, 3.4, 4, title)
    lines = (
        ("flush", "tensor", "#3873b8", "tensor ranks"),
        ("flush", "pipeline", "#98d08c", "stages, flush"),
        ("interleaved", "pipeline", "#e58a00", "stages, interleaved"),
        ("bpipe", "moves", "#8457ae", "moves, bpipe"),
        ("flush", "replicas", "#c8102e", "replicas"),
    )
    for model, axes in _models(panels):
        of = study.rows_of(data, model.name)
        for schedule, kind, colour, label in lines:
            found = [row for row in of.values() if row["schedule"] == schedule and row.get("sent_gb", {}).get(kind)]
            points = [row["gpus"] for row in found], [row["sent_gb"][kind] for row in found]
            axes.plot(*points, color=colour, marker="o", markersize=3, linewidth=1.5, label=label)
        _gpus(axes, [model.gpus(each) for each in model.data])
        axes.set_yscale("log")
    panels[0].set_ylabel("GB that a GPU sends in an iteration", fontsize=8.5)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5, fontsize=8, frameon=False)
    return figure


def _best(data: dict) -> "Figure":
    title = "The best t, p, v, microbatch and recompute scope of each schedule: where 2bw, interleaved and bpipe win"
    figure, panels = _figure(11, 3.4, 4, title)
    for model, axes in zip(study.MODELS, panels, strict=True):
        axes.set_title(f"GPT {model.name}", fontsize=9, loc="left")
        axes.set_ylim(15, 65)
        for schedule in study.SEARCHED:
            found = [row for row in data["best"] if (row["model"], row["schedule"]) == (model.name, schedule)]
            style = {"color": _COLOURS[schedule], "marker": "o", "markersize": 3.5, "linewidth": 1.5, "label": schedule}
            dashes = "--" if "balance" in schedule or schedule == "bpipe" else "-"
            axes.plot([row["gpus"] for row in found], [100 * row["mfu"] for row in found], linestyle=dashes, **style)
        _gpus(axes, model.searched)
    panels[0].set_ylabel("MFU, %", fontsize=8.5)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=6, fontsize=8, frameon=False)
    return figure
