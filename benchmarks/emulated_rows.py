"""The results of `emulated.py`: rows with measurements, ideals and simulated times, and the tables of these rows.

A row is plain data, one line of a table and one object of the JSON file. Times are in seconds; `measured` has one entry
for each repeat.
"""

import statistics
from collections.abc import Callable, Iterator

from benchmarks.common.tables import Row, show_table, spread
from benchmarks.emulated_ranks import Contender, EmulatedJob
from megatron.pipeline.check import check
from megatron.pipeline.simulate import Costs, simulate


def predicted(job: EmulatedJob, contender: Contender, num_microbatches: int, latency: float) -> float:
    """The simulated seconds per batch of the batches that were timed."""
    settling, num_batches = contender.settling_batches, job.timed_batches(num_microbatches)
    program = contender.schedule(job.num_stages).build((num_microbatches,) * (settling + num_batches + 1))
    costs = Costs(
        forward=job.forward / contender.virtual, backward=job.backward / contender.virtual, latency=latency,
        reduce_grad=contender.grad_seconds, reduce_embed=contender.embed_seconds, step=contender.update_seconds,
        hold=contender.update_seconds,
    )  # fmt: skip
    starts = simulate(program, costs).batch_starts()
    return (starts[-1] - starts[settling]) / num_batches


def ideal_seconds(job: EmulatedJob, contender: Contender, num_microbatches: int) -> float:
    slots = num_microbatches + (job.num_stages - 1 if contender.preset == "flush" else 0)
    return slots * (job.forward + job.backward)


def unhidable_seconds(job: EmulatedJob, contender: Contender, num_microbatches: int, latency: float) -> float:
    """The seconds per batch by which round trips, divided among the microbatches in flight, exceed computation."""
    p, slot = job.num_stages, job.forward + job.backward
    in_flight = contender.schedule(p).max_saved_microbatches((num_microbatches,) * 2)[0]
    return num_microbatches * max(0.0, (p * slot + 2 * (p - 1) * latency) / in_flight - slot)


class Found:
    """The measurements of one job."""

    def __init__(self, job: EmulatedJob, result: dict) -> None:
        self.job = job
        self.latencies = result["latencies"]
        self.latency = statistics.median(self.latencies) if self.latencies else 0.0
        self.of = {(each["num_microbatches"], each["contender"]): each for each in result["measurements"]}

    def row(self, section: str, num_microbatches: int, contender: Contender) -> Row:
        measured = self.of[num_microbatches, contender.name]
        return {
            "section": section, "stages": self.job.num_stages, "replicas": self.job.num_replicas,
            "microbatches": num_microbatches, "contender": contender.name, "measured": measured["seconds"],
            "executed_is_program": measured["executed_is_program"],
            "predicted": predicted(self.job, contender, num_microbatches, self.latency),
            "ideal": ideal_seconds(self.job, contender, num_microbatches),
        }  # fmt: skip

    def rows(self, section: str) -> Iterator[tuple[Contender, Row]]:
        """Yield each contender with its row, for each number of microbatches."""
        for m, contenders in self.job.entries.items():
            yield from ((contender, self.row(section, m, contender)) for contender in contenders)

    def latency_row(self) -> Row:
        return {
            "section": "latency", "stages": self.job.num_stages, "replicas": self.job.num_replicas,
            "payload_bytes": self.job.payload_bytes, "measured": self.latencies,
        }  # fmt: skip


def ideal_rows(found: Found) -> list[Row]:
    return [
        row | {"unhidable": unhidable_seconds(found.job, contender, row["microbatches"], found.latency)}
        for contender, row in found.rows("ideal")
        if not contender.extra_warmup
    ]


def warmup_rows(found: Found) -> list[Row]:
    rows = []
    for contender, row in found.rows("warmup"):
        m = row["microbatches"]
        if contender.preset == "2bw" and any(each.extra_warmup for each in found.job.entries[m]):
            proved = check(contender.schedule(found.job.num_stages).build((m,) * 4))
            row["unhidable"] = unhidable_seconds(found.job, contender, m, found.latency)
            row["saved"] = found.of[m, contender.name]["saved_peak"]
            rows.append(row | {"saved_by_checker": list(proved.peak_saved_microbatches)})
    return rows


def chain_rows(found: Found) -> list[Row]:
    return _rows_over_first("chain", found, chain=lambda contender: contender.chain_seconds)


def predictions_rows(found: Found) -> list[Row]:
    return _rows_over_first("predictions", found, update=lambda contender: contender.update_seconds)


def _rows_over_first(section: str, found: Found, **facts: Callable[[Contender], object]) -> list[Row]:
    """The rows of all contenders at each m. The first contender is the reference of the others, which get `facts`."""
    rows, reference = [], {}
    for contender, row in found.rows(section):
        if row["microbatches"] != reference.get("microbatches"):
            reference = row
        else:
            row |= {name: fact(contender) for name, fact in facts.items()} | {"reference": reference["measured"]}
            row["predicted_ratio"] = row["predicted"] / reference["predicted"]
        rows.append(row)
    return rows


