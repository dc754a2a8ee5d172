"""tools/grid_search.py estimate, validate and calibrate: what they print and write, and how they end."""

import argparse
import json
import re

import pytest

from megatron.commands import grid_search as tool  # noqa: F401  of the fixture `run`
from megatron.commands.grid_search.estimate import read_entries
from megatron.commands.grid_search.model_config import NAMED, named_model
from megatron.planner.published.residuals import read_residuals
from megatron.trainer.arguments import Platform
from megatron.trainer.plan.command import Job
from tests.commands.in_process import ROOT, without
from tests.planner.published import measured
from tests.planner.published.bpipe_memory import facts


@pytest.fixture
def entries(tmp_path):
    path = tmp_path / "entries.json"
    vague = measured.BPIPE_TABLE_7[0] | {"id": "vague", "config": {"t": 1, "p": 16, "d": 2}}
    path.write_text(json.dumps({"entries": [*measured.ALL, vague]}))
    return path


@pytest.fixture
def of_four_sources(tmp_path):
    """As an interval takes."""
    path = tmp_path / "four.json"
    more = [each | {"id": f"other {each['id']}", "source": "Another"} for each in measured.KORTHIKANTI]
    path.write_text(json.dumps({"entries": [*measured.ALL, *more]}))
    return path


@pytest.fixture
def feasibility(tmp_path):
    path = tmp_path / "facts.json"
    documents = [
        {"model": "96B", "t": t, "p": p, "d": d, "micro_batch": size, "recompute": scope, "bpipe": bpipe, "fits": fits}
        for (t, p, d), size, scope, bpipe, fits in facts()
    ]
    path.write_text(json.dumps(documents))
    return path


def test_estimate_prints_an_object_a_line(run, entries):
    status, out, _ = run("estimate", "--entries", entries, "--json")
    lines = [json.loads(line) for line in out.splitlines()]
    assert status == 0
    assert [line["id"] for line in lines] == [*(entry["id"] for entry in measured.ALL), "vague"]
    found = {line["id"]: line for line in lines}
    best = found["t4p8d1mb2-attention"]
    assert best["mfu"] == pytest.approx(0.5064, rel=0.03) and best["iteration_seconds"] == pytest.approx(
        30.95, rel=0.03
    )
    assert len(best["memory_gib"]) == 8 and best["verdict"] == "fits" and not best["under_pressure"]
    assert best["calibrated_on"] == "a100"
    assert found["vague"] == {
        "id": "vague", "reason": "config.micro_batch is not given; give its sequences", "calibrated_on": "a100",
    }  # fmt: skip


def test_estimate_has_an_interval_or_a_reason(run, entries):
    """In seconds, with how many runs it is from; what was never compared says so, as the table does."""
    _, out, _ = run("estimate", "--entries", entries, "--json")
    found = {line["id"]: line for line in map(json.loads, out.splitlines())}
    calm = found["t2p8d2mb1-layer"]
    interval, seconds = calm["interval"], calm["iteration_seconds"]
    assert interval["level"] == 0.8 and interval["num_runs"] >= 9 and calm["not_validated"] is None
    assert interval["low_seconds"] < seconds < interval["high_seconds"] and interval["runs"].endswith(" sources")
    pressed = found["t8p4d1mb8-layer"]
    assert "slowed or borderline" in (pressed["not_validated"] or pressed["interval"]["runs"])
    two_bw = [line for line in found.values() if "2bw" in (line.get("not_validated") or "")]
    assert two_bw and all(line["interval"] is None for line in two_bw)
    _, out, _ = run("estimate", "--entries", entries)
    low, high = (f"{interval[name]:.3g}" for name in ("low_seconds", "high_seconds"))
    assert f" {low}-{high} " in next(line for line in out.splitlines() if line.startswith(calm["id"]))
    rows = [line.split(maxsplit=1) for line in out.splitlines()]
    assert [two_bw[0]["id"], two_bw[0]["not_validated"]] in [[word.strip() for word in row] for row in rows]


