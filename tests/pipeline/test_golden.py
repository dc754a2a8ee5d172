"""The programs of the papers' figures, instruction for instruction, and what the papers say about them.

Figures 1 to 3 are those of PipeDream-2BW, which numbers inputs from 1, so its input k is microbatch k-1. zb-h1 and zbv
are those of Qi et al. 2023 for 4 devices and 8 microbatches. Two programs more are 2bw's with predicted weights, and
three have weights on the host, which no paper draws.
"""

from itertools import groupby
from pathlib import Path

import pytest

from megatron.pipeline.check import check
from megatron.pipeline.program.instruction import UPDATES, Instruction, Kind
from megatron.pipeline.program.lane_order import Residency
from megatron.pipeline.program.program import Program
from megatron.pipeline.schedules import Schedule
from tests.pipeline.strategies import kinds_of

GOLDEN = Path(__file__).parent / "golden"

FILES = {
    "figure1b_pipedream": ("pipedream", 4, (1,) * 9),
    "figure2_2bw": ("2bw", 4, (4, 4, 4, 4)),
    "figure3_gpipe": ("gpipe", 2, (4, 4)),
    "figure3_flush": ("flush", 2, (4, 4)),
    "bpipe_figure4": ("bpipe", 4, (8,)),
    "bpipe_figure10": ("interleaved", 8, (8,)),
    "provisional_p2_m4": ("2bw", 2, (4, 4, 4)),
    "provisional_uniform_p2_m4": ("2bw", 2, (4, 4, 4)),
    "interleaved_p2_v2_m4": ("interleaved", 4, (4,)),
    "interleaved_p4_v2_m8": ("interleaved", 8, (8,)),
    "zb_h1_p4_m8": ("zb-h1", 4, (8,)),
    "zbv_p4_m8": ("zbv", 8, (8,)),
    "zb_h2_p4_m10": ("zb-h2", 4, (10,)),
    "interleaved_zb_p2_v2_m4": ("interleaved-zb", 4, (4,)),
    "v_half_p4_m8": ("v-half", 8, (8,)),
    "v_min_p4_m8": ("v-min", 8, (8,)),
    "l2l_p1_n4_m2": ("l2l", 4, (2, 2)),
    "l2l_eager_p1_n4_m2": ("l2l", 4, (2, 2)),
    "l2l_p2_n4_m2": ("l2l", 4, (2, 2)),
}
CHOICES = {
    **{name: {"num_virtual_stages": 2} for name in FILES if "_v2_" in name},
    "bpipe_figure10": {"num_virtual_stages": 2, "balance": True},
    "provisional_p2_m4": {"predict": True, "tied_embeddings": True},
    "provisional_uniform_p2_m4": {"predict": True, "tied_embeddings": True, "provisional_microbatches": 1},
    "l2l_p1_n4_m2": {"num_virtual_stages": 4},
    "l2l_eager_p1_n4_m2": {"num_virtual_stages": 4, "residency": Residency(2, "eager"), "tied_embeddings": True},
    "l2l_p2_n4_m2": {"num_virtual_stages": 2, "data_parallel": True},
}

