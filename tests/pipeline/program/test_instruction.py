"""The text form of an instruction is read strictly and written back alike."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.pipeline.program.instruction import COMPUTATIONS, TRANSFERS, UPDATES, Instruction, Kind

numbers = st.integers(0, 10**6)


@st.composite
def instructions(draw: st.DrawFn) -> Instruction:
    kind = draw(st.sampled_from(Kind))
    if kind in UPDATES:
        return Instruction(kind, draw(numbers), version=draw(numbers))
    version = draw(st.none() | numbers) if kind.is_computation else None
    ahead = {}
    if kind is Kind.FORWARD and version is not None:
        ahead[draw(st.sampled_from(["horizon", "unstepped"]))] = draw(numbers)
    return Instruction(kind, draw(numbers), draw(numbers), version, **ahead)


@given(instructions())
def test_text_round_trip(instruction: Instruction):
    """Every instruction is read back as it was written."""
    assert Instruction.parse(str(instruction)) == instruction


@pytest.mark.parametrize(
    ("text", "instruction"),
    [
        ("2F5@1", Instruction(Kind.FORWARD, 2, 5, 1)),
        ("2F5@1+2", Instruction(Kind.FORWARD, 2, 5, 1, horizon=2)),
        ("2F5@1~3", Instruction(Kind.FORWARD, 2, 5, 1, unstepped=3)),
        ("2B5@1", Instruction(Kind.BACKWARD, 2, 5, 1)),
        ("2I5", Instruction(Kind.BACKWARD_INPUT, 2, 5)),
        ("2W5", Instruction(Kind.BACKWARD_WEIGHT, 2, 5)),
        ("2R5", Instruction(Kind.RECOMPUTE, 2, 5)),
        ("12SEND_F345", Instruction(Kind.SEND_F, 12, 345)),
        ("3RECV_B0", Instruction(Kind.RECV_B, 3, 0)),
        ("7RETURN3", Instruction(Kind.RETURN, 7, 3)),
        ("0REDUCE_EMBED@4", Instruction(Kind.REDUCE_EMBED, 0, version=4)),
        ("2STEP@4", Instruction(Kind.STEP, 2, version=4)),
    ],
)
def test_words(text: str, instruction: Instruction):
    """The words mean what the table of instructions says."""
    assert Instruction.parse(text) == instruction
    assert str(instruction) == text


@pytest.mark.parametrize(
    "text",
    ["", "F0", "0F", "0F1garbage", " 0F1", "0F1\n", "0f1", "-1F0", "0F-1", "01F0", "0F01", "0X1", "0F1@", "0F1@x",
     "0F1@-1", "0SEND_F", "0SEND_F1@2", "0STEP", "0STEP1", "0STEP1@1", "0REDUCE_NORM", "1.0F0", "0F1,0F2",
     "0F1+1", "0F1@1+0", "0F1@1+", "0F1@1-1", "0B1@1+1",
     "0F1~1", "0F1@1~0", "0F1@1~", "0F1@1+1~1", "0F1@1~1+1", "0F1@1~01", "0B1@1~1", "0I1@1~1", "0STEP@1~1",
     "0R1@1+1", "0STEP@1+1", "\u0661F0", "0F\u0661", "(0F1;1B2)OVERLAP_F_B", "0UNSHARD"],
)  # fmt: skip
def test_anything_else_is_refused(text: str):
    """What is not exactly one instruction is an error that quotes it."""
    with pytest.raises(ValueError, match=r"is not an instruction|needs a microbatch|takes|only a forward") as caught:
        Instruction.parse(text)
    assert repr(text) in str(caught.value)


def test_kinds_are_computations_transfers_or_updates():
    """Every kind is exactly one of the three."""
    assert frozenset(Kind) == COMPUTATIONS | TRANSFERS | UPDATES
    assert len(Kind) == len(COMPUTATIONS) + len(TRANSFERS) + len(UPDATES)


def test_shifted():
    """Shifting moves what an instruction has of microbatch and version, and nothing else."""
    assert Instruction(Kind.FORWARD, 1, 2, 3).shifted(microbatches=4, versions=5) == Instruction(Kind.FORWARD, 1, 6, 8)
    assert str(Instruction.parse("1F2@3+4").shifted(microbatches=4, versions=5)) == "1F6@8+4"
    assert str(Instruction.parse("1F2@3~4").shifted(microbatches=4, versions=5)) == "1F6@8~4"
    assert Instruction(Kind.SEND_F, 1, 2).shifted(microbatches=4, versions=5) == Instruction(Kind.SEND_F, 1, 6)
    assert Instruction(Kind.STEP, 1, version=3).shifted(microbatches=4, versions=-1) == Instruction(
        Kind.STEP, 1, version=2
    )
