"""What shows of the reductions and the update at the end of a batch.

w is a microbatch's forward and backward at a stage, f and b the one and the other, of a batch of m microbatches on p
stages.

After the last backward come the reductions and the optimizer's step; a stage that ends early reduces early. Policies
that overlap updates (2bw: delay k = 1) hide them behind the batches that follow. Batch j's last backward at stage s
comes p - 1 - s microbatches after its last forward there: in batch j + q, r microbatches after that batch began, where
(p - 1 - s) = (q - 1) m + r and 1 <= r <= m. The first stage needs the STEP when batch j + k + 1 begins, n = k + 1 - q
batches after batch j + q. So of the chain of stage s only what exceeds n (m w + step) - step - r w - s f shows, once in
n batches; and one chain runs at a time, so a batch takes as long as one at least. Of 2bw the window is
(m - p + 1) w + s b; its last stage ends its batches before the wait (q = 0), which so makes room for its reductions as
well, and what exceeds there shows in every other batch.

Weights that predict add PREDICT to a stage's batch, and HOLD where it stands. The last stage's chain begins behind its
PREDICT, so q = 1 and r = 0 there: n = 1 at all stages, and HOLD lies in the window, too. What replicas or both ends
reduce for a prediction begins where the backwards that it reads are done and the chain before has ended, and runs
beside what is computed until then and the STEP; the rest shows.
"""

from megatron.planner.time.stage_times import StageTimes


def end_of_batch(stages: StageTimes) -> float:
    """Seconds from the last backward, which is the first stage's, to the STEP. Later stages have ended before."""
    schedule, reduce, ends, earlier = stages.schedule, stages.by_rank(stages.reduce), [], 0.0
    for stage in range(schedule.num_ranks):
        ends.append(reduce[schedule.rank_of_stage[stage]] - earlier)
        earlier += stages.arrival_backward[stage] + stages.backward[stage]
    return max(0.0, *ends, max(0.0, ends[0], ends[-1]) + stages.reduce_embed) + stages.reduce_norm


class Chain:
    """A batch where the STEP may have to wait for the reductions of a stage; see the module.

    Attributes:
        late: seconds from where the STEP could be to the end of the reductions; negative: they end before.
        seconds: of the batch.
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
    """Seconds for which predictions wait for their reductions behind the STEP. `late`: the most of any chain."""
    if not any(stages.partial):
        return 0.0
    read = stages.schedule.provisional_microbatches
    shown, earlier = 0.0, 0.0
    for stage, unread in enumerate(stages.schedule.remaining_backwards(m)):
        left = 0 if read is None else m - unread - read  # backwards behind those that are read
        begin = max(-left * stages.work[stage], min(0.0, late) - earlier)
        if stage == 0 or stages.schedule.reduce_partial:
            shown = max(shown, begin + stages.partial[stage] - stages.step[stage])
        earlier += stages.forward[stage]
    return shown