def test_validate_writes_residuals(run, of_four_sources, tmp_path):
    """Of whole iterations, with the file that they are from; the table says how often their intervals hold."""
    path = tmp_path / "mine.json"
    status, out, err = run("validate", "--entries", of_four_sources, "--write-residuals", path, "--json")
    assert status == 0 and f"wrote {path}: " in err
    written = read_residuals(path)
    runs = {each["id"]: each for each in json.loads(out)["runs"] if "iteration" in each["time_errors"]}
    assert {each.id for each in written.runs} == set(runs) and written.entries == "four.json"
    for each in written.runs:
        assert each.ratio == pytest.approx(1 / (1 + runs[each.id]["time_errors"]["iteration"]), abs=1e-5)
        assert each.kind.under_pressure == runs[each.id]["under_pressure"]
    held = [test for test in json.loads(out)["tests"] if test["test"] == "intervals of 80%, each run left out"]
    assert len(held) == 1 and held[0]["numbers"]["num_runs"] > 9
    table = run("validate", "--entries", of_four_sources, "--rows")[1]
    kind = "A100, flush, unfused attention, 16 bits, several nodes"
    assert re.search(rf"\n +\d+  {kind} +0\.\d+ to 1\.\d+ +\d+  4 sources", table)


def test_estimate_prints_a_plain_table_into_a_pipe(run, entries):
    status, out, _ = run("estimate", "--entries", entries)
    assert status == 0
    row = next(line for line in out.splitlines() if line.startswith("t8p4d1mb8-layer"))
    assert "64.46" in row and row.rstrip().endswith("under pressure")
    assert "config.micro_batch is not given" in out and "\x1b" not in out


def test_a_long_reason_is_not_cut_in_a_pipe(run, tmp_path):
    """A sentence ends with its remedy, however many keys it names; and so does what was taken."""
    odd = measured.changed(measured.BPIPE_TABLE_7[0], config={"colour": 1}) | {"id": "odd"}
    path = tmp_path / "runs.json"
    path.write_text(json.dumps([odd]))
    reason = json.loads(run("estimate", "--entries", path, "--json")[1])["reason"]
    out = run("estimate", "--entries", path)[1]
    assert len(reason) > 250 and reason in out and "…" not in out


def test_estimate_says_what_it_took_and_what_it_left(run, tmp_path):
    """A rate becomes a time, and a machine's network is taken; a rate that may be either is left out. Both outputs say
    so."""
    changes = [{"measured": {"model_tflops_per_gpu": 158}}, {"measured": {"tflops_per_gpu": 158, "mfu": True}},
               {"hardware": {"internode": None, "system": "Selene"}}]  # fmt: skip
    runs = [measured.changed(measured.BPIPE_TABLE_7[0], **each) | {"id": f"e{i}"} for i, each in enumerate(changes)]
    for entry in runs[:2]:
        entry["measured"] = {key: value for key, value in entry["measured"].items() if "flops" in key or value is True}
    path = tmp_path / "runs.json"
    path.write_text(json.dumps(runs))
    status, out, err = run("estimate", "--entries", path, "--json")
    rate, either, network = map(json.loads, out.splitlines())
    assert status == 0 and any(" s an iteration, of 158 TFLOP/s a GPU" in text for text in rate["assumed"])
    assert "200 GB/s between nodes, as selene has" in network["assumed"] and rate["unread"] == []
    assert either["unread"][0] == "measured.mfu is True, no number above 0"
    assert any(text.startswith("measured.tflops_per_gpu") for text in either["unread"])
    assert "note: e1: measured.mfu is True, no number above 0, and left out" in err
    _, out, again = run("estimate", "--entries", path)
    rows = {
        line.split()[0]: line
        for line in out[out.index("assumed where the entry does not say:") :].splitlines()[1:]
        if line
    }
    assert again == err and "158 TFLOP/s a GPU" in rows["e0"] and "as selene has" in rows["e2"]


