"""The ranking is of what computes what flush computes, delayed weights stand beside it, rows say what else differs."""

import csv
import json
import re
from dataclasses import dataclass, replace

import pytest

from megatron.planner.job.configuration import Configuration
from megatron.planner.job.software import Software
from megatron.planner.search import Outcome
from megatron.planner.search.notes import (
    beside_ranking,
    sentences_on_layers,
    without_pipeline_record,
    without_pipeline_sentence,
)
from megatron.planner.search.report import configurations_table, draw_outcome, html_report
from megatron.planner.search.space import delayed, offered
from megatron.planner.search.table import HEADINGS, cells, records, write_csv
from tests.planner import made_up
from tests.planner.search.helper import a100, gpt3, planner, run

MODEL, MACHINES = gpt3(16, 4096, 32), a100(1)
SPACE = {"global_batch_size": 16, "tensor": (2,), "pipeline": (4,), "num_simulated": 1}
NAMES = ("flush", "2bw", "interleaved", "zb-h1")


@dataclass(frozen=True, kw_only=True)
class HalvesApart(Software):
    """Layers of Transformer Engine, but for schedules that split backwards."""

    def of(self, configuration: Configuration) -> Software:
        return Software() if configuration.splits_backward else self


FUSED = HalvesApart(transformer_impl="transformer_engine", flash_attention=True)


@pytest.fixture(scope="module")
def outcome() -> Outcome:
    return run(MODEL, MACHINES, FUSED, schedules=NAMES, unasked=("2bw",), **SPACE)


def test_delayed_weights_follow_from_the_policy():
    """Of a schedule that a user registers, too."""
    assert delayed(offered()) == ("2bw", "pipedream", "2bw+balance")
    with made_up.registered():
        assert {"triple", "double-buffered"} <= set(delayed(offered()))
        assert "v-gpipe" not in delayed(offered())


def test_the_best_is_of_the_ranking(outcome):
    """Though 2bw is faster; both are simulated, and the gain is their ratio. Asked for by name it is the best."""
    assert outcome.best.choice.schedule == "interleaved" and outcome.best.is_simulated
    assert {each.choice.schedule for each in outcome.beside} == {"2bw"} and outcome.beside[0].is_simulated
    assert (*outcome.ranking, *outcome.beside) == outcome.kept
    ranks = [rank for rank, _ in outcome.rows]
    assert ranks == [*range(1, len(outcome.ranking) + 1), *[None] * len(outcome.beside)]
    fast = outcome.beside[0]
    assert outcome.gain(fast) == pytest.approx(outcome.best.estimate.seconds / fast.estimate.seconds - 1)
    assert outcome.gain(fast) > 0 and outcome.gain(outcome.best) is None
    assert all(each.choice.schedule != "2bw" for each in outcome.pareto_front())
    assert outcome.best_without_pressure[1].choice.schedule != "2bw"
    named = run(MODEL, MACHINES, FUSED, schedules=NAMES, **SPACE)
    assert named.best.choice == fast.choice and not named.beside


@pytest.mark.parametrize(("gain", "words"), [(1e-5, "as fast"), (-1e-5, "as fast"), (-0.01, "1.0% slower")])
def test_nothing_is_a_twentieth_of_a_percent_slower(outcome, monkeypatch, gain, words):
    monkeypatch.setattr(type(outcome), "gain", lambda *_: gain)
    assert f"2bw would be {words};" in beside_ranking(outcome)
    assert cells(outcome.beside[0], None, -1e-5)[1] == "+0.0"


