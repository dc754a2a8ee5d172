"""A word of a program is drawn by its row of the words' table: no renderer knows one by name."""

import ast
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest

from megatron.pipeline import draw
from megatron.pipeline.draw import draw_timeline, timeline_text
from megatron.pipeline.draw.page import page_timeline
from megatron.pipeline.draw.scene import Scene, signs_of
from megatron.pipeline.program.instruction import Kind
from megatron.pipeline.schedules import Schedule
from megatron.pipeline.simulate import Costs, simulate


@pytest.mark.parametrize("renderer", ["figure", "page", "text", "colours"])
def test_renderers_name_no_word(renderer):
    """What they draw they ask of the rows, or of sets that are made of these."""
    nodes = ast.walk(ast.parse((Path(draw.__path__[0]) / f"{renderer}.py").read_text()))
    assert not [node.attr for node in nodes if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "Kind"]


def test_a_row_decides_how_its_word_is_drawn():
    """Another name, sign and colour in the row of HOLD are in the picture, on the page, in the text and in legends."""
    kept = Schedule.preset("2bw", num_stages=2, predict=True, provisional_microbatches=1)
    timeline = simulate(kept.build((4, 4, 4)), Costs(hold=2.0))
    row = replace(Kind.HOLD.row, name="a new word", sign="=", colour="brick")
    assert "=1" not in timeline_text(timeline, width=400).plain
    with mock.patch.dict(vars(Kind.HOLD), {"row": row}):
        figure = draw_timeline(timeline)
        assert "a new word" in [text.get_text() for text in figure.legends[0].get_texts()]
        assert "=1" in [text.get_text() for text in figure.axes[0].texts]
        page, text = page_timeline(timeline, name="2bw"), timeline_text(timeline, width=400)
        assert "#b3261e" in page.svg and "a new word" in [sign.meaning for sign in page.signs]
        assert "=1" in text.plain and "red" in {span.style.color.name for span in text.spans if span.style.color}
        assert [sign.form for sign in signs_of([Scene(timeline)]) if sign.meaning == "a new word"] == ["tick"]