def test_estimate_by_simulation(run, tmp_path):
    path = tmp_path / "one.json"
    path.write_text(json.dumps([measured.KORTHIKANTI[3]]))
    results = [
        json.loads(run("estimate", "--entries", path, "--json", *more)[1])["iteration_seconds"]
        for more in ([], ["--simulate"])
    ]
    assert results[0] == pytest.approx(results[1], rel=0.01)


def test_estimate_of_predicted_weights(run, tmp_path):
    """`provisional` in an entry: a batch takes the prediction longer, and what is held takes memory."""
    entry = measured.BPIPE_TABLE_7[0]
    base = {key: value for key, value in entry["config"].items() if key != "schedule"} | {"schedule": "2bw"}
    modes = {
        "off": {}, "stage": {"provisional": "stage"},
        "uniform": {"provisional": "uniform", "provisional_microbatches": 1},
        "wrong": {"provisional": "uniform"},
    }  # fmt: skip
    path = tmp_path / "modes.json"
    path.write_text(json.dumps([entry | {"id": name, "config": base | more} for name, more in modes.items()]))
    lines = [json.loads(line) for line in run("estimate", "--entries", path, "--json")[1].splitlines()]
    found = {line["id"]: line for line in lines}
    times = [found[name]["iteration_seconds"] for name in ("off", "stage", "uniform")]
    assert times[0] < times[1] < times[2] < 1.1 * times[0]
    assert found["stage"]["memory_gib"] > found["off"]["memory_gib"]  # the ends hold the tied embedding's gradient
    assert found["uniform"]["memory_gib"][1] > found["stage"]["memory_gib"][1]
    assert "uniform needs a number" in found["wrong"]["reason"]


RUN = {
    "hardware": {"gpu": "A100-SXM-80GB"},
    "config": {"t": 2, "p": 2, "d": 2, "micro_batch": 1, "global_batch": 16, "sequence_parallel": True},
}
LLAMA = {"name": "Llama 3 8B", "layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8, "ffn": 14336, "seq": 4096,
         "vocab": 128256}  # fmt: skip


def test_entries_without_a_model_take_the_one_that_is_given(run, tmp_path):
    """As long as they say, or as the command line says; whoever describes a model keeps it."""
    path = tmp_path / "mixed.json"
    models = {
        "own": LLAMA, "none": None, "length": {"seq": 4096, "note": "a remark"}, "wrong": {"seq": 0},
        "other key": {"seq": 1, "seq_len": 1}, "other": {"name": "BERT-24", "layers": 24, "seq": 512},
    }  # fmt: skip
    path.write_text(json.dumps({"entries": [RUN | {"id": name, "model": model} for name, model in models.items()]}))

    def found(*flags):
        status, out, err = run("estimate", "--entries", path, "--json", *flags)
        assert status == 0, err
        return {line["id"]: line for line in map(json.loads, out.splitlines())}

    plain, named = found(), found("--model", "llama-3.1-8b", "--seq-length", 2048)
    assert {name for name, line in plain.items() if "reason" not in line} == {"own", "other"}
    assert named["length"]["iteration_seconds"] == plain["own"]["iteration_seconds"]
    assert named["length"]["memory_gib"] == plain["own"]["memory_gib"]
    assert "the model of --model llama-3.1-8b" in named["length"]["assumed"]
    assert named["none"]["iteration_seconds"] < named["length"]["iteration_seconds"]
    assert all(named[name] == plain[name] for name in ("own", "other", "wrong", "other key"))
    assert "give it, or --seq-length" in found("--model", "llama-3.1-8b")["none"]["reason"]


