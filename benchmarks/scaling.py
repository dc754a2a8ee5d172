"""Schedules on 8 to 16,384 GPUs, by simulation: the data, tables and pictures of docs/scaling.md.

    python benchmarks/scaling.py                 # compute, and print the tables: minutes of one core
    python benchmarks/scaling.py --write         # and write docs/scaling.json, the pictures, and the page's tables
    python benchmarks/scaling.py --from docs/scaling.json --write   # only draw and write again

Nothing is measured. Every number follows from the programs, the cost model that was calibrated on A100s
(`megatron/planner/time`) and the memory model; the page lists the effects that the models leave out.
"""

import json
import re
import sys
from collections.abc import Sequence
from itertools import groupby
from math import floor, log10
from pathlib import Path
from textwrap import fill

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import scaling_study as study
from benchmarks.common.results import parser_of

SHOWN = {
    "13B": (1, 8, 32, 128, 256),
    "175B": (1, 8, 32, 96, 192, 256),
    "530B": (1, 8, 24, 36, 56),
    "1T": (1, 8, 16, 24, 32),
}
"""Model -> the numbers of replicas that tables show."""
_PROSE = 128  # characters of a line
_FLUSHING = ("flush", "interleaved", "bpipe", "interleaved+balance")


def table(heads: list[str], rows: list[list[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def models(_data: dict) -> str:
    rows = []
    for model in study.MODELS:
        shape = model.architecture
        rows.append(
            [f"GPT {model.name}", str(shape.num_layers), f"{shape.hidden_size:,}", str(shape.num_attention_heads)]
            + [str(each) for each in (model.tensor, model.pipeline, model.virtual)]
            + [f"{model.global_batch_size:,}", f"{model.gpus(1):,} to {model.gpus(model.data[-1]):,}"]
        )
    return table(["", "layers", "hidden size", "heads", "t", "p", "v, interleaved", "batch, sequences", "GPUs"], rows)


def bubble(data: dict) -> str:
    """The table of the lost part of an iteration by schedule, and of the speed of 2bw over the others."""
    rows = []
    for model in study.MODELS:
        of = study.rows_of(data, model.name)
        for replicas in SHOWN[model.name]:
            cells = {schedule: of.get((replicas, schedule)) for schedule in ("flush", "interleaved", "2bw")}
            runs = {schedule: row for schedule, row in cells.items() if row and "refused" not in row}
            if not runs:
                continue
            shares = [f"{100 * study.lost(runs[name]):.1f}" if name in runs else "refused" for name in cells]
            gains = [_over(runs, name) for name in ("flush", "interleaved")]
            rows.append([model.name, f"{runs['flush']['gpus']:,}", str(runs["flush"]["microbatches"]), *shares, *gains])
    heads = ["", "GPUs", "m", "flush, %", "interleaved, %", "2bw, %", "2bw over flush", "2bw over interleaved"]
    return table(heads, rows)


def _over(runs: dict[str, dict], name: str) -> str:
    """The speed of 2bw over schedule `name`, and in brackets the speed if all reductions of `name` were hidden."""
    if not {name, "2bw"} <= runs.keys():
        return ""
    row, other = runs[name], runs["2bw"]["seconds"]
    return f"{row['seconds'] / other:.2f} ({(row['seconds'] - row['parts']['reductions']) / other:.2f})"


def flush(data: dict) -> str:
    """The table of the parts of an iteration, on the largest number of GPUs on which all three schedules run."""
    rows = []
    for model in study.MODELS:
        of = study.rows_of(data, model.name)
        names = ("flush", "interleaved", "2bw")
        common = [each for each in model.data if all("parts" in of.get((each, name), {}) for name in names)]
        for name in names:
            row = of[common[-1], name]
            parts = [
                f"{row['parts'][part]:.2f}" for part in ("compute", "step", "fill and drain", "reductions", "transfers")
            ]
            rows.append(
                [model.name, f"{row['gpus']:,}", name, f"{row['seconds']:.2f}", *parts, f"{100 * row['mfu']:.1f}"]
            )
    heads = ["", "GPUs", "", "iteration, s", "compute", "step", "fill and drain", "reductions", "transfers", "MFU, %"]
    return table(heads, rows)


def memory(data: dict) -> str:
    """The table of the GiB on the fullest GPU."""
    rows = []
    for schedule in study.REMEMBERED:
        cells = []
        for model in study.MODELS:
            row = next(each for each in data["memory"] if (each["model"], each["schedule"]) == (model.name, schedule))
            cells.append("refused" if "refused" in row else f"{row['gib']:.0f}")
        rows.append([f"`{schedule}`", *cells])
    gpus = [next(row["gpus"] for row in data["memory"] if row["model"] == model.name) for model in study.MODELS]
    heads = ["", *(f"{model.name}, {count:,} GPUs" for model, count in zip(study.MODELS, gpus, strict=True))]
    return table(heads, rows)


def traffic(data: dict) -> str:
    """The table of the GB that a GPU sends in an iteration, and in a second."""
    rows = []
    for model in study.MODELS:
        of = study.rows_of(data, model.name)
        for replicas in (SHOWN[model.name][0], SHOWN[model.name][2], SHOWN[model.name][-2]):
            row = of[replicas, "flush"]
            kinds = (("flush", "tensor"), ("flush", "pipeline"), ("interleaved", "pipeline"), ("bpipe", "moves"),
                     ("flush", "replicas"))  # fmt: skip
            cells = []
            for schedule, kind in kinds:
                sent = of[replicas, schedule].get("sent_gb")
                cells.append("refused" if sent is None else f"{sent[kind]:{',.0f' if sent[kind] >= 100 else '.3g'}}")
            rows.append([model.name, f"{row['gpus']:,}", *cells, f"{row['sent_gb']['replicas'] / row['seconds']:.2g}"])
    heads = ["", "GPUs", "tensor", "stages, flush", "stages, interleaved", "moves, bpipe", "replicas", "replicas, GB/s"]
    return table(heads, rows)


def best(data: dict) -> str:
    """The table of the fastest configuration, and of the best MFU of each schedule."""
    rows = []
    for model in study.MODELS:
        for num_gpus in model.searched:
            found = _of_schedules(data, model.name, num_gpus)
            first = min(found.values(), key=lambda row: row["seconds"])
            split = f"t={first['t']} p={first['p']}" + f" v={first['v']}" * (first["v"] > 1)
            split += f", microbatch {first['microbatch']}, recompute {first['recompute']}"
            mfu = {name: f"{100 * row['mfu']:.1f}" for name, row in found.items()}
            mfu[first["schedule"]] = f"**{mfu[first['schedule']]}**"
            rows.append([model.name, f"{num_gpus:,}", *(mfu.get(name, "") for name in study.SEARCHED), split])
    return table(["", "GPUs", *(f"`{name}`" for name in study.SEARCHED), "the fastest"], rows)


def conclusions(data: dict) -> str:
    """The conclusions from the tables, as sentences, wrapped as the page is."""
    lines = []
    for model in study.MODELS:
        found = {each: _of_schedules(data, model.name, each) for each in model.searched}
        winners = [(num_gpus, min(rows, key=lambda name: rows[name]["seconds"])) for num_gpus, rows in found.items()]
        parts = []
        for name, group in groupby(winners, key=lambda each: each[1]):
            counts = [f"{num_gpus:,}" for num_gpus, _ in group]
            parts.append(f"`{name}` on {counts[0]}" + (f" to {counts[-1]}" if len(counts) > 1 else ""))
        gains = {each: _gain(rows, _FLUSHING, ("2bw", "2bw+balance")) for each, rows in found.items()}
        most = max((gain, num_gpus) for num_gpus, gain in gains.items() if gain is not None)
        moved = {each: _gain(rows, ("flush",), ("bpipe",)) for each, rows in found.items()}
        better = [f"{100 * gain:.1f}% on {each:,}" for each, gain in moved.items() if gain is not None and gain > 0.005]
        gain, where = most
        verdict = "`bpipe` never beats `flush` by more than 0.5%."
        if better:
            verdict = f"`bpipe` is faster than `flush` by {', '.join(better)} GPUs."
        line = (
            f"- **{model.name}.** The fastest: {', '.join(parts)} GPUs. The best of 2bw is at most {100 * gain:.0f}% "
            f"faster than the best that flushes, on {where:,} GPUs. {verdict}"
        )
        lines.append(fill(line, _PROSE, subsequent_indent="  "))
    return "\n".join(lines)


def _of_schedules(data: dict, model: str, num_gpus: int) -> dict[str, dict]:
    return {row["schedule"]: row for row in data["best"] if (row["model"], row["gpus"]) == (model, num_gpus)}


def _gain(rows: dict[str, dict], slower: tuple[str, ...], faster: tuple[str, ...]) -> float | None:
    """The speed of the best of `faster` over the best of `slower`, less 1; None if either has no row."""
    sides = [[rows[name]["seconds"] for name in names if name in rows] for names in (slower, faster)]
    return min(sides[0]) / min(sides[1]) - 1 if all(sides) else None


TABLES = {
    "models": models,
    "bubble": bubble,
    "flush": flush,
    "memory": memory,
    "traffic": traffic,
    "best": best,
    "conclusions": conclusions,
}


DOCS = Path(__file__).resolve().parent.parent / "docs"
DATA, PAGE, IMAGES = DOCS / "scaling.json", DOCS / "scaling.md", DOCS / "images"
_DIGITS = 4
_NOTHING = 1e-9  # seconds, GB or GiB: a difference that is only rounding


def compute(models: Sequence[study.Model]) -> dict:
    """Compute all data, with numbers of four digits."""
    data = {"gpu": study.GPU, "between_nodes_gb": study.BETWEEN_NODES, "grown": [], "memory": [], "best": []}
    for model in models:
        print(f"{model.name}: replicas", file=sys.stderr, flush=True)
        data["grown"] += study.grown(model)
        data["memory"] += study.memory(model)
        for num_gpus in model.searched:
            print(f"{model.name}: search on {num_gpus} GPUs", file=sys.stderr, flush=True)
            data["best"] += study.best(model, num_gpus)
    return rounded(data)


def rounded(value: object) -> object:
    """Round all numbers of `value` to four digits, and tiny ones to 0, so that files change only when results do."""
    if isinstance(value, dict):
        return {name: rounded(each) for name, each in value.items()}
    if isinstance(value, list):
        return [rounded(each) for each in value]
    if isinstance(value, float) and abs(value) < _NOTHING:
        return 0.0
    if isinstance(value, float):
        return round(value, _DIGITS - 1 - floor(log10(abs(value))))
    return value


def text_of(data: dict) -> str:
    """The data as JSON with a line for each row, so that a diff shows each changed row."""
    parts = []
    for name, value in data.items():
        text = json.dumps(value)
        if isinstance(value, list):
            text = "\n".join(["[", ",\n".join(map(json.dumps, value)), "]"])
        parts.append(f"{json.dumps(name)}: {text}")
    return "\n".join(["{", ",\n".join(parts), "}", ""])


def page_with(tables: dict[str, str], page: str) -> str:
    """Put each table into the page, between its two marks, `<!-- table: NAME -->` and `<!-- end -->`.

    Raises ValueError if marks and tables do not correspond.
    """
    found = re.findall(r"<!-- (?:table: (\w+)|end) -->", page)  # an end is empty
    if sorted(found[::2]) != sorted(tables) or found[1::2] != [""] * len(tables):
        raise ValueError(
            f"the page's marks are {found}, and the tables are {sorted(tables)}; give each table both its marks"
        )
    for name, table in tables.items():
        marks = rf"(<!-- table: {name} -->\n).*?(<!-- end -->)"
        page = re.sub(marks, lambda marks, table=table: f"{marks[1]}{table}\n{marks[2]}", page, flags=re.DOTALL)
    return page


def main(arguments: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__, json="write the data there")
    parser.add_argument("--models", nargs="+", choices=[model.name for model in study.MODELS], help="default: all")
    parser.add_argument("--from", dest="source", type=Path, metavar="FILE", help="data instead of computing it")
    parser.add_argument("--write", action="store_true", help="write data, pictures and tables into docs/")
    options = parser.parse_args(arguments)
    if options.write and options.models:
        parser.error("--models with --write would leave out the others; write all")
    chosen = [model for model in study.MODELS if options.models is None or model.name in options.models]
    data = json.loads(options.source.read_text()) if options.source else compute(chosen)
    tables = {name: table(data) for name, table in TABLES.items()}
    for path in [options.json] * bool(options.json) + [DATA] * options.write:
        path.write_text(text_of(data))
    if options.write:
        from benchmarks.scaling_pictures import draw_all

        PAGE.write_text(page_with(tables, PAGE.read_text()))
        draw_all(data, IMAGES)
    for name, table in tables.items():
        print(f"{name}\n{table}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
