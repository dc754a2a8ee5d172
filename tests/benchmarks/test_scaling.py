"""docs/scaling.md: its tables and pictures are those of its data, and its data is what the command computes."""

import json
import re

import pytest

from benchmarks import scaling, scaling_pictures
from benchmarks import scaling_study as study
from benchmarks.scaling import TABLES

DATA = json.loads(scaling.DATA.read_text())
MODELS = {model.name: model for model in study.MODELS}
ROWS = [row for row in DATA["grown"] if "refused" not in row]


def test_tables_and_pictures_are_those_of_the_data():
    """The page holds what the committed data gives, and shows every picture that is drawn."""
    page = scaling.PAGE.read_text()
    assert scaling.page_with({name: table(DATA) for name, table in TABLES.items()}, page) == page
    shown = re.findall(r"\(images/(scaling_\w+\.png)\)", page)
    assert sorted(shown) == sorted(path.name for path in scaling.IMAGES.glob("scaling_*.png"))
    assert len(shown) == 5


def test_pictures_show_the_data():
    """Every line of the pictures of times and MFU is a schedule's rows; nothing is drawn to disk, so fonts and
    versions of matplotlib do not matter.
    """
    for draw, schedules, value in (
        (scaling_pictures._lost, ("flush", "interleaved", "2bw"), lambda row: 100 * study.lost(row)),
        (scaling_pictures._best, study.SEARCHED, lambda row: 100 * row["mfu"]),
    ):
        rows = ROWS if draw is scaling_pictures._lost else DATA["best"]
        for model, axes in zip(MODELS, draw(DATA).axes, strict=True):
            for line, schedule in zip(axes.get_lines(), schedules, strict=True):
                found = [row for row in rows if (row["model"], row["schedule"]) == (model, schedule)]
                assert list(line.get_xdata()) == [row["gpus"] for row in found]
                assert list(line.get_ydata()) == [value(row) for row in found]


def test_what_the_page_says_of_a_flush():
    """The bubble of `flush` costs more than its reductions; for 13B and 175B, not for the others, that of `interleaved`
    less.
    """
    of = {(row["model"], row["schedule"], row["gpus"]): row["parts"] for row in ROWS}
    for model, num_gpus in (("13B", 2048), ("175B", 12_288), ("530B", 10_080), ("1T", 12_288)):
        parts = [of[model, schedule, num_gpus] for schedule in ("flush", "interleaved")]
        more = [each["fill and drain"] > each["reductions"] for each in parts]
        assert more == [True, model in ("530B", "1T")]


@pytest.mark.parametrize(
    ("model", "schedule", "replicas"),
    [("13B", "2bw", 128), ("175B", "interleaved", 192), ("530B", "interleaved", 56), ("1T", "flush", 32)],
)
def test_the_data_is_what_the_command_computes(model, schedule, replicas):
    """A cell of each model, computed again; one of them is refused, with the reason."""
    found = next(
        row for row in DATA["grown"] if (row["model"], row["schedule"], row["replicas"]) == (model, schedule, replicas)
    )
    assert_same(scaling.rounded(study.cell(MODELS[model], schedule, replicas)), found)


def test_the_memory_is_what_the_command_computes():
    """All schedules of a model."""
    found = [row for row in DATA["memory"] if row["model"] == "175B"]
    assert_same(scaling.rounded(list(study.memory(MODELS["175B"]))), found)


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("model", MODELS)
def test_all_data_is_what_the_command_computes(model):
    """Everything of a model, searches too."""
    computed = scaling.compute([MODELS[model]])
    for part in ("grown", "memory", "best"):
        assert_same(computed[part], [row for row in DATA[part] if row["model"] == model])


def assert_same(computed, found):
    """Equal but for the last of the digits that are written."""
    if isinstance(found, dict):
        assert computed.keys() == found.keys()
        for name, value in found.items():
            assert_same(computed[name], value)
    elif isinstance(found, list):
        assert len(computed) == len(found)
        for one, other in zip(computed, found, strict=True):
            assert_same(one, other)
    elif isinstance(found, float):
        assert computed == pytest.approx(found, rel=2e-3, abs=1e-9)
    else:
        assert computed == found


def test_parts_are_an_iteration():
    """What an iteration is divided into adds up to it."""
    for row in ROWS:
        assert sum(row["parts"].values()) == pytest.approx(row["seconds"], rel=2e-3)


def test_filling_and_draining_follow_the_law():
    """(p-1)/m of the computation under a flush, 1/v of that interleaved, nothing under 2bw; stages with an embedding or
    the loss take longer than the others, so the law holds within 12%.
    """
    for row in ROWS:
        model = MODELS[row["model"]]
        law = {"flush": 1.0, "interleaved": 1 / model.virtual, "2bw": 0.0}.get(row["schedule"])
        if law is None:
            continue
        expected = law * (model.pipeline - 1) / row["microbatches"]
        assert row["parts"]["fill and drain"] / row["parts"]["compute"] == pytest.approx(expected, rel=0.12, abs=1e-3)


def test_schedules_that_compute_alike_take_alike():
    """At the same split 2bw is never slower than interleaving, and that never slower than a flush; the more replicas,
    the more a flush loses.
    """
    of = {(row["model"], row["replicas"], row["schedule"]): row for row in ROWS}
    for (model, replicas, schedule), row in of.items():
        if schedule == "flush":
            interleaved, two_bw = (of.get((model, replicas, other)) for other in ("interleaved", "2bw"))
            assert interleaved is None or interleaved["seconds"] <= row["seconds"]
            assert two_bw is None or two_bw["seconds"] <= (interleaved or row)["seconds"]
    for model in MODELS:
        mfu = [row["mfu"] for row in ROWS if (row["model"], row["schedule"]) == (model, "flush")]
        assert mfu == sorted(mfu, reverse=True)


@pytest.mark.parametrize(
    "page",
    [
        "<!-- table: two -->\n<!-- end -->",
        "<!-- table: one -->\nold\n",
        "<!-- table: one -->\nold <!-- end\n-->",
        "<!-- table: one -->\n<!-- table: one -->\n<!-- end -->",
        "<!-- table: one -->\n<!-- end -->\n<!-- end -->",
    ],
)
def test_marks_and_tables_have_to_correspond(page):
    """A table without its place in the page, or a place without its table or its end, is an error."""
    with pytest.raises(ValueError, match=r"and the tables are \['one'\]; give each table both its marks"):
        scaling.page_with({"one": "| a |"}, page)


def test_a_table_takes_its_place():
    page = "<!-- table: one -->\nold\n<!-- end -->\n"
    assert scaling.page_with({"one": "| a |"}, page) == "<!-- table: one -->\n| a |\n<!-- end -->\n"