def speedup_rows(found: Found) -> list[Row]:
    p = found.job.num_stages
    at_p = {each.name: found.row("speedup", p, each) for each in found.job.entries.get(p, ())}
    if not {"flush", "2bw"} <= set(at_p):
        return []
    flush, two_bw = at_p["flush"], at_p["2bw"]
    ratios = {
        name: flush[of] / two_bw[of] for name, of in (("expected_ratio", "ideal"), ("predicted_ratio", "predicted"))
    }
    return [{**two_bw, "reference": flush["measured"], **ratios}]


def executor_rows(found: Found) -> list[Row]:
    rows = []
    for contender, row in found.rows("executor"):
        measured = found.of[row["microbatches"], contender.name]
        rows.append(row | {"instructions": measured["instructions"], "cpu": measured["cpu_seconds"]})
    return rows


def bubble_rows(found: Found) -> list[Row]:
    """The rows of all contenders, with the least time of a batch, in which no rank waits."""
    slot = found.job.forward + found.job.backward
    return [row | {"work": row["microbatches"] * slot} for _, row in found.rows("bubbles")]


ROWS = {
    "bubbles": bubble_rows,
    "ideal": ideal_rows,
    "warmup": warmup_rows,
    "chain": chain_rows,
    "predictions": predictions_rows,
    "speedup": speedup_rows,
    "executor": executor_rows,
}


# --- tables


def milliseconds(row: Row) -> str:
    return spread([1e3 * seconds for seconds in row["measured"]], 1)


def over(row: Row, seconds: float) -> str:
    return spread([measured / seconds for measured in row["measured"]], 4)


def reference_over(row: Row) -> list[float]:
    return [other / own for other, own in zip(row["reference"], row["measured"], strict=True)]


def per_instruction(row: Row, name: str) -> str:
    return spread([1e6 * seconds / row["instructions"] for seconds in row[name]], 1)


def over_reference(row: Row) -> str:
    return spread([1 / ratio for ratio in reference_over(row)], 4) if "reference" in row else ""


def predicted_ratio(row: Row) -> str:
    return f"{row['predicted_ratio']:.4f}" if "predicted_ratio" in row else ""


COMMON = {
    "p": lambda row: str(row["stages"]),
    "m": lambda row: str(row["microbatches"]),
    "": lambda row: row["contender"],
    "ms a batch": milliseconds,
    "predicted": lambda row: f"{1e3 * row['predicted']:.1f}",
}
OVER_IDEAL = {
    "ideal": lambda row: f"{1e3 * row['ideal']:.0f}",
    "over ideal": lambda row: over(row, row["ideal"]),
    "unhidable": lambda row: f"{1e3 * row['unhidable']:.1f}",
    "over ideal + unhidable": lambda row: over(row, row["ideal"] + row["unhidable"]),
    "over predicted": lambda row: over(row, row["predicted"]),
}
TABLES = {
    "bubbles": (
        "idle part of a batch",
        COMMON
        | {
            "over predicted": lambda row: over(row, row["predicted"]),
            "bubble, %": lambda row: spread([100 * (1 - row["work"] / seconds) for seconds in row["measured"]], 1),
            "predicted, %": lambda row: f"{100 * (1 - row['work'] / row['predicted']):.1f}",
        },
    ),
    "ideal": ("time per batch over the ideal", COMMON | OVER_IDEAL),
    "warmup": (
        "extra warm-up: latency bought back with memory",
        COMMON
        | OVER_IDEAL
        | {
            "saved microbatches": lambda row: " ".join(map(str, row["saved"])),
            "checker": lambda row: " ".join(map(str, row["saved_by_checker"])),
        },
    ),
    "chain": (
        "2bw, d=2, tied embeddings, clipping: reductions that take a share of the slack",
        COMMON
        | {
            "chain ms": lambda row: f"{1e3 * row['chain']:.0f}" if "chain" in row else "",
            "over without": over_reference,
            "predicted ratio": predicted_ratio,
        },
    ),
    "predictions": (
        "2bw with predicted weights, over 2bw without",
        COMMON
        | {
            "ms an update": lambda row: f"{1e3 * row['update']:.1f}" if "update" in row else "",
            "over without": over_reference,
            "predicted ratio": predicted_ratio,
        },
    ),
    "speedup": (
        "2bw over flush at m=p",
        {
            "p": COMMON["p"],
            "m": COMMON["m"],
            "speed-up": lambda row: spread(reference_over(row), 3),
            "expected": lambda row: f"{row['expected_ratio']:.3f}",
            "predicted": lambda row: f"{row['predicted_ratio']:.3f}",
        },
    ),
    "executor": (
        "microseconds an instruction",
        {
            "p": COMMON["p"],
            "": COMMON[""],
            "instructions a batch": lambda row: f"{row['instructions']:.0f}",
            "wall": lambda row: per_instruction(row, "measured"),
            "own thread's CPU": lambda row: per_instruction(row, "cpu"),
        },
    ),
    "latency": (
        "one-way latency in ms",
        {
            "p": COMMON["p"],
            "d": lambda row: str(row["replicas"]),
            "bytes": lambda row: f"{row['payload_bytes']:,}",
            "ms": lambda row: spread([1e3 * seconds for seconds in row["measured"]], 2),
        },
    ),
}


def show(rows: list[Row]) -> None:
    for section, (title, columns) in TABLES.items():
        if chosen := [row for row in rows if row["section"] == section]:
            show_table(title, columns, chosen)
