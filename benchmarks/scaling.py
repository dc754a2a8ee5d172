"""How schedules grow from 8 to 16,384 GPUs, by simulation: the data, tables and pictures of docs/scaling.md.

    python benchmarks/scaling.py                 # compute, and print the tables: minutes of one core
    python benchmarks/scaling.py --write         # and write docs/scaling.json, the pictures, and the page's tables
    python benchmarks/scaling.py --from docs/scaling.json --write   # only draw and write again

Nothing is measured. Every number follows from the programs, the cost model that was calibrated on A100s
(`megatron/planner/time`) and the memory model; the page says what these leave out.
"""

import json
import re
import sys
from collections.abc import Sequence
from math import floor, log10
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import scaling_study as study
from scaling_tables import TABLES

from benchmarks.common.results import parser_of

DOCS = Path(__file__).resolve().parent.parent / "docs"
DATA, PAGE, IMAGES = DOCS / "scaling.json", DOCS / "scaling.md", DOCS / "images"
_DIGITS = 4
_NOTHING = 1e-9  # of seconds, GB or GiB: what floating point leaves of a difference


def compute(models: Sequence[study.Model]) -> dict:
    """Everything, with numbers of four digits."""
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
    """The same data with numbers of four digits, none smaller than a billionth, so that files change only when results
    do."""
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
    """JSON with a line for each row, so that a change of one shows as one."""
    parts = []
    for name, value in data.items():
        text = json.dumps(value)
        if isinstance(value, list):
            text = "\n".join(["[", ",\n".join(map(json.dumps, value)), "]"])
        parts.append(f"{json.dumps(name)}: {text}")
    return "\n".join(["{", ",\n".join(parts), "}", ""])


def page_with(tables: dict[str, str], page: str) -> str:
    """The page with each table between its two marks, `<!-- table: NAME -->` and `<!-- end -->`.

    Raises ValueError where marks and tables do not correspond.
    """
    found = re.findall(r"<!-- table: (\w+) -->", page)
    if sorted(found) != sorted(tables):
        raise ValueError(f"the page has marks for the tables {found}, and there are {sorted(tables)}; give each a mark")
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
        from scaling_pictures import draw_all

        PAGE.write_text(page_with(tables, PAGE.read_text()))
        draw_all(data, IMAGES)
    for name, table in tables.items():
        print(f"{name}\n{table}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