@pytest.mark.parametrize("name", ["gpt3-96b", "bert-large", "llama-3.1-8b", "mixtral-8x7b", "qwen3-8b", "qwen2.5-7b"])
def test_a_model_by_name_is_as_it_is_searched(run, tmp_path, name):
    """With what an entry's keys cannot say, such as biases of queries; a config.json that says the same is the same."""
    path, config = tmp_path / "run.json", tmp_path / "config.json"
    config.write_text(json.dumps(NAMED[name]))
    path.write_text(json.dumps([RUN | {"id": "it"}]))
    options = argparse.Namespace(entries=path, model=name, model_config=None, seq_length=512)
    (entry,) = read_entries(options)
    options.model, options.model_config = None, str(config)
    (same,) = read_entries(options)
    configured = named_model(name)
    platform = Platform(is_cuda=True, has_transformer_engine=True, has_apex=True, has_deep_ep=True)
    job = Job.read([*configured.argv, "--seq-length", "512"], architecture=configured.architecture, platform=platform)
    assert entry.model == same.model == job.shape(2) and entry.model_name == f"--model {name}"


def test_a_window_is_refused_by_the_entry_that_it_is_too_short_for(run, tmp_path):
    path, config = tmp_path / "run.json", tmp_path / "config.json"
    config.write_text(json.dumps(NAMED["mistral-7b"] | {"sliding_window": 4096}))
    path.write_text(json.dumps([RUN | {"id": str(length), "model": {"seq": length}} for length in (4096, 8192)]))
    _, out, _ = run("estimate", "--entries", path, "--json", "--model-config", config)
    short, long = map(json.loads, out.splitlines())
    assert short["iteration_seconds"] and "sliding_window is 4096, and attention to a window" in long["reason"]


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("--seq-length 2048", "--seq-length 2048 goes with --model or --model-config; entries with models of"),
        ("--model llama-3.1-8b --model-config x", "--model-config and --model exclude each other; keep one"),
        ("--model llama-3.1-9b", "--model llama-3.1-9b is no model that is known; the nearest that is known is llama-"),
        ("--model-config nowhere", "nowhere cannot be read (No such file or directory); give a YAML or JSON file"),
        ("--model llama-3.1-8b", "--model llama-3.1-8b is for entries without a model, and each of "),
    ],
)  # fmt: skip
def test_models_that_cannot_be_taken(run, tmp_path, flags, sentence):
    path = tmp_path / "own.json"
    path.write_text(json.dumps([RUN | {"id": "own", "model": LLAMA}]))
    status, out, err = run("estimate", "--entries", path, *flags.split())
    assert (status, out) == (1, "") and err.startswith(f"error: {sentence}") and err.count("\n") == 1


def test_validate(run, entries, feasibility):
    """The bars that these runs belong to are reached; the table says so, and JSON has the numbers."""
    status, out, _ = run("validate", "--entries", entries, "--feasibility", feasibility, "--rows")
    assert status == 0
    table, _, rows = out.partition("\n\n")
    assert " NO" not in table and table.count(" yes") >= 6
    assert "1 of 23 entries cannot be predicted" in rows and "t8p4d1mb8-layer" in rows
    assert re.search(r"\n +\d+  A100, flush, unfused attention, 16 bits, several nodes +too few", rows)  # 3 sources
    status, out, _ = run("validate", "--entries", entries, "--feasibility", feasibility, "--json")
    document = json.loads(out)
    assert status == 0 and document["calibration"] == "a100"
    by_test = {test["test"]: test for test in document["tests"]}
    pressed = by_test.pop("BPipe, all runs of GPT-3 96B, under pressure or not")
    assert pressed["numbers"]["mean_error"] > pressed["numbers"]["mean_time_error"]
    assert all(test["reached"] for test in by_test.values() if test["bar"])
    assert len(document["runs"]) == len(measured.ALL) - len(measured.PIPEDREAM_2BW)


def test_calibrate_warns_where_nothing_fits(run, tmp_path):
    """Runs that contradict each other, and a processor that is faster than its data sheet."""
    path, output = tmp_path / "odd.json", tmp_path / "odd_fit.json"
    for mfu, names in (((0.4, 0.05), ("off on average",)), ((0.95, 0.95), ("product_efficiency is at its limit",))):
        runs = [
            entry | {"measured": {"mfu": mfu[index % 2]}} for index, entry in enumerate(measured.BPIPE_TABLE_7)
        ]  # fmt: skip
        path.write_text(json.dumps(runs))
        status, _, err = run("calibrate", "--entries", path, "--output", output)
        assert status == 0 and all(name in err for name in names)