# The figures' rows, read off by hand: f is a forward, b a backward, inputs counted from 1.
FIGURES = {
    "figure2_2bw": [
        "1f 2f 3f 4f 1b 5f 2b 6f 3b 7f 4b 8f 5b 9f 6b 10f 7b 11f 8b 12f 9b 13f 10b 14f 11b 15f 12b 16f 13b 14b 15b 16b",
        "1f 2f 3f 1b 4f 2b 5f 3b 6f 4b 7f 5b 8f 6b 9f 7b 10f 8b 11f 9b 12f 10b 13f 11b 14f 12b 15f 13b 16f 14b 15b 16b",
        "1f 2f 1b 3f 2b 4f 3b 5f 4b 6f 5b 7f 6b 8f 7b 9f 8b 10f 9b 11f 10b 12f 11b 13f 12b 14f 13b 15f 14b 16f 15b 16b",
        "1f 1b 2f 2b 3f 3b 4f 4b 5f 5b 6f 6b 7f 7b 8f 8b 9f 9b 10f 10b 11f 11b 12f 12b 13f 13b 14f 14b 15f 15b 16f 16b",
    ],
    "figure3_gpipe": [
        "1f 2f 3f 4f 1b 2b 3b 4b 5f 6f 7f 8f 5b 6b 7b 8b",
        "1f 2f 3f 4f 1b 2b 3b 4b 5f 6f 7f 8f 5b 6b 7b 8b",
    ],
    "figure3_flush": [
        "1f 2f 1b 3f 2b 4f 3b 4b 5f 6f 5b 7f 6b 8f 7b 8b",
        "1f 1b 2f 2b 3f 3b 4f 4b 5f 5b 6f 6b 7f 7b 8f 8b",
    ],
    # b is I and w is W; every device saves 4 microbatches
    "zb_h1_p4_m8": [
        "1f 2f 3f 4f 1b 1w 5f 2b 2w 6f 3b 3w 7f 4b 4w 8f 5b 5w 6b 6w 7b 7w 8b 8w",
        "1f 2f 3f 1b 4f 2b 1w 5f 3b 2w 6f 4b 3w 7f 5b 4w 8f 6b 5w 7b 6w 8b 7w 8w",
        "1f 2f 1b 3f 2b 4f 3b 1w 5f 4b 2w 6f 5b 3w 7f 6b 4w 8f 7b 5w 8b 6w 7w 8w",
        "1f 1b 2f 2b 3f 3b 4f 4b 1w 5f 5b 2w 6f 6b 3w 7f 7b 4w 8f 8b 5w 6w 7w 8w",
    ],
}

WORDS = {Kind.FORWARD: "f", Kind.BACKWARD: "b", Kind.BACKWARD_INPUT: "b", Kind.BACKWARD_WEIGHT: "w"}


def golden(name: str) -> Program:
    return Program.from_csv((GOLDEN / f"{name}.csv").read_text())


@pytest.mark.parametrize("name", FILES)
def test_golden_files(name: str):
    """The builders give the golden files, instruction for instruction, and the checker proves them."""
    preset, num_stages, batches = FILES[name]
    program = Schedule.preset(preset, num_stages=num_stages, **CHOICES.get(name, {})).build(batches)
    assert golden(name) == program
    check(program)


@pytest.mark.parametrize("name", FIGURES)
def test_order_is_the_figures(name: str):
    """Every worker computes in the order of the figure."""
    for row, figure in zip(golden(name).rows, FIGURES[name], strict=True):
        computations = kinds_of(row, *WORDS)
        assert " ".join(f"{each.microbatch + 1}{WORDS[each.kind]}" for each in computations) == figure


def test_h1_saves_as_much_on_every_device_as_1f1b_on_the_first():
    report = check(golden("zb_h1_p4_m8"), max_saved=[4] * 4)
    assert report.peak_saved_microbatches == (4,) * 4
    assert report.peak_deferred_microbatches == (1, 2, 3, 4)


def test_figure_2_first_use_of_new_weights():
    """Input 9 is the first to use the weights made from inputs 1 to 4, in forward and backward, at every stage."""
    for stage, row in enumerate(golden("figure2_2bw").rows):
        for kind in (Kind.FORWARD, Kind.BACKWARD):
            users = [each.microbatch + 1 for each in kinds_of(row, kind) if each.version == 1]
            assert users == [9, 10, 11, 12]
        made = row.index(Instruction(Kind.STEP, stage, version=1))
        inputs_before = {each.microbatch + 1 for each in kinds_of(row[:made], Kind.BACKWARD)}
        assert inputs_before >= {1, 2, 3, 4}
        assert kinds_of(row[made:], Kind.FORWARD)[0].microbatch + 1 == 9


