"""Proof: a forward is predicted just as far ahead as its backward is, where the weight policy predicts so.

    2F5@1+2 ... 2R5@3 2B5@3        horizon = version of the backward - version of the forward

A predicted forward has one more set of weights, which the next one of the stage overwrites. So its stage has to
recompute: what a forward would save refers to weights that are gone before its backward.
"""

from collections.abc import Sequence

from megatron.pipeline.check.compact import FIRST_TRANSFER, CompactProgram, F
from megatron.pipeline.program.weight_policies import Ahead


def prove_horizons(compact: CompactProgram, live_versions: Sequence[int]) -> tuple[int, ...]:
    """Prove the equation above for every (stage, microbatch).

    Args:
        compact: a program whose computations and versions are proved.
        live_versions: the largest number of live versions at each stage.

    Returns:
        The same, with the set of predicted weights at each stage that has a predicted forward.

    Raises:
        ProgramError: naming the first forward with another horizon, or one that is not recomputed.
    """
    program, width = compact.program, compact.num_microbatches
    if program.weights.ahead is not Ahead.PREDICTION:
        return tuple(live_versions)
    version_of_backward: dict[int, int] = {}  # by place
    for codes, places, versions in zip(compact.codes, compact.places, compact.versions, strict=True):
        row = zip(codes, places, versions, strict=True)
        version_of_backward.update(
            (place, version) for code, place, version in row if code != F and code < FIRST_TRANSFER
        )
    predicted = set()
    for rank, row in enumerate(program.rows):
        for position, (code, place) in enumerate(zip(compact.codes[rank], compact.places[rank], strict=True)):
            if code != F:
                continue
            forward, stage = row[position], place // width
            newer = version_of_backward[place]
            if forward.horizon != newer - forward.version:
                wanted = newer - forward.version
                reason = (
                    f"its backward uses version {newer}, so it is to be predicted {wanted} ahead, not {forward.horizon}"
                )
                raise compact.error(rank, position, reason)
            if forward.horizon and not program.recomputes(stage):
                reason = "predicted weights are gone before its backward, and the stage does not recompute"
                raise compact.error(rank, position, reason)
            if forward.horizon:
                predicted.add(stage)
    return tuple(live + (stage in predicted) for stage, live in enumerate(live_versions))