@pytest.mark.parametrize("command", ["validate", "calibrate"])
def test_measurements_that_are_no_numbers_are_named(run, tmp_path, command):
    """Where a run is left out because of a slip of the pen, that is said."""
    path, slips = tmp_path / "slips.json", {1: "0.4o", 2: -0.4, 3: 0}
    runs = [
        entry | {"measured": {"mfu": slips[index]}} if index in slips else entry
        for index, entry in enumerate(measured.BPIPE_TABLE_7)
    ]
    path.write_text(json.dumps(runs))
    output = ("--output", tmp_path / "fit.json") if command == "calibrate" else ()
    _, _, err = run(command, "--entries", path, *output)
    notes = [line for line in err.splitlines() if line.startswith("note: ") and "measured." in line]
    assert notes == [
        f"note: {runs[index]['id']}: measured.mfu is {slips[index]!r}, no number above 0, and left out"
        for index in (1, 2)
    ]


def test_validate_with_a_few_of_the_fitted_runs(run, tmp_path):
    """The others are judged, and those that cannot be are counted; a ranked one that cannot run is left aside."""
    path = tmp_path / "few.json"
    fitted = measured.BPIPE_TABLE_7[0] | {"id": "bpipe-t7-96B-t1p16d2mb1-layer"}
    ranked = measured.PIPEDREAM_2BW[0]
    odd = ranked | {"id": "odd", "config": ranked["config"] | {"p": 5, "d": 16}}
    path.write_text(json.dumps([fitted, *measured.KORTHIKANTI, *measured.PIPEDREAM_2BW, odd]))
    status, out, _ = run("validate", "--entries", path)
    assert status == 0 and "22B and 175B" in out and "16 GTX1080Ti" in out
    assert "1 of the runs that were fitted are not held against a prediction" in out


def test_calibrate_writes_what_estimate_takes(run, entries, tmp_path):
    output = tmp_path / "mine.json"
    status, out, _ = run("calibrate", "--entries", entries, "--source", "BPipe", "--output", output)
    assert status == 0
    assert "10 of 10 runs are explained" in out and "pressed_efficiency" in out
    status, out, _ = run("estimate", "--entries", entries, "--json", "--calibrated-on", output)
    assert status == 0 and json.loads(out.splitlines()[0])["calibrated_on"] == "mine"
    status, out, _ = run("calibrate", "--entries", entries, "--source", "BPipe", "--output", output, "--json")
    assert json.loads(out)["entries"] == [entry["id"] for entry in measured.BPIPE_TABLE_7]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["estimate", "--entries", "{entries}", "--calibrated-on", "b200"], "no calibration 'b200'"),
        (["estimate", "--entries", "{missing}"], "cannot be read"),
        (["calibrate", "--entries", "{entries}", "--source", "nobody", "--output", "{missing}"], "0 measured runs"),
        (["calibrate", "--entries", "{entries}", "--gpu", "H100", "--output", "{missing}"], "goes with --profile"),
        (
            ["calibrate", "--profile", "{missing}", "--output", "{missing}"],
            "--profile needs --gpu; give one of A100-80",
        ),
        (["calibrate", "--profile", "{missing}", "--gpu", "B300", "--output", "{missing}"], "'B300' is no GPU"),
        (
            ["calibrate", "--profile", "{missing}", "--gpu", "cpu", "--source", "BPipe", "--output", "{missing}"],
            "a profile is fitted as a whole",
        ),
    ],
)
def test_faults(run, entries, tmp_path, arguments, message):
    names = {"entries": entries, "missing": tmp_path / "missing.json"}
    status, _, err = run(*(each.format(**names) for each in arguments))
    assert status == 1 and message in err and len(err.splitlines()) == 1


@pytest.mark.full
def test_starts_without_torch(entries):
    without("matplotlib", ROOT / "tools" / "grid_search.py", "estimate", "--entries", entries, "--json", cwd=ROOT)
