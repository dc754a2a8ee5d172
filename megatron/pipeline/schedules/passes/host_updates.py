"""Send each stage's gradients to the host when its last backward of a batch is done, and let the host update it.

Where gradients stay on the device, a rank reduces those of all its stages together, after its last backward (see
`updates`). Here a stage's own have to leave before the stage after the next one computes its backwards. So reduction,
STORE_GRAD and UPDATE are of one stage, and stand behind its own last backward:

    eager      1B7 1REDUCE_GRAD@1 1STORE_GRAD@1 1UPDATE@1   0B0 ... 0STORE_GRAD@1 0UPDATE@1 0REDUCE_NORM@1 0STEP@1
    deferred   1B7 1REDUCE_GRAD@1 1STORE_GRAD@1   0B0 ... 0STORE_GRAD@1 0REDUCE_NORM@1 0STEP@1 0UPDATE@1 1UPDATE@1

REDUCE_NORM and STEP stay one a rank: one norm and one overflow decide about all, and one report is sent. The deferred
updates ascend, so that the next batch, which begins with the lowest stage, waits for that one alone.

Tied embeddings: REDUCE_EMBED stands behind the rank's last backward on both ranks. The last stage's gradients come
first and the first stage's last, so right behind its own STORE_GRAD it would keep a rank's later reductions waiting in
their lane for the end of the batch, and soon the rank for a gradient buffer: a circle. The updates of both ends stand
behind it.
"""

from megatron.pipeline.program.extent import Extent
from megatron.pipeline.program.instruction import ENDS_BACKWARD, Instruction, Kind
from megatron.pipeline.schedules.passes import Segment, Segments


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
