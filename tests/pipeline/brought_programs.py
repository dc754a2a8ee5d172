"""Programs that users might bring, and no preset has: as texts, by name, all for batches of 4 microbatches."""

from collections import Counter
from pathlib import Path

from megatron.pipeline.program.instruction import (
    COMPUTATIONS,
    RECEIVES,
    UPDATES,
    USES_SAVED,
    Instruction,
    Kind,
    Row,
)
from megatron.pipeline.program.program import Program
from megatron.pipeline.schedules import Schedule

TORCH = """\
0F0,0F1,0F2,,,0B0,0B1,0F3,,0B2,0B3
,1F0,1F1,1B0,1B1,1F2,1B2,,1F3,1B3
"""
"""Two ranks, backwards in pairs; with torch's bubbles, and nothing but computations."""

HALVES = """\
0F0,0F1,0F2,0I0,0I1,0W0,0F3,0W1,0I2,0I3,0W2,0W3
1F0,1I0,1F1,1I1,1W0,1F2,1I2,1W1,1F3,1I3,1W2,1W3
"""
"""Two ranks, backwards in halves."""

WHOLE = """\
0RECV_B0,0RECV_B1,0F0@0,0F1@0,0SEND_F0,0SEND_F1,0F2@0,0SEND_F2,0B0@0,0RECV_B2,0RECV_B3,0B1@0,0F3@0,0SEND_F3,0B2@0,\
0B3@0,0REDUCE_NORM@1,0STEP@1
1RECV_F0,1RECV_F1,1F0@0,1F1@0,1RECV_F2,1B0@0,1SEND_B0,1B1@0,1RECV_F3,1SEND_B1,1F2@0,1B2@0,1F3@0,1SEND_B2,1B3@0,\
1SEND_B3,1REDUCE_NORM@1,1STEP@1
"""
WHOLE = f"# weights: flush\n{WHOLE}"
"""The same kind of order, with transfers, reductions and steps at places of its own."""

RHYTHM = """\
# weights: 2bw
# batches: 4 4 4 4 4 4 4
0F0,0F1,0F2,0B0,0F3,0B1,0F4,0B2,0B3,0F5,0F6,0B4,0F7,0B5,0F8,0B6,0F9,0B7,0F10,0B8,0F11,0B9,0F12,0B10,0B11,0F13,0F14,\
0B12,0F15,0B13,0F16,0B14,0F17,0B15,0F18,0B16,0F19,0B17,0F20,0B18,0B19,0F21,0F22,0B20,0F23,0B21,0F24,0B22,0F25,0B23,\
0F26,0B24,0F27,0B25,0B26,0B27
1F0,1F1,1B0,1F2,1B1,1F3,1B2,1B3,1F4,1F5,1B4,1F6,1B5,1F7,1B6,1F8,1B7,1F9,1B8,1F10,1B9,1F11,1B10,1B11,1F12,1F13,1B12,\
1F14,1B13,1F15,1B14,1F16,1B15,1F17,1B16,1F18,1B17,1F19,1B18,1B19,1F20,1F21,1B20,1F22,1B21,1F23,1B22,1F24,1B23,1F25,\
1B24,1F26,1B25,1B26,1F27,1B27
"""
"""Two ranks under 2bw: behind the first batch, what they do repeats itself after two."""

FOLDED = """\
# weights: 2bw
# batches: 4 4 4 4 4
# rank_of_stage: 1 0 0 1
1F0,2F0,1F1,1F2,2F1,2B0,1B0,1F3,2B1,1B1,1F4,2F2,2F3,2B2,2F4,1B2,1F5,2B3,2F5,1B3,1F6,2B4,1B4,1F7,2B5,1B5,1F8,2F6,2F7,\
2B6,2F8,1B6,1F9,2B7,2F9,1B7,1F10,2B8,1B8,1F11,2B9,1B9,1F12,2F10,2F11,2B10,2F12,1B10,1F13,2B11,2F13,1B11,1F14,2B12,\
1B12,1F15,2B13,1B13,1F16,2F14,2F15,2B14,2F16,1B14,1F17,2B15,2F17,1B15,1F18,2B16,1B16,1F19,2B17,2F18,1B17,2F19,2B18,\
2B19,1B18,1B19
0F0,0F1,3F0,0F2,3B0,0F3,3F1,3B1,0B0,0F4,0B1,0F5,3F2,3B2,3F3,3F4,3B3,0B2,0F6,3B4,3F5,0B3,0F7,3B5,0B4,0F8,0B5,0F9,3F6,\
3B6,3F7,3F8,3B7,0B6,0F10,3B8,3F9,0B7,0F11,3B9,0B8,0F12,0B9,0F13,3F10,3B10,3F11,3F12,3B11,0B10,0F14,3B12,3F13,0B11,\
0F15,3B13,0B12,0F16,0B13,0F17,3F14,3B14,3F15,3F16,3B15,0B14,0F18,3B16,3F17,0B15,0F19,3B17,0B16,3F18,0B17,3F19,3B18,\
3B19,0B18,0B19
"""
"""Four stages on two ranks, the outer ones on rank 1, under 2bw."""


