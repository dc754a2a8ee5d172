"""tools/grid_search.py search: what is ranked, what stands beside it, and what rows change besides the choices."""

import json
from html import unescape

import pytest

from megatron.commands import grid_search as tool  # noqa: F401  of the fixture `run`

SUBCOMMAND = ("search",)

GPT = [
    "--num-layers", 16, "--hidden-size", 4096, "--num-attention-heads", 32, "--seq-length", 2048, "--vocab-size", 50257,
    "--global-batch-size", 16, "--cluster", "H100", "--tensor", 2, "--pipeline", 4, "--simulate", 1,
]  # fmt: skip


def words_of(path) -> str:
    return " ".join(line.removeprefix("# ") for line in unescape(path.read_text()).splitlines())


@pytest.mark.full
def test_by_default_what_computes_as_flush_does_is_ranked(run, tmp_path):
    """2bw is faster, and nobody asked for it: table, page, JSON and script say what it would gain, and the script
    starts the best of the others. Backwards in halves train with the same layers as the others."""
    status, out, _ = run(*GPT, "--output", tmp_path, "--json", "--top", 1000)
    found = json.loads(out)
    best, beside = found["best"][0], {each["schedule"]: each for each in found["beside"]}
    assert status == 0 and beside.keys() == {"2bw"} and best["schedule"] == "zbv"
    gain = best["iteration_seconds"] / beside["2bw"]["iteration_seconds"] - 1
    assert beside["2bw"]["gain_over_best"] == pytest.approx(gain) and gain > 0
    assert "2bw" not in {each["schedule"] for each in found["best"]}
    said = f"compared with the best, 2bw would be {100 * gain:.1f}% faster; --schedules 2bw ranks them"
    for words in (" ".join(found["notes"]), words_of(tmp_path / "report.html"), words_of(tmp_path / "best.sh")):
        assert said in words and "configurations differ in their layers" not in words
    script = words_of(tmp_path / "best.sh")
    assert "SCHEDULE:-zbv}" in script and "with Transformer Engine's layers and flash attention" in script
    assert {"zb-h1", "zbv", "interleaved", "flush"} <= {each["schedule"] for each in found["best"]}
    layers = {(each["transformer_impl"], each["attention"]) for each in found["best"]}
    assert layers == {("transformer_engine", "flash")}
    assert not any("other layers" in note for each in found["best"] for note in each["notes"])
    out = run(*GPT)[1]
    rows = [line.split() for line in out.splitlines() if line.startswith("beside  ")]
    assert [row[1:3] for row in rows] == [[f"{100 * gain:+.1f}", "2bw"]]


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("named", "schedule"),
    [(["--schedules", "interleaved,2bw"], "2bw"), (["--2bw-provisional", "stage"], "2bw"),
     (["--schedules", "interleaved,flush"], "interleaved")],
)  # fmt: skip
def test_who_names_delayed_weights_has_them_ranked(run, tmp_path, named, schedule):
    """By --schedules, or by the flag that makes 2bw predict."""
    status, out, _ = run(*GPT, *named, "--output", tmp_path, "--json")
    found = json.loads(out)
    assert status == 0 and found["beside"] == [] and not any("beside the ranking" in note for note in found["notes"])
    assert found["best"][0]["schedule"] == schedule
    assert f"SCHEDULE:-{schedule}}}" in words_of(tmp_path / "best.sh")


def test_the_same_layers_compare_schedules_alone(run):
    """As the note advises."""
    notes = json.loads(run(*GPT, "--transformer-impl", "local", "--json")[1])["notes"]
    assert not any("same layers" in note for note in notes)