def test_what_stands_beside_says_what_it_would_gain(outcome, tmp_path):
    """In its sentence, in the table, on the page and in the records, where it has no rank."""
    gain = outcome.gain(outcome.beside[0])
    assert beside_ranking(outcome) == (
        "schedules with delayed weights stand beside the ranking: compared with the best, 2bw would be "
        f"{100 * gain:.1f}% faster; --schedules 2bw ranks them"
    )
    assert beside_ranking(replace(outcome, unasked=frozenset())) is None
    row = dict(zip(HEADINGS, cells(outcome.beside[0], None, gain), strict=True))
    assert (row["rank"], row["gain, %"], row["schedule"]) == ("beside", f"{100 * gain:+.1f}", "2bw")
    page = configurations_table(outcome, outcome.best_of_schedules(), name="some")
    assert f"<td>beside<td>{100 * gain:+.1f}<td class=text>2bw" in page
    found = [each for each in records(outcome) if each["status"] == "kept"]
    assert {each["schedule"] for each in found if each["rank"] is None} == {"2bw"}
    assert {each["schedule"] for each in found if each["gain_over_best"] is None} == set(NAMES) - {"2bw"}
    write_csv(outcome, tmp_path / "all.csv")
    with open(tmp_path / "all.csv", newline="") as stream:
        rows = [row for row in csv.DictReader(stream) if row["status"] == "kept"]
    assert [row["rank"] for row in rows] == [str(each["rank"] or "") for each in found]
    assert float(rows[len(outcome.ranking)]["gain_over_best"]) == gain


def test_what_stands_beside_is_hollow(outcome):
    (axes,) = draw_outcome(outcome, memory_gib=79.25).axes
    drawn = {each.get_gid(): each for each in axes.collections if each.get_gid()}
    assert not len(drawn["2bw"].get_facecolors()) and len(drawn["flush"].get_facecolors())


def test_each_row_states_its_layers_and_attention(outcome):
    """And what is unlike the best in these is marked; with the same layers nothing is."""
    for each in outcome.kept:
        is_other = each.choice.schedule == "zb-h1"
        assert cells(each, 1)[HEADINGS.index("layers")] == ("local, unfused" if is_other else "TE, flash")
        marked = "other layers than the best (local, unfused, not TE, flash)"
        assert (marked in each.notes) is is_other
    found = {(each["schedule"], each["transformer_impl"], each["attention"]) for each in records(outcome)
             if each["status"] == "kept"}  # fmt: skip
    assert found == {("zb-h1", "local", "unfused"), *((name, "transformer_engine", "flash") for name in NAMES[:3])}
    (said,) = sentences_on_layers(outcome.kept)
    assert "(TE, flash of interleaved, flush, 2bw; local, unfused of zb-h1)" in said
    same = run(MODEL, MACHINES, Software(), schedules=("flush", "zb-h1"), **SPACE)
    assert sentences_on_layers(same.kept) == () and not any(
        "other layers" in note for each in same.kept for note in each.notes
    )


def test_larger_batches_are_marked():
    """Where they may grow, one that takes no more than the best does is not."""
    found = run(
        MODEL, MACHINES, schedules=("flush", "interleaved"), **SPACE | {"global_batch_size": 28}, safe_batch_size=36
    )  # fmt: skip
    batches = {each.choice.global_batch_size for each in found.kept}
    assert len(batches) > 1
    for each in found.kept:
        mine, its = each.choice.global_batch_size, found.best.choice.global_batch_size
        marked = f"other batches than the best (of {mine}, not of {its})"
        assert (marked in each.notes) is (mine != its)


def test_what_is_compared_without_a_pipeline_says_its_layers(outcome):
    """In the records always, in the sentence where the best's are others."""
    record = without_pipeline_record(outcome.without_pipeline)
    assert (record["transformer_impl"], record["attention"]) == ("transformer_engine", "flash")
    assert "other layers" not in without_pipeline_sentence(outcome, has_script=True)
    halves = tuple(each for each in outcome.kept if each.choice.schedule == "zb-h1")
    text = without_pipeline_sentence(replace(outcome, kept=halves), has_script=True)
    assert "(with other layers: TE, flash, not local, unfused)" in text
    assert json.dumps(record)


def test_bars_and_timelines_name_other_layers(outcome):
    """Twice in bars, once above the timeline; the best's own are not repeated."""
    page = html_report(outcome, lambda _: planner(MODEL, MACHINES, FUSED), title="layers", summary=())
    labels = re.findall(r"(?:<h3>|text-anchor=\"end\">)((?:\d+|beside): [^<]*)<", page)
    of_halves = [label for label in labels if " zb-h1, " in label]
    assert len(of_halves) == 3 and all(label.endswith(", local, unfused") for label in of_halves)
    assert len(labels) == 3 * len(NAMES) and not any("TE, flash" in label for label in labels)
