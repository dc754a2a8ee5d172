"""The passes for weights that live on the host: fetch weights, stash inputs, and update on the host.

**Weights (`add_residency`).** A row is a sequence of *runs*; a run has consecutive computations of one stage. At the
start of a run, the weights of its stage and of the next different stages should be resident, as many as there is room
for. Resident stages that are not among these are freed. Missing stages are fetched, in the order of use. So a FETCH
stands directly behind the FREE that makes room for it, and its copy overlaps the run that follows:

    0FETCH 1FETCH 0F0 0F1 0FREE 2FETCH 1F0 1F1 2F0 2B0 2F1 2B1 2FREE 0FETCH 1R0 1B0 1R1 1B1 1FREE 0R0 0B0 0R1 0B1 0FREE

Take one rank with N stages, of which K are resident at once. The last K stages stay resident while the relay turns from
forwards to backwards. So a batch takes 2N - K fetches, for any number of microbatches. No weights stay resident over
the border of a batch, because the next batch uses other weights, and because the run may drain there.

**Inputs (`add_stash`).** Between a forward and its recompute stand the computations of the whole batch at all higher
stages. On the device, the inputs of all stages would wait that long, so they wait on the host:

    2F0 2OFFLOAD0 2F1 2OFFLOAD1 ... 3B0 2RELOAD0 3B1 2RELOAD1 3FREE 1FETCH 2R0 2B0 2R1 2B1

Some inputs stay on the device:

- The first stage has no such input, because tokens are data.
- The graph of a stage without recompute refers to the input.
- In the run in which the relay turns around, no computations of other stages stand in between.
- An input stays if it would have to come back before it has left. With a single microbatch this holds for the stage
  below the last one.

A RELOAD stands two backwards before its own backward. So two inputs are on the device or on their way, in addition to
the input in use. RELOADs share a lane with FETCHes. At the start of a run, a FREE makes room, and the FETCH of the next
stage follows at once. A RELOAD behind this FETCH waits until the FETCH is complete, and so does the run. So the first
three RELOADs of a run stand ahead of this FETCH, two of them in the run before. Let C be the time of a forward, 3C the
time of a backward with its recompute, X the time of a FETCH, and A the time of a RELOAD. Then no computation waits if
X + 2A <= 9C; otherwise each stage waits for the difference. With `ahead=1`, which suffices if the lane has no other
words, the bound would be 6C. Each additional backward ahead takes the memory of one more input.

**Gradients (`add_host_updates`).** If gradients stay on the device, a rank reduces the gradients of all its stages
together, after its last backward (see `updates`). With weights on the host, the gradients of a stage have to leave
before the stage after the next one runs its backwards. So REDUCE_GRAD, STORE_GRAD and UPDATE each concern one stage,
and stand behind the last backward of that stage:

    eager      1B7 1REDUCE_GRAD@1 1STORE_GRAD@1 1UPDATE@1   0B0 ... 0STORE_GRAD@1 0UPDATE@1 0REDUCE_NORM@1 0STEP@1
    deferred   1B7 1REDUCE_GRAD@1 1STORE_GRAD@1   0B0 ... 0STORE_GRAD@1 0REDUCE_NORM@1 0STEP@1 0UPDATE@1 1UPDATE@1

A frozen stage has none of the three: its weights are fetched once a batch, for its forwards.

A rank still has one REDUCE_NORM and one STEP for each version, because one norm and one overflow decide about all
stages, and one report is sent. Deferred updates stand in ascending order of stages. The next batch begins with the
lowest stage, so it waits only for the update of that stage.

Tied embeddings: REDUCE_EMBED stands after the last backward of the rank, on both ranks, and the updates of both ends
stand after it. The gradients of the last stage are complete first, and those of the first stage last. If REDUCE_EMBED
stood directly after the STORE_GRAD of the last stage, it would hold up the later reductions of that rank until the end
of the batch. Soon the rank would wait for a gradient buffer, which closes a circle.
"""