def test_figure_3_memory():
    """GPipe stashes a whole batch, PipeDream-Flush at most 2 microbatches on 2 stages."""
    assert check(golden("figure3_gpipe")).peak_saved_microbatches == (4, 4)
    assert check(golden("figure3_flush")).peak_saved_microbatches == (2, 1)


def test_figure_1b_weight_stashing():
    """PipeDream: a stage's forward uses its newest weights, its backward the same ones; stage s keeps p-s versions."""
    program = golden("figure1b_pipedream")
    for stage, row in enumerate(program.rows):
        for each in kinds_of(row, Kind.FORWARD, Kind.BACKWARD):
            assert each.version == max(0, each.microbatch - (3 - stage))
    assert check(program).live_versions == (4, 3, 2, 1)


def test_bpipe_figure_4():
    """BPipe, Figure 4 and section 3.2: stage 0 evicts 1, 3 and 5 to stage 3, and has each back before its backward.

    1 while F2 runs; 3 by the end of B0, because 1 is loaded while F4 runs; 5 while B2 runs, because 3 is loaded while
    F6 runs; 5 comes back in the cool-down, after B4 has made room.
    """
    rows = golden("bpipe_figure4").rows
    kinds = (Kind.FORWARD, Kind.BACKWARD, Kind.EVICT, Kind.ACCEPT, Kind.RETURN, Kind.LOAD)
    words = [" ".join(f"{each.kind.value}{each.microbatch}" for each in kinds_of(row, *kinds)) for row in rows]
    assert words[0] == ("F0 F1 EVICT1 F2 F3 EVICT3 B0 LOAD1 F4 B1 F5 EVICT5 B2 LOAD3 F6 B3 F7 B4 LOAD5 B5 B6 B7")
    assert words[3] == (
        "ACCEPT1 ACCEPT3 RETURN1 ACCEPT5 RETURN3 RETURN5 F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7"
    )
    report = check(golden("bpipe_figure4"), max_saved=[3, 3, 2, 3])
    assert report.peak_saved_microbatches == (3, 3, 2, 3)
    assert report.evicted_microbatches == (3, 0, 0, 0)


def test_bpipe_figure_10():
    """BPipe, appendix A: rank 0 evicts two microbatches to rank 3 in its warm-up, and no rank saves more than 9.

    Of the 11 that it would save before its first backward, these are needed last among those that it holds: 3 of its
    first stage when 4 begins, then 4 itself. They come back beside the backward before their own.
    """
    rows = golden("bpipe_figure10").rows
    kinds = (Kind.FORWARD, Kind.BACKWARD, Kind.EVICT, Kind.ACCEPT, Kind.RETURN, Kind.LOAD)
    words = [
        " ".join(f"{each.stage}{each.kind.value}{each.microbatch}" for each in kinds_of(row, *kinds)) for row in rows
    ]
    assert words[0] == (
        "0F0 0F1 0F2 0F3 4F0 4F1 4F2 4F3 0EVICT3 0F4 0EVICT4 0F5 0F6 4B0 0F7 4B1 4F4 4B2 4F5 4B3 4F6 0B0 4F7 0B1 "
        "0LOAD3 0B2 0B3 4B4 4B5 4B6 0LOAD4 4B7 0B4 0B5 0B6 0B7"
    )
    assert words[3].startswith("7ACCEPT3 7ACCEPT4 7RETURN3 7RETURN4 3F0 3F1 3F2 3F3 7F0 7B0 7F1 7B1")
    report = check(golden("bpipe_figure10"), max_saved_on_rank=[9, 9, 7, 9])
    assert report.peak_saved_on_rank == (9, 9, 7, 7)
    assert report.evicted_microbatches == (2, 0, 0, 0, 0, 0, 0, 0)


