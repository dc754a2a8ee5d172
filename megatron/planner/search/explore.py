"""Explores the space: enumerates choices, rejects with a reason, stops early, and estimates the rest.

Problem: degrees, microbatches, scopes and schedules combine to hundreds of thousands of configurations, and proving or
simulating one takes up to seconds.

Solution: choices are made one after another, and a reason against a choice rejects all configurations with it. Memory
is checked before time, in closed form. The first check is the minimum of all schedules: one saved microbatch and one
weight version, which grows with the microbatch. The second check is the memory of the schedule. For each remaining
choice, recompute scopes are tried in the order of BPipe, section 4.2, until a scope fits. Balance is tried only if the
schedule does not fit without it. Two kinds of scopes fit without ending the trial: a scope that is slowed by a shortage
of memory, and a scope whose saved activations move, since over a slow link moving fewer activations may save more time
than recomputing them takes. Only configurations that fit are timed.
"""

import math
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import replace
from typing import Any

from megatron.pipeline.program.weight_policies import TWO_BW
from megatron.planner.job.configuration import Configuration, remarks
from megatron.planner.job.estimate import Verdict
from megatron.planner.memory.architecture import Architecture
from megatron.planner.memory.memory import RankMemory
from megatron.planner.memory.recompute import RecomputeScope
from megatron.planner.planner import Planner
from megatron.planner.search import rules
from megatron.planner.search.notes import delay_clause
from megatron.planner.search.outcome import Choice, Kept, Rejected
from megatron.planner.search.rules import Training
from megatron.planner.search.space import RANK_MAPPINGS, SCOPES, Space, offer, splits

Refusal = Callable[[Configuration], str | None]
"""Returns the reason why the training program would refuse a configuration, as a clause; None: it would not."""


class Explorer:
    """Explores a space.

    Args:
        space: the values to try.
        planner_of: returns the planner for a tensor parallel size, which decides the padding of the vocabulary.
        training: settings that exclude schedules or scopes.
        refuse: a further check, called last and only for configurations that fit.
    """

    def __init__(
        self, space: Space, planner_of: Callable[[int], Planner], training: Training, refuse: Refusal | None = None
    ) -> None:
        self.space, self.planner_of, self.training = space, planner_of, training
        self.refuse = refuse or (lambda _: None)

    def explore(self, t: int, p: int) -> Iterator[Kept | Rejected]:
        """Yield all choices with these degrees, kept or rejected."""
        reason = rules.refuse_tensor(self.planner_of(1).model, self.space, t)
        if reason:
            yield Rejected(choice=Choice(tensor=t), reason=reason)
            return
        for choice in rules.share_ranks(self.space, self.planner_of(t), Choice(tensor=t, pipeline=p)):
            if isinstance(choice, Rejected):
                yield choice
            else:
                yield from self._explore(choice)

    def _explore(self, choice: Choice) -> Iterator[Kept | Rejected]:
        """Yield all choices with the degrees and replicas of `choice`, kept or rejected."""
        space, model = self.space, self.planner_of(choice.tensor).model
        t, p = choice.tensor, choice.pipeline
        reason = rules.refuse_pipeline(model, space, p, choice.data)
        if reason:
            yield Rejected(choice=choice, reason=reason)
            return
        schedules = []
        for schedule in space.schedules:
            reason = rules.refuse_schedule(model, self.training, schedule, p)
            reason = reason or rules.refuse_shared_schedule(choice, self.training, schedule)
            reason = reason or rules.refuse_overlap(choice, self.planner_of(t), schedule)
            if reason:
                yield Rejected(choice=replace(choice, schedule=schedule), reason=reason)
            else:
                schedules.append(schedule)
        for split in space.distributed_optimizer if space.num_gpus > t * p else (False,):
            yield from _Degrees(self, model, replace(choice, distributed_optimizer=split)).explore(schedules)


