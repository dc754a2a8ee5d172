"""The passes for weights that live on the host: fetch each stage's weights before it computes, send inputs that have to
wait to the host, and let the host update each stage.

**Weights (`add_residency`).** A row is a sequence of *runs*, computations of one stage one after another. Before a run
those stages are to be resident whose runs come next: as many different ones, from this run on, as there is room for.
What is resident and not among them is freed, and what is missing is fetched, in the order of use. So a fetch stands
right behind the FREE that makes room for it, and the copy runs beside the run that follows:

    0FETCH 1FETCH 0F0 0F1 0FREE 2FETCH 1F0 1F1 2F0 2B0 2F1 2B1 2FREE 0FETCH 1R0 1B0 1R1 1B1 1FREE 0R0 0B0 0R1 0B1 0FREE

On one rank with N stages, of which K are resident, the last K stay where the relay turns around, so a batch fetches
2N - K of them, however many microbatches it has. Nothing stays over a batch's border: the next batch uses other
weights, or the run may be drained there.

**Inputs (`add_stash`).** A stage's recompute stands a whole batch of each stage above it behind its forward. On
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

**Gradients (`add_host_updates`).** Where gradients stay on the device, a rank reduces those of all its stages together,
after its last backward (see `updates`). Here a stage's own have to leave before the stage after the next one computes
its backwards. So reduction, STORE_GRAD and UPDATE are of one stage, and stand behind its own last backward:

    eager      1B7 1REDUCE_GRAD@1 1STORE_GRAD@1 1UPDATE@1   0B0 ... 0STORE_GRAD@1 0UPDATE@1 0REDUCE_NORM@1 0STEP@1
    deferred   1B7 1REDUCE_GRAD@1 1STORE_GRAD@1   0B0 ... 0STORE_GRAD@1 0REDUCE_NORM@1 0STEP@1 0UPDATE@1 1UPDATE@1

REDUCE_NORM and STEP stay one a rank: one norm and one overflow decide about all, and one report is sent. The deferred
updates ascend, so that the next batch, which begins with the lowest stage, waits for that one alone.

Tied embeddings: REDUCE_EMBED stands behind the rank's last backward on both ranks. The last stage's gradients come
first and the first stage's last, so right behind its own STORE_GRAD it would keep a rank's later reductions waiting in
their lane for the end of the batch, and soon the rank for a gradient buffer: a circle. The updates of both ends stand
behind it.
"""

from itertools import groupby

from megatron.pipeline.program.extent import Extent
from megatron.pipeline.program.instruction import BEGINS_BACKWARD, ENDS_BACKWARD, Instruction, Kind
from megatron.pipeline.program.lane_order import RELOADED_AHEAD
from megatron.pipeline.schedules.passes import Segment, Segments


def add_residency(segments: Segments, extent: Extent) -> Segments:
    """The segments of a rank, which hold computations alone, each of one batch, with what brings their weights."""
    return [_with_weights(segment, extent) if segment else [] for segment in segments]


def _with_weights(segment: Segment, extent: Extent) -> Segment:
    batch = extent.batch_of(segment[0].microbatch)
    version = extent.weights.version_of(batch, newest=batch)
    runs = [list(run) for _, run in groupby(segment, key=lambda each: each.stage)]
    stages = [run[0].stage for run in runs]
    resident: list[int] = []
    result: Segment = []
    for index, run in enumerate(runs):
        wanted = _next(stages, index, extent.residency.stages)
        result += [Instruction(Kind.FREE, stage, version=version) for stage in resident if stage not in wanted]
        result += [Instruction(Kind.FETCH, stage, version=version) for stage in wanted if stage not in resident]
        result += run
        resident = wanted
    return result + [Instruction(Kind.FREE, stage, version=version) for stage in resident]


def _next(stages: list[int], first: int, count: int) -> list[int]:
    """The next `count` different stages from `first` on, or all that there are, in their order."""
    found: dict[int, None] = {}
    for index in range(first, len(stages)):
        found.setdefault(stages[index])
        if len(found) == count:
            break
    return list(found)


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


def add_host_updates(segments: Segments, rank: int, extent: Extent) -> Segments:
    """The segments of a rank, one for each batch and an empty one, with what makes the next version."""
    *batches, rest = segments
    assert not rest, "weights on the host have one version, so every batch drains"
    return [*(_HostUpdates(rank, index, extent).segment(segment) for index, segment in enumerate(batches)), rest]


class _HostUpdates:
    """A batch of a rank."""

    def __init__(self, rank: int, index: int, extent: Extent) -> None:
        self._extent, self._version = extent, extent.first_batch + index + 1
        self._stages = extent.stages_of(rank)
        self._left = dict.fromkeys(self._stages, extent.batches[index])  # backwards to come
        ends = {0, extent.num_stages - 1} if extent.reduces_embeddings(rank) else set()
        self._ends = [stage for stage in self._stages if stage in ends]

    def segment(self, segment: Segment) -> Segment:
        result: Segment = []
        for instruction in segment:
            result.append(instruction)
            if instruction.kind in ENDS_BACKWARD:
                result += self._after(instruction.stage)
        result.append(self._word(Kind.STEP))
        if not self._extent.residency.is_eager:
            result += [self._word(Kind.UPDATE, stage) for stage in self._stages]
        return result

    def _after(self, stage: int) -> Segment:
        """What follows a backward: nothing, unless it is the stage's last."""
        extent = self._extent
        self._left[stage] -= 1
        if self._left[stage]:
            return []
        words = [self._word(Kind.REDUCE_GRAD, stage)] if extent.data_parallel else []
        words.append(self._word(Kind.STORE_GRAD, stage))
        if extent.residency.is_eager and stage not in self._ends:
            words.append(self._word(Kind.UPDATE, stage))
        if any(self._left.values()):
            return words
        if self._ends:
            words.append(self._word(Kind.REDUCE_EMBED))
        if extent.residency.is_eager:
            words += [self._word(Kind.UPDATE, end) for end in self._ends]
        if extent.global_norm:
            words.append(self._word(Kind.REDUCE_NORM))
        return words

    def _word(self, kind: Kind, stage: int | None = None) -> Instruction:
        """The instruction of a stage, or of the rank, which is said at its lowest stage."""
        return Instruction(kind, self._stages[0] if stage is None else stage, version=self._version)
