"""Drawings of programs whose stages are copies: rows by the stages of the model, and borders where batches begin."""

from megatron.pipeline.draw import draw_timeline, timeline_text
from megatron.pipeline.draw.page import page_timeline
from megatron.pipeline.draw.scene import Scene, names_of_rows
from megatron.pipeline.program.program import Program
from megatron.pipeline.schedules.completion import completed
from megatron.pipeline.simulate import Costs, simulate

LOST = """\
# batches: 4 4
# copies: 0:1,3 0:0,2 1:0-3
0F1,0F3,0B1,0B3,0F5,0F7,0B5,0B7
1F0,1F2,1B0,1B2,1F4,1F6,1B4,1B6
2F0,2B0,2F1,2B1,2F2,2B2,2F3,2B3,2F4,2B4,2F5,2B5,2F6,2B6,2F7,2B7
"""

FOLDED = """\
# copies: 0:0 0:1 1:0,1 2:1 2:0
# rank_of_stage: 0 1 2 0 1
0F0,3F1,3B1,0B0
1F1,4F0,4B0,1B1
2F1,2F0,2B1,2B0
"""


def drawn(text: str, costs: Costs | None = None):
    return simulate(completed(Program.from_csv(text)), costs)


def test_rows_are_named_by_stages_of_the_model():
    """With the number of the copy; a rank with several stages by all of them."""
    assert names_of_rows(drawn(LOST)) == ["stage 0.0", "stage 0.1", "stage 1.0"]
    assert names_of_rows(drawn(FOLDED)) == ["0.0 2.0", "0.1 2.1", "1.0"]


def test_a_picture_has_these_names_and_a_border_for_each_batch():
    """A batch begins on each rank with the first forward there, whichever microbatch of the batch that is."""
    timeline = drawn(LOST, Costs(latency=0.25))
    axes = draw_timeline(timeline, lanes=True).axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["stage 0.0", "stage 0.1", "stage 1.0"]
    borders = Scene(timeline).borders
    assert {batch: [str(cell.instruction) for cell in cells] for batch, cells in borders.items()} == {
        0: ["0F1@0", "1F0@0", "2F0@0"],
        1: ["0F5@1", "1F4@1", "2F4@1"],
    }
    assert "stage 0.1" in page_timeline(timeline, name="lost").svg


def test_rows_may_have_other_names():
    """Beside which there is room for them."""
    names = ["rank 100 (15.6)", "rank 101 (16.6)", "rank 102 (17.6)"]
    usual, named = (draw_timeline(drawn(LOST), names=each).axes[0] for each in ((), names))
    assert [label.get_text() for label in named.get_yticklabels()] == names
    assert named.get_position().x0 > usual.get_position().x0


def test_text_of_several_stages_says_which_of_the_model():
    lines = timeline_text(drawn(FOLDED)).plain.splitlines()
    assert lines[0].startswith("0.0 2.0 |0F0") and "|2F1" in lines[0] and "3F1" not in lines[0]