class _Degrees:
    """Explores configurations with the same t, p, d and optimizer."""

    def __init__(self, explorer: Explorer, model: Architecture, choice: Choice) -> None:
        self.explorer, self.model, self.choice = explorer, model, choice
        self.space, self.training = explorer.space, explorer.training
        self.planner = explorer.planner_of(choice.tensor)
        self.sequence_parallel = rules.splits_sequences(model, choice)
        self._memory: dict[Choice, tuple[RankMemory, ...]] = {}  # the same for all mappings
        self._verdicts: dict[Choice, Verdict] = {}
        self._missed: dict[tuple, str] = {}  # by schedule, v and scope: why a smaller microbatch did not fit

    def explore(self, schedules: list[str]) -> Iterator[Kept | Rejected]:
        if self.planner.software.fp8:
            refused = {schedule: reason for schedule in schedules if (reason := self._refused_in_fp8(schedule))}
            for schedule, reason in refused.items():
                yield Rejected(choice=replace(self.choice, schedule=schedule), reason=reason)
            schedules = [schedule for schedule in schedules if schedule not in refused]
        hosted = [schedule for schedule in schedules if rules.is_hosted(schedule)]
        whole = [schedule for schedule in schedules if schedule not in hosted]
        split = [schedule for schedule in whole if splits(offer(schedule))]
        if self.training.with_halves == self.training:
            yield from self._explore(whole)
        else:
            yield from self._explore([schedule for schedule in whole if schedule not in split])
            other = copy(self)
            other.training = self.training.with_halves
            yield from other._explore(split)
        for schedule in hosted:
            yield from self._hosted(replace(self.choice, schedule=schedule))

    def _hosted(self, choice: Choice) -> Iterator[Kept | Rejected]:
        """Yield choices with weights on the host. They recompute whole stages; the least device memory of other
        schedules does not apply to them."""
        reason = rules.refuse_hosted(self.planner.cluster, choice)
        if reason:
            yield Rejected(choice=choice, reason=reason)
            return
        for size in self.space.microbatches(choice.data):
            trial = replace(choice, micro_batch_size=size)
            slow = self._slow_softmax(trial)
            if slow and self.space.needs_fused_softmax:
                yield Rejected(choice=trial, reason=slow)
            else:
                yield from self._schedule(trial, [SCOPES[0]])

    def _explore(self, schedules: list[str]) -> Iterator[Kept | Rejected]:
        if not schedules:
            return
        too_large: dict[RecomputeScope, str] = {}  # why a smaller microbatch did not fit
        for size in self.space.microbatches(self.choice.data):
            choice = replace(self.choice, micro_batch_size=size)
            slow = self._slow_softmax(choice)
            if slow and self.space.needs_fused_softmax:
                yield Rejected(choice=choice, reason=slow)
                continue
            scopes = []
            for scope in self._scopes():
                trial = replace(choice, recompute=scope)
                rejected = _again(trial, too_large.get(scope)) or self._floor(trial, schedules[0])
                if rejected:
                    too_large.setdefault(scope, f"with microbatches of {size} {rejected.reason}")
                    yield rejected
                else:
                    scopes.append(scope)
            for schedule in schedules if scopes else ():
                yield from self._schedule(replace(choice, schedule=schedule), scopes)

    def _slow_softmax(self, choice: Choice) -> str | None:
        return rules.slow_softmax(self.model, self.training, choice)

    def _scopes(self) -> list[RecomputeScope]:
        """The recompute scopes to try.

        Attention is left out if no scores are saved, since it equals scope none there. Whole layers are left out if
        copies of tokens are sent beside another microbatch, since the layers of two microbatches are merged then.
        """
        saves, merges = self.training.saves_scores, self.planner.software.overlaps_experts
        left_out = {SCOPES[1]: not saves, RecomputeScope.LAYER: merges and self.choice.expert is not None}
        return [each for each in self.space.scopes if not left_out.get(each)]

    def _refused_in_fp8(self, schedule: str) -> str | None:
        size = next(iter(self.space.microbatches(self.choice.data)), 1)
        splits_state = self.choice.distributed_optimizer and not rules.is_hosted(schedule)
        choice = replace(self.choice, micro_batch_size=size, distributed_optimizer=splits_state)
        return rules.refuse_in_fp8(self.planner, self._configuration(self._single(choice, schedule)))

    @staticmethod
    def _single(choice: Choice, schedule: str) -> Choice:
        """One microbatch of the choice on each replica, under a schedule."""
        batch = choice.micro_batch_size * choice.data
        return replace(choice, schedule=schedule, virtual=1, global_batch_size=batch)

    def _floor(self, choice: Choice, some: str) -> Rejected | None:
        """The rejection of all schedules if one microbatch on one weight version already exceeds the memory."""
        single = self._single(choice, some)
        configuration = self._configuration(single)
        verdict = self.planner.judge(configuration, self.planner.least_memory(configuration))
        return self._rejected(verdict, single, shown=choice, what="misses at least")

    def _schedule(self, choice: Choice, scopes: list[RecomputeScope]) -> Iterator[Kept | Rejected]:
        layers = self.model.num_layers // choice.pipeline
        virtual = self.space.stages_of_ranks(choice.schedule, layers)
        if not virtual:
            yield Rejected(choice=choice, reason=self._no_stages(choice.schedule, layers))
        for v in virtual:
            stages = replace(choice, virtual=v, **self._predictions(choice))
            batch = self._batch_size(stages)
            if isinstance(batch, str):
                yield Rejected(choice=stages, reason=batch)
            else:
                yield from self._try_scopes(replace(stages, global_batch_size=batch), scopes)

    def _predictions(self, choice: Choice) -> dict[str, Any]:
        """The settings of weight prediction, which only 2bw has, with two gradient buffers, which are tried first."""
        found = {"provisional": "off", "provisional_reduce": False, "single_gradient_buffer": False}
        if offer(choice.schedule).policy == TWO_BW and self.space.predictions:
            found |= self.space.predictions
            found["provisional_reduce"] &= choice.data * (choice.context or 1) > 1
        return found

    def _no_stages(self, schedule: str, layers: int) -> str:
        """The reason why a rank with the given number of layers has no valid v."""
        if layers == 1:
            return "the single layer of a rank makes no second stage"
        only, asked = offer(schedule).virtual_stages, [v for v in self.space.virtual or () if v > 1]
        if self.space.virtual is not None and not asked:
            return "interleaving takes 2 stages or more on a rank"
        if only is not None and asked and only not in asked:
            return f"{schedule} takes {only} stages on a rank"
        wanted = " or ".join(map(str, asked if only is None else [only]))
        return f"{layers} layers of a rank do not divide into {wanted} stages"

    def _batch_size(self, choice: Choice) -> int | str:
        """The largest safe batch in sequences, or the reason why no batch is possible."""
        space, per_round = self.space, choice.micro_batch_size * choice.data
        least, most = space.global_batch_size, space.largest_batch_size
        preset = offer(choice.schedule)
        if preset.policy.batch_size == 1:
            most = per_round if least <= per_round <= most else most
        count, parts = most // per_round, f"microbatches of {choice.micro_batch_size}"
        if preset.interleaves and space.safe_batch_size is not None:
            count, parts = count - count % choice.pipeline, f"groups of {choice.pipeline} {parts}"
        if not least <= count * per_round <= most or not count:
            wanted = f"a batch of {least}" if least == most else f"no batch from {least} to {most}"
            does = "does not divide" if least == most else "divides"
            on_replicas = f" on {choice.data} replicas" if choice.data > 1 else ""
            return f"{wanted} {does} into {parts}{on_replicas}"
        whole = replace(choice, global_batch_size=count * per_round, recompute=SCOPES[0])
        try:
            schedule = self._configuration(whole).pipeline_schedule(tied_embeddings=self.model.shares_embedding)
        except ValueError as error:
            return rules.clause(error)
        return rules.refuse_batch(schedule, count) or count * per_round

    def _try_scopes(self, choice: Choice, scopes: list[RecomputeScope]) -> Iterator[Kept | Rejected]:
        stops, fits, seconds = None, "", {}
        moves, plain = offer(choice.schedule).balance, self._without_moves(choice.schedule)
        competes = moves and self.space.early_stopping and plain is not None
        for scope in scopes:
            trial = replace(choice, recompute=scope)
            if stops:
                yield Rejected(choice=trial, reason=f"{stops}, and recomputing more is slower")
                continue
            if competes and self._fits_easily(replace(trial, schedule=plain)):
                stops = f"{plain} with recompute {scope.value} fits"
                yield Rejected(choice=trial, reason=f"{plain} fits, and balance does not make it faster")
                continue
            key = (choice.schedule, choice.virtual, scope)
            rejected = _again(trial, self._missed.get(key)) or self._miss(trial)
            if self._may_keep_one_buffer(trial) and (rejected or not self.space.early_stopping):
                single = replace(trial, single_gradient_buffer=True)
                if rejected and not self._miss(single):
                    yield rejected
                    rejected, trial = None, single
                elif not rejected:
                    yield from self._keep(single)
            if rejected:
                if not moves and self.space.safe_batch_size is None:  # memory grows with the microbatch
                    self._missed.setdefault(key, f"with microbatches of {choice.micro_batch_size} {rejected.reason}")
                yield rejected
                continue
            kept = False
            for each in self._keep(trial):
                if isinstance(each, Kept):
                    kept, mapping = True, each.choice.rank_mapping
                    if each.estimate.seconds >= seconds.get(mapping, math.inf):
                        yield Rejected(choice=each.choice, reason=f"{fits}, and recomputing more is slower")
                        continue
                    if moves and self.space.early_stopping and self._fits_easily(trial):
                        seconds[mapping], fits = each.estimate.seconds, f"recompute {scope.value} fits"
                yield each
            replicas = trial.data * (trial.context or 1)
            waits = trial.single_gradient_buffer and (replicas > 1 or self.model.shares_embedding)  # may be slower
            if kept and not moves and not waits and self.space.early_stopping and self._fits_easily(trial):
                stops = f"recompute {scope.value} fits"

    def _may_keep_one_buffer(self, choice: Choice) -> bool:
        """Whether 2bw may run without its second gradient buffer.

        Without the buffer the step of a batch comes early, before overflows of other stages are known, and predictions
        lack the gradients that the buffer would hold.
        """
        is_2bw = offer(choice.schedule).policy == TWO_BW and choice.pipeline > 1
        return is_2bw and not self.space.predictions and not self.training.scales_loss

    def _without_moves(self, schedule: str) -> str | None:
        """The name of the same schedule without balance; None: it is not in the space."""
        plain = replace(offer(schedule), balance=False)
        return next((name for name in self.space.schedules if offer(name) == plain), None)

    def _miss(self, choice: Choice) -> Rejected | None:
        rejected = self._rejected(self._judge(choice), choice, shown=choice, what="misses")
        return rejected or (self._miss_host(choice) if rules.is_hosted(choice.schedule) else None)

    def _miss_host(self, choice: Choice) -> Rejected | None:
        configuration = self._configuration(choice)
        verdict = self.planner.judge_host(configuration, self._memory[choice])
        if verdict.fits:
            return None
        reason = f"the host of node {verdict.node} misses {-verdict.spare_gib:.1f} GiB"
        return Rejected(choice=choice, reason=reason, missing_gib=-verdict.spare_gib)

    def _rejected(self, verdict: Verdict, choice: Choice, *, shown: Choice, what: str) -> Rejected | None:
        if verdict.fits:
            return None
        reason = f"{_place(verdict.rank, choice)} {what} {_gib(verdict)}"
        return Rejected(choice=shown, reason=reason, missing_gib=-verdict.spare_gib)

    def _keep(self, choice: Choice) -> Iterator[Kept | Rejected]:
        configuration, verdict = self._configuration(choice), self._judge(choice)
        reason = self.explorer.refuse(configuration)
        pressed = f"the allocator of {_place(next(iter(verdict.slowed), 0), choice)} is short of memory, which slows it"
        if verdict.under_pressure and self.space.avoids_pressure:
            reason = pressed
        if reason:
            yield Rejected(choice=choice, reason=reason)
            return
        slowest, software = math.inf, self.planner.software.of(configuration)
        for mapping in self._mappings(choice):
            mapped = replace(choice, rank_mapping=mapping)
            try:
                estimate = self.planner.estimate(self._configuration(mapped), memory=self._memory[choice])
            except ValueError as error:
                yield Rejected(choice=mapped, reason=rules.clause(error))
                continue
            if estimate.seconds >= slowest:
                yield Rejected(choice=mapped, reason="the standard rank order is as fast")
                continue
            if self.space.early_stopping and not offer(choice.schedule).balance:
                slowest = estimate.seconds
            notes = [
                self._slow_softmax(choice), pressed if verdict.under_pressure else None,
                delay_clause(estimate.configuration), *remarks(choice),
            ]  # fmt: skip
            yield Kept(choice=mapped, estimate=estimate, software=software, notes=tuple(filter(None, notes)))

    def _mappings(self, choice: Choice) -> list[str]:
        """The mappings to try. `optimized` is tried later (search.py), unless it is the only mapping of the space."""
        names = [name for name in RANK_MAPPINGS if name in self.space.rank_mappings and name != "optimized"]
        names = names or ["standard" if rules.is_shared(choice) else "optimized"]
        return names if self.space.mapping_matters(choice.tensor) or len(names) == 1 else ["standard"]

    def _configuration(self, choice: Choice) -> Configuration:
        configuration = choice.configuration(sequence_parallel=self.sequence_parallel)
        return rules.with_host_update(configuration, self.training)

    def _fits_easily(self, choice: Choice) -> bool:
        """Whether the configuration fits and no rank is slowed by a shortage of memory."""
        verdict = self._judge(choice)
        return verdict.fits and not verdict.under_pressure

    def _judge(self, choice: Choice) -> Verdict:
        """The verdict on the memory of a configuration."""
        if choice not in self._verdicts:
            configuration = self._configuration(choice)
            self._memory[choice] = self.planner.memory(configuration, proved=False)
            self._verdicts[choice] = self.planner.judge(configuration, self._memory[choice])
        return self._verdicts[choice]


def _again(choice: Choice, reason: str | None) -> Rejected | None:
    """The rejection of a choice that did not fit with a smaller microbatch."""
    return None if reason is None else Rejected(choice=choice, reason=reason)


def _place(rank: int, choice: Choice) -> str:
    return f"stage {rank}" if choice.virtual == 1 else f"pipeline rank {rank}"


def _gib(verdict: Verdict) -> str:
    size = abs(verdict.spare_gib)
    return f"{size:.1f} GiB" if size >= 0.1 else f"{size:.2g} GiB"