# What stands between the last backward that is read of the first batch and the first forward of the second; * stands
# for computations and transfers.
READING = {
    "provisional_p2_m4": [
        "0B2@0 0REDUCE_PARTIAL_EMBED@1 0PREDICT@1 * 0F4@1",
        "1B2@0 * 1REDUCE_PARTIAL_EMBED@1 * 1PREDICT@1 1REDUCE_EMBED@1 1REDUCE_NORM@1 * 1F4@1",
    ],
    "provisional_uniform_p2_m4": [
        "0B0@0 0HOLD@1 0REDUCE_PARTIAL_EMBED@1 * 0PREDICT@1 * 0F4@1",
        "1B0@0 * 1HOLD@1 1REDUCE_PARTIAL_EMBED@1 * 1PREDICT@1 1REDUCE_EMBED@1 1REDUCE_NORM@1 * 1F4@1",
    ],
}


@pytest.mark.parametrize("name", READING)
def test_predictions_stand_behind_what_they_read(name: str):
    """Three of four microbatches on the first stage and all on the last one, whose chain waits; or one on both, which
    is kept. Both read as many of the embedding, and no forward of a batch precedes its prediction.
    """
    program = golden(name)
    for row, expected in zip(program.rows, READING[name], strict=True):
        first, *_, last = expected.split()
        between = row[row.index(Instruction.parse(first)) : row.index(Instruction.parse(last)) + 1]
        words = ["*" if each.kind not in UPDATES else str(each) for each in between[1:-1]]
        assert [first, *(word for word, _ in groupby(words)), last] == expected.split()
    for row in program.rows:
        for each in kinds_of(row, Kind.FORWARD, Kind.BACKWARD):
            assert each.version == each.microbatch // 4
        for version in (1, 2):
            predicted = row.index(next(each for each in kinds_of(row, Kind.PREDICT) if each.version == version))
            assert kinds_of(row[predicted:], Kind.FORWARD)[0].microbatch == 4 * version
    assert check(program).live_versions == (2, 2)


def test_l2l_relays():
    """L2L, Algorithm 2: a layer on all microbatches before the next one; backwards recompute from the stored input, and
    gradients leave before the next layer (section 2.1). Here weights come beside the layer before.
    """
    [row] = golden("l2l_eager_p1_n4_m2").rows
    batch = row[: row.index(Instruction.parse("0STEP@1")) + 1]
    assert " ".join(str(each).replace("@0", "") for each in batch) == (
        "0FETCH 1FETCH 0F0 0F1 0FREE 2FETCH 1F0 1F1 1FREE 3FETCH 2F0 2F1 3F0 3B0 3F1 3B1 3STORE_GRAD@1 "
        "3FREE 1FETCH 2R0 2B0 2R1 2B1 2STORE_GRAD@1 2UPDATE@1 "
        "2FREE 0FETCH 1R0 1B0 1R1 1B1 1STORE_GRAD@1 1UPDATE@1 "
        "1FREE 0R0 0B0 0R1 0B1 0STORE_GRAD@1 0REDUCE_EMBED@1 0UPDATE@1 3UPDATE@1 0REDUCE_NORM@1 0FREE 0STEP@1"
    )
    report = check(golden("l2l_eager_p1_n4_m2"))
    assert (report.num_fetches, report.peak_resident_stages) == ((12,), (2,))


def test_l2l_deferred_updates_follow_the_step():
    """Ascending, so that the next batch, which fetches the first stages first, waits for their updates alone."""
    for name, stages in (("l2l_p1_n4_m2", ["0123"]), ("l2l_p2_n4_m2", ["02", "13"])):
        for row, owned in zip(golden(name).rows, stages, strict=True):
            border = row.index(Instruction.parse(f"{owned[0]}STEP@1")) + 1
            expected = [f"{stage}UPDATE@1" for stage in owned] + [f"{stage}FETCH@1" for stage in owned[:2]]
            assert [str(each) for each in row[border : border + len(expected)]] == expected
