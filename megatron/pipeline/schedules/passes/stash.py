"""Send inputs that have to wait to the host behind their forward, and bring them back before their recompute.

Where weights live on the host, a stage's recompute stands a whole batch of each stage above it behind its forward. On
the device the inputs of all stages would wait that long; what has to stay is what stages exchange next.

    2F0 2OFFLOAD0 2F1 2OFFLOAD1 ... 3B0 2RELOAD0 3B1 2RELOAD1 3FREE 1FETCH 2R0 2B0 2R1 2B1

What stays: the first stage has no input, as tokens are data; without a recompute the graph refers to it; the inputs of
the run that turns around wait for no other stage's computations; and some would have to come back before they have left
(with one microbatch, that of the stage below the last).

RELOADs stand two backwards ahead, so that two inputs are there, or come, beside the one in use. In their lane they
share the way to the device with FETCHes. At the beginning of a run FREE makes room and the FETCH of the next stage
follows at once; a RELOAD behind it waits for all of it, and the run, too. So the first three of a run stand ahead of
that FETCH, two of them in the run before. With C for a forward and 3C for a backward with its recompute, X for a FETCH
and A for a RELOAD, nobody waits where X + 2A <= 9C; else each stage does for what is more. One backward ahead
(`ahead=1`), as is natural where nothing else is in the lane, that is 6C; each one more takes an input of memory.
"""

from megatron.pipeline.program.extent import Extent
from megatron.pipeline.program.instruction import BEGINS_BACKWARD, Instruction, Kind
from megatron.pipeline.program.lane_order import RELOADED_AHEAD
from megatron.pipeline.schedules.passes import Segment, Segments

_BETWEEN = 2  # computations from a forward to its RELOAD: the OFFLOAD has the time of one


def add_stash(segments: Segments, extent: Extent, *, ahead: int = RELOADED_AHEAD) -> Segments:
    """The segments of a rank, which hold computations and what brings their weights, each of one batch, with what moves
    their inputs; `ahead`: how many backwards before its own an input is asked for.
    """
    return [_with_moves(segment, extent, ahead) for segment in segments]


def _with_moves(segment: Segment, extent: Extent, ahead: int) -> Segment:
    heads, units = _units(segment)
    forwards = {_saved(unit): at for at, unit in enumerate(units) if unit.kind is Kind.FORWARD}
    behind: dict[int, Segment] = {}  # position in the segment -> what stands behind it
    for at, unit in enumerate(units):
        if unit.kind not in BEGINS_BACKWARD or unit.stage == 0 or not extent.recomputes(unit.stage):
            continue
        begun, back = forwards[_saved(unit)], at - ahead
        if back - begun >= _BETWEEN and any(each.stage != unit.stage for each in units[begun:at]):
            behind.setdefault(heads[begun], []).append(Instruction(Kind.OFFLOAD, *_saved(unit)))
            behind.setdefault(heads[back - 1], []).append(Instruction(Kind.RELOAD, *_saved(unit)))
    return [each for at, word in enumerate(segment) for each in (word, *behind.get(at, ()))]


def _units(segment: Segment) -> tuple[list[int], Segment]:
    """The computations of a segment but for recomputes, which belong to the backwards behind, and their positions."""
    found = [
        (at, each) for at, each in enumerate(segment) if each.kind.is_computation and each.kind is not Kind.RECOMPUTE
    ]
    return [at for at, _ in found], [each for _, each in found]


def _saved(instruction: Instruction) -> tuple[int, int]:
    return instruction.stage, instruction.microbatch