SWAPS = """\
0F0,0F1,0SWAP_OUT1,0F2,0SWAP_OUT2,0F3,0B0,0SWAP_IN1,0B1,0SWAP_IN2,0B2,0B3
1F0,1F1,1SWAP_OUT1,1F2,1B0,1F3,1SWAP_IN1,1B1,1B2,1B3
"""
"""Two ranks that copy saved activations to the host and back."""


KEPT = f"""\
# recompute: yes
# not_recomputed: 1
# kept: 0.0 0.2
{TORCH}"""
"""The first stage recomputes microbatches 1 and 3 of each batch, and the last stage none."""

KEPT_AND_SWAPS = """\
# recompute: yes
# kept: 0.0 0.1 0.3 1.1 1.2
0F0,0F1,0SWAP_OUT1,0F2,0SWAP_OUT0,0F3,0SWAP_OUT3,0SWAP_IN0,0B0,0SWAP_IN1,0R2,0B1,0SWAP_IN3,0B2,0B3
1F0,1F1,1R0,1B0,1F2,1SWAP_OUT2,1B1,1F3,1SWAP_IN2,1B2,1R3,1B3
"""
"""The ranks recompute one microbatch of four, and two, and copy some of the others to the host."""


KEPT_AND_EVICTIONS = """\
# recompute: yes
# kept: 0.0 0.1 0.3 1.1
0F0,0F1,0EVICT1,0F2,0F3,0EVICT3,0B0,0LOAD1,0B1,0R2,0LOAD3,0B2,0B3
1ACCEPT1,1ACCEPT3,1RETURN1,1RETURN3,1F0,1R0,1B0,1F1,1B1,1F2,1R2,1B2,1F3,1R3,1B3
"""
"""The first rank recomputes one microbatch, and two of the others wait on the last rank."""


def swapped(program: Program, *, ahead: int = 1) -> Program:
    """The program with the activations of every second microbatch copied to the host behind its forward, and back
    `ahead` computations before they are used. The first forwards of a stage stay.
    """
    return program.with_rows(tuple(_swapped(row, ahead) for row in program.rows))


def _swapped(row: Row, ahead: int) -> Row:
    result: list[Instruction] = []
    seen, away = Counter(), set()
    for each in row:
        key = each.stage, each.microbatch
        if each.kind in USES_SAVED and key in away:
            away.discard(key)
            out = Instruction(Kind.SWAP_OUT, *key)
            computations = [at for at, other in enumerate(result) if other.kind in COMPUTATIONS]
            result.insert(max([result.index(out) + 1, *computations[-ahead:][:1]]), Instruction(Kind.SWAP_IN, *key))
        result.append(each)
        if each.kind is Kind.FORWARD:
            seen[each.stage] += 1
            if each.microbatch % 2 and seen[each.stage] > 1:
                away.add(key)
                result.append(Instruction(Kind.SWAP_OUT, *key))
    return tuple(result)


def hurried(program: Program, places: int = 3) -> Program:
    """The program with its receives earlier in their rows, also where the batch before is still to be begun, and each
    STEP right behind the last reduction of its chain.
    """
    return program.with_rows(tuple(_hurried(row, places) for row in program.rows))


def _hurried(row: Row, places: int) -> Row:
    result: list[Instruction] = []
    for each in row:
        if each.kind is Kind.STEP:
            chain = [at for at, other in enumerate(result) if other.version == each.version and other.kind in UPDATES]
            result.insert(chain[-1] + 1, each)
            continue
        at = len(result)
        if each.kind in RECEIVES:
            last = max((at for at, other in enumerate(result) if other.kind in RECEIVES), default=-1)
            at = max(last + 1, at - places)
        result.insert(at, each)
    return tuple(result)


def hurried_2bw(num_stages: int = 2, num_batches: int = 4, **choices: object) -> str:
    """A text of 2bw's computations, each with the other words at places of their own."""
    schedule = Schedule.preset("2bw", num_stages=num_stages, **choices)
    return hurried(schedule.build((4,) * num_batches)).to_csv()


def written(folder: Path, text: str) -> Path:
    """A file with the text."""
    path = folder / "program.csv"
    path.write_text(text)
    return path
