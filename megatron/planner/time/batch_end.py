"""The part of the reductions and of the update at the end of a batch that shows, that is, lengthens the batch.

Notation: w is a microbatch's forward and backward at a stage, f the forward, b the backward. A batch has m
microbatches, the pipeline p stages.

After the last backward come the reductions and the optimizer's step. A stage that ends early reduces early. Policies
that overlap updates (2bw: delay k = 1) hide the reductions behind the next batches. Batch j's last backward at stage s
comes p - 1 - s microbatches after its last forward there. This is in batch j + q, r microbatches after the beginning of
that batch, where (p - 1 - s) = (q - 1) m + r and 1 <= r <= m. The first stage needs the STEP when batch j + k + 1
begins, which is n = k + 1 - q batches after batch j + q. So the chain of stage s is hidden in a window of
n (m w + step) - step - r w - s f. The excess shows once in n batches. Only one chain runs at a time, so a batch takes
at least as long as a chain. With 2bw the window is (m - p + 1) w + s b. The last stage of 2bw ends its batches before
the wait (q = 0). So the wait hides its reductions as well, and its excess shows in every other batch.

Weights that predict add PREDICT to a stage's batch, and HOLD at its place. The last stage's chain begins behind its
PREDICT, so q = 1 and r = 0 there. Then n = 1 at all stages, and HOLD lies in the window, too. The reductions for a
prediction, over replicas or between both ends, begin when the backwards that it reads are done and the chain before has
ended. They run beside the computation until the STEP and beside the STEP. The rest shows.
"""

from megatron.planner.time.stage_times import StageTimes


def end_of_batch(stages: StageTimes) -> float:
    """Return the seconds from the last backward, at the first stage, to the STEP. Later stages have ended before."""
    schedule, reduce, ends, earlier = stages.schedule, stages.by_rank(stages.reduce), [], 0.0
    for stage in range(schedule.num_ranks):
        ends.append(reduce[schedule.rank_of_stage[stage]] - earlier)
        earlier += stages.arrival_backward[stage] + stages.backward[stage]
    return max(0.0, *ends, max(0.0, ends[0], ends[-1]) + stages.reduce_embed) + stages.reduce_norm


class Chain:
    """The reductions of one stage, for which a batch's STEP may have to wait; see the module.

    Attributes:
        late: seconds by which the reductions end after the earliest time of the STEP; negative if they end before.
        seconds: seconds of the batch.
    """

    def __init__(self, stages: StageTimes, stage: int, m: int) -> None:
        p, work, policy = len(stages.work), stages.work[stage], stages.schedule.weights
        held = stages.held(m)[stage]
        alone = m * work + stages.step[stage] + stages.predict[stage] + held + stages.arrival_forward[stage]
        chain = stages.reduce[stage] + stages.reduce_norm + (stages.reduce_embed if stage in (0, p - 1) else 0.0)
        begun = max(-(-(p - 1 - stage) // m), int(policy.predicts))
        since = p - 1 - stage - (begun - 1) * m
        batches = policy.delay + 1 - begun
        window = (batches - 1) * alone + (m - since) * work + held - sum(stages.forward[:stage])
        self.late = chain - window
        self.seconds = max(chain, alone + max(0.0, self.late) / batches)


def partial_shown(stages: StageTimes, m: int, late: float) -> float:
    """Return the seconds for which predictions wait, behind the STEP, for their reductions.

    `late`: the largest `Chain.late`.
    """
    if not any(stages.partial):
        return 0.0
    read = stages.schedule.provisional_microbatches
    shown, earlier = 0.0, 0.0
    for stage, unread in enumerate(stages.schedule.remaining_backwards(m)):
        left = 0 if read is None else m - unread - read  # backwards behind those that the prediction reads
        begin = max(-left * stages.work[stage], min(0.0, late) - earlier)
        if stage == 0 or stages.schedule.reduce_partial:
            shown = max(shown, begin + stages.partial[stage] - stages.step[stage])
        earlier += stages.forward[stage]
    return shown
