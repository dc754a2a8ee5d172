"""Proofs of predicted weights, for whole batches and for single forwards.

**A batch** under `2bw-provisional` is computed at a prediction of its version, made from the gradients that the program
names. PREDICT@t takes the step to version t provisionally. A rank has one stage, and on each rank PREDICT@t comes

- after STEP@(t-1), if the program contains it, since the prediction starts from its weights; and after PREDICT@(t-1);
- after the backwards of exactly the microbatches of batch t-1 that it reads, since it reads the whole gradient buffer.
  These are the first `Program.num_read` microbatches of the batch, in any order; where stages are copies, those of them
  that the copy takes. An I without its W is not allowed, since it adds only a part of the gradients. Alternatively
  PREDICT@t comes anywhere after a HOLD@t that satisfies this rule;
- before every forward of batch t, and before the chain that leads to version t, which changes the buffer.

A prediction that reads 0 microbatches takes the last update again. It may come after any backwards, and has no HOLD.

If predictions read the mean over the replicas, REDUCE_PARTIAL@t comes after a HOLD@t and before PREDICT@t. If two ranks
tie embeddings, REDUCE_PARTIAL_EMBED@t comes before PREDICT@t on both ranks, after the backwards of the microbatches
that both ends read (`Program.num_read_of_ties`). Each of these instructions occurs once a batch, also for the batch
after the program, since the next program begins with that prediction.

So the microbatches that a prediction reads depend only on the policy and its numbers. They are the same at all stages
that read equally many, after a drain, and in one process.

**A forward of `stale-predicted`** is predicted exactly up to the version of its backward:

    2F5@1+2 ... 2R5@3 2B5@3        horizon = version of the backward - version of the forward

A predicted forward uses an extra set of weights, which the stage's next predicted forward overwrites. So the stage must
recompute: saved activations would refer to weights that are gone before the backward.

**A forward of `stale-provisional`** is stepped provisionally with exactly the gradients that no STEP has applied:

    2B4@1 2F9@1~1 2B5@1 2F10@1~2       q = backwards of the stage since its last STEP, of batch 1

If its version is that of its own batch, no step is ahead of it, so q is 0. Backwards between STEP@v and STEP@(v+1)
belong to batch v, which is proved with the versions. So these gradients belong to the batch that leads to the next
version, and are fewer than all of that batch.

The graph determines these microbatches, too: at depth k, microbatch i finds those microbatches of the batch of
microbatch i - k that come before microbatch i - k, and no others. Several stages rely on this (`runtime.update`), so it
is proved as well.

These weights are an extra set, which the stage's next such forward overwrites. So the stage must recompute.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from megatron.documents import counted
from megatron.pipeline.check.compact import (
    FIRST_HOST_WORD,
    FIRST_PREDICTION,
    FIRST_TRANSFER,
    FIRST_UPDATE,
    KIND_OF_CODE,
    STEP,
    B,
    CompactProgram,
    F,
    I,
    W,
    codes_of,
)
from megatron.pipeline.program.weight_policies import Ahead

HOLD, REDUCE_PARTIAL, REDUCE_PARTIAL_EMBED, PREDICT = codes_of("HOLD REDUCE_PARTIAL REDUCE_PARTIAL_EMBED PREDICT")


def prove_predictions(compact: CompactProgram) -> None:
    """Prove the module's rules of predictions of whole batches.

    Args:
        compact: a program that names weight versions, whose computations and updates are proved.

    Raises:
        ProgramError: for an instruction out of place, or for the end of a row that lacks one.
        ValueError: if the program does not say how many backwards its predictions read, or more than a batch has.
    """
    program = compact.program
    if program.weights.predicts:
        program.require_what_predictions_read()
    for rank, codes in enumerate(compact.codes):
        if codes_of_predictions(compact, rank):
            _RankPredictions(compact, rank).prove()
        elif max(codes, default=0) >= FIRST_PREDICTION:
            found = (position for position, code in enumerate(codes) if FIRST_PREDICTION <= code < FIRST_HOST_WORD)
            position = next(found, None)
            if position is None:
                continue
            raise compact.error(rank, position, f"weights {program.weights.name} predict nothing")


def codes_of_predictions(compact: CompactProgram, rank: int) -> tuple[int, ...]:
    """The codes of predictions that a rank has once a batch, in order."""
    program = compact.program
    if not program.weights.predicts:
        return ()
    wanted = {REDUCE_PARTIAL: program.reduce_partial, REDUCE_PARTIAL_EMBED: _ties(compact, rank), PREDICT: True}
    return tuple(code for code in wanted if wanted[code])


def _ties(compact: CompactProgram, rank: int) -> bool:
    return any(compact.program.reads_ties(stage) for stage in compact.stages_of(rank))


class _RankPredictions:
    """The state of the proof for one row. Batches and versions are counted from the first batch of the program."""

    def __init__(self, compact: CompactProgram, rank: int) -> None:
        self.compact, self.rank, self.program = compact, rank, compact.program
        (self.stage,) = compact.stages_of(rank)
        self.reads = self.program.provisional_microbatches != 0
        self.num_predicted = 0
        self.num_stepped = 0
        self.firsts = [0, *accumulate(self.program.batches)]  # microbatch of each batch, and one past the last
        # Per batch: the number of complete backwards, and one past the last microbatch whose backward has begun.
        self.num_done = [0] * len(self.program.batches)
        self.end_done = self.firsts[:-1]
        self.position = 0  # of the current instruction in the row
        self.held = False  # whether gradients are kept for the next prediction
        self.posted: set[int] = set()  # reductions for the next prediction
        self.wanted = set(codes_of_predictions(compact, rank)) - {PREDICT}

    def prove(self) -> None:
        compact, program, width = self.compact, self.program, self.compact.num_microbatches
        batch_of = compact.batch_of
        for position, (code, place, version) in compact.row(self.rank):
            reason = ""
            if code == F:
                batch = batch_of[place % width]
                if batch > self.num_predicted:
                    reason = f"its batch begins before {self._word(PREDICT, batch)}"
            elif code in (B, I, W):
                microbatch = place % width
                batch = batch_of[microbatch]
                self.num_done[batch] += code != I
                self.end_done[batch] = max(self.end_done[batch], microbatch + 1)
            elif code >= FIRST_PREDICTION:
                self.position = position
                reason = self._prediction(code, version - program.first_batch)
            elif code >= FIRST_UPDATE:
                if version - program.first_batch > self.num_predicted:
                    reason = f"{self._word(PREDICT, version - program.first_batch)} has to read the gradients before it"
                elif code == STEP:
                    self.num_stepped += 1
            if reason:
                raise compact.error(self.rank, position, reason)
        if self.num_predicted < len(program.batches):
            reason = f"{self._word(PREDICT, self.num_predicted + 1)} is missing: what follows begins with it"
            raise compact.error(self.rank, len(compact.codes[self.rank]), reason)

    def _prediction(self, code: int, index: int) -> str:
        """The reason why an instruction for the prediction of version `index` is out of place; "" if it is not."""
        due = self.num_predicted + 1
        if index != due or due > len(self.program.batches):
            return f"each batch has one, in order, and {self._word(PREDICT, due)} is due"
        if code == HOLD:
            if not self.reads:
                return "predictions read no gradients, so none are kept"
            if self.held:
                return "the gradients are kept already"
            self.held = True
            return self._unless_done(self.program.num_read(self.stage, self._last_batch))
        if code == PREDICT:
            return self._predict()
        if code not in self.wanted:
            return f"by the program's flags rank {self.rank} has no {KIND_OF_CODE[code].value}"
        if code in self.posted:
            return "it stands twice"
        self.posted.add(code)
        if code == REDUCE_PARTIAL:
            return "" if self.held else f"no {self._word(HOLD, due)} stands before it"
        return self._unless_done(self.program.num_read_of_ties(self._last_batch))

    def _predict(self) -> str:
        if self.num_stepped < self.num_predicted:
            return f"it starts from version {self._last_batch}: no {self._word(STEP, self.num_predicted)} before it"
        for code in (REDUCE_PARTIAL, REDUCE_PARTIAL_EMBED):
            if code in self.wanted - self.posted:
                return f"it waits for {self._word(code, self.num_predicted + 1)}, which is to come"
        is_free = self.held or not self.reads
        reason = "" if is_free else self._unless_done(self.program.num_read(self.stage, self._last_batch))
        self.num_predicted += 1
        self.held = False
        self.posted.clear()
        return reason

    @property
    def _last_batch(self) -> int:
        """The batch whose gradients the next prediction reads."""
        return self.program.first_batch + self.num_predicted

    def _unless_done(self, wanted: int) -> str:
        """The error unless exactly the batch's first `wanted` microbatches have had their backwards; "" if so.

        Of these, a copy has to have done those that it takes.
        """
        found, here = self.num_done[self.num_predicted], wanted
        if self.program.copies:
            here = self.program.num_read_here(self.stage, self._last_batch, wanted)
        if found != here:
            backwards, stand = counted(here, "backward"), "stands" if found == 1 else "stand"
            return f"it reads {backwards} of batch {self._last_batch}, and {found} {stand} before it"
        first, last = self.firsts[self.num_predicted], self.end_done[self.num_predicted] - 1
        if last < first + wanted:
            return ""
        there = "that" if self._is_whole(last) else "the first half, I,"
        end, last = (each + self.program.first_microbatch for each in (first + wanted, last))
        batch = f"batch {self._last_batch}"
        return f"it reads the backwards of {batch} before microbatch {end}, and {there} of {last} stands before it"

    def _is_whole(self, microbatch: int) -> bool:
        """Whether the complete backward of a microbatch, and not only I, comes before the current position."""
        codes, places = (row[self.rank][: self.position] for row in (self.compact.codes, self.compact.places))
        width = self.compact.num_microbatches
        return any(code in (B, W) and place % width == microbatch for code, place in zip(codes, places, strict=True))

    def _word(self, code: int, version: int) -> str:
        return self.compact.update(self.stage, code, version - 1)


def prove_horizons(compact: CompactProgram, live_versions: Sequence[int]) -> tuple[int, ...]:
    """Prove the module's equation of horizons for every (stage, microbatch).

    Args:
        compact: a program whose computations and versions are proved.
        live_versions: the largest number of live versions at each stage.

    Returns:
        `live_versions`, plus one for the predicted weights at each stage that has a predicted forward.

    Raises:
        ProgramError: for the first forward with another horizon, or without the recompute that it needs.
    """
    program, width = compact.program, compact.num_microbatches
    if program.weights.ahead is not Ahead.PREDICTION:
        return tuple(live_versions)
    version_of_backward: dict[int, int] = {}  # by place
    for rank in range(len(compact.codes)):
        version_of_backward.update(
            (place, version) for _, (code, place, version) in compact.row(rank) if code != F and code < FIRST_TRANSFER
        )
    predicted = set()
    for rank, row in enumerate(program.rows):
        for position, (code, place, _) in compact.row(rank):
            if code != F:
                continue
            forward, stage = row[position], place // width
            newer = version_of_backward[place]
            if forward.horizon != newer - forward.version:
                wanted = newer - forward.version
                reason = (
                    f"its backward uses version {newer}, so it has to predict {wanted} ahead, not {forward.horizon}"
                )
                raise compact.error(rank, position, reason)
            if forward.horizon and not program.is_recomputed(stage, forward.microbatch):
                reason = "predicted weights are gone before its backward, and the stage does not recompute"
                raise compact.error(rank, position, reason)
            if forward.horizon:
                predicted.add(stage)
    return tuple(live + (stage in predicted) for stage, live in enumerate(live_versions))


def prove_unstepped(compact: CompactProgram, live_versions: Sequence[int]) -> tuple[int, ...]:
    """Prove the module's rules of provisional steps for every (stage, microbatch).

    Args:
        compact: a program whose computations and versions are proved.
        live_versions: the largest number of live versions at each stage.

    Returns:
        `live_versions`, plus one at each stage that has a forward at provisional weights.

    Raises:
        ProgramError: for the first forward with another number of gradients, or without the recompute that it needs.
    """
    program, width = compact.program, compact.num_microbatches
    if program.weights.ahead is not Ahead.PROVISIONAL_STEP:
        return tuple(live_versions)
    firsts = [0, *accumulate(program.batches)]  # microbatch of each batch
    batch_of = compact.batch_of
    depths = [program.graph.depth(stage) for stage in range(compact.num_stages)]
    done = [0] * compact.num_stages  # backwards since the last STEP
    end_done = [0] * compact.num_stages  # one past their last microbatch, including those with only I
    stepped_ahead = set()
    for rank, row in enumerate(program.rows):
        for position, (code, place, _) in compact.row(rank):
            stage, index = divmod(place, width)
            if code in (B, I, W):
                done[stage] += code != I
                end_done[stage] = max(end_done[stage], index + 1)
            elif code == STEP:
                done[stage] = end_done[stage] = 0  # each stage has its own
            if code != F:
                continue
            forward, reason = row[position], ""
            is_behind = forward.version < program.first_batch + batch_of[index]
            wanted, before = done[stage] if is_behind else 0, max(0, index - depths[stage])
            if is_behind and wanted != before - firsts[batch_of[before]]:
                reason = (
                    f"no STEP has taken the gradients of {wanted} microbatches here, and at depth {depths[stage]} it "
                    f"has to be {before - firsts[batch_of[before]]}"
                )
            elif wanted and end_done[stage] > before:
                last, end = (program.first_microbatch + each for each in (end_done[stage] - 1, before))
                reason = (
                    f"the gradients that no STEP has taken have to be of microbatches before {end} here, and the "
                    f"backward of {last} stands before it"
                )
            elif forward.unstepped != wanted:
                reason = (
                    f"it has to step provisionally with the gradients of {wanted} microbatches, not {forward.unstepped}"
                )
            elif forward.unstepped and not program.is_recomputed(stage, forward.microbatch):
                reason = "provisional weights are gone before its backward, and the stage does not recompute"
            if reason:
                raise compact.error(rank, position, reason)
            if forward.unstepped:
                stepped_ahead.add(stage)
    return tuple(live + (stage in stepped_ahead) for stage, live in enumerate(live_versions))