from itertools import groupby

from megatron.pipeline.program.extent import Extent
from megatron.pipeline.program.instruction import BEGINS_BACKWARD, ENDS_BACKWARD, Instruction, Kind
from megatron.pipeline.program.lane_order import RELOADED_AHEAD
from megatron.pipeline.schedules.passes import Segment, Segments


def add_residency(segments: Segments, extent: Extent) -> Segments:
    """Add FETCH and FREE to the segments of a rank; each segment has only computations, and of one batch."""
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
    """Return the first `count` different stages of `stages[first:]`, in this order, or fewer if there are no more."""
    found: dict[int, None] = {}
    for index in range(first, len(stages)):
        found.setdefault(stages[index])
        if len(found) == count:
            break
    return list(found)


_BETWEEN = 2  # least number of computations from a forward to its RELOAD, so that the OFFLOAD has the time of one


def add_stash(segments: Segments, extent: Extent, *, ahead: int = RELOADED_AHEAD) -> Segments:
    """Add OFFLOAD and RELOAD to the segments of a rank; each segment has one batch, with its FETCH and FREE.

    Args:
        segments: the segments, after `add_residency`.
        extent: the extent of the program.
        ahead: how many backwards before its own backward an input is reloaded.
    """
    return [_with_moves(segment, extent, ahead) for segment in segments]


def _with_moves(segment: Segment, extent: Extent, ahead: int) -> Segment:
    heads, units = _units(segment)
    forwards = {_saved(unit): at for at, unit in enumerate(units) if unit.kind is Kind.FORWARD}
    behind: dict[int, Segment] = {}  # position in the segment -> words after it
    for at, unit in enumerate(units):
        if unit.kind not in BEGINS_BACKWARD or unit.stage == 0 or not extent.recomputes(unit.stage):
            continue
        begun, back = forwards[_saved(unit)], at - ahead
        if back - begun >= _BETWEEN and any(each.stage != unit.stage for each in units[begun:at]):
            behind.setdefault(heads[begun], []).append(Instruction(Kind.OFFLOAD, *_saved(unit)))
            behind.setdefault(heads[back - 1], []).append(Instruction(Kind.RELOAD, *_saved(unit)))
    return [each for at, word in enumerate(segment) for each in (word, *behind.get(at, ()))]


def _units(segment: Segment) -> tuple[list[int], Segment]:
    """Return the positions and instructions of all computations except recomputes.

    A recompute counts as part of the backward behind it.
    """
    found = [
        (at, each) for at, each in enumerate(segment) if each.kind.is_computation and each.kind is not Kind.RECOMPUTE
    ]
    return [at for at, _ in found], [each for _, each in found]


def _saved(instruction: Instruction) -> tuple[int, int]:
    return instruction.stage, instruction.microbatch


def add_host_updates(segments: Segments, rank: int, extent: Extent) -> Segments:
    """Add reductions, STORE_GRAD, STEP and UPDATE to the segments of a rank.

    There is one segment for each batch, and then an empty one, because every batch drains.
    """
    *batches, rest = segments
    assert not rest, "weights on the host have one version, so every batch drains"
    return [*(_HostUpdates(rank, index, extent).segment(segment) for index, segment in enumerate(batches)), rest]


class _HostUpdates:
    """Adds the updates of one batch to the segment of one rank."""

    def __init__(self, rank: int, index: int, extent: Extent) -> None:
        self._extent, self._version = extent, extent.first_batch + index + 1
        self._lowest = extent.stages_of(rank)[0]
        self._stages = extent.trained_stages_of(rank)
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
        """Return the words after a backward of a stage; none unless it is the stage's last one of the batch."""
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
        """Return an instruction for a stage, or for the whole rank, which is written at its lowest stage."""
        return Instruction(kind, self._lowest if stage is None else stage, version=self._version)
