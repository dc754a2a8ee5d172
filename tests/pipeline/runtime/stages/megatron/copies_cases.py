"""A job of megatron.core's stages that goes on without some of its ranks, in a program whose stages are copies."""

import itertools
from collections.abc import Iterator
from datetime import timedelta

import torch.distributed as dist

from megatron.core import parallel_state
from megatron.pipeline.program.copies import Copy, share_of
from megatron.pipeline.runtime.copied_stages import CopyRanks
from megatron.pipeline.runtime.engine import PipelineEngine
from megatron.pipeline.runtime.stages.megatron.groups import ChainGroup
from megatron.pipeline.schedules.program_schedule import ProgramSchedule
from tests.pipeline.runtime.copied_programs import copies_without, schedule_of
from tests.pipeline.runtime.stages.megatron import megatron_cases as cases
from tests.pipeline.runtime.stages.megatron.megatron_model import Case, evaluation_data, microbatch_data, parallel


def ranks_left(case: Case, lost: tuple[tuple[int, int], ...], tensor_rank: int) -> list[int]:
    """The ranks of a tensor rank that are left, stage by stage: megatron.core numbers tensor ranks, replicas, stages.

    `lost`: pairs of replica and stage.
    """
    places = itertools.product(range(case.p), range(case.d))
    return [
        (stage * case.d + replica) * case.t + tensor_rank for stage, replica in places if (replica, stage) not in lost
    ]


class Left:
    """The program of the ranks that are left, and this rank's place in it."""

    def __init__(self, case: Case, lost: tuple[tuple[int, int], ...]) -> None:
        self.copies: tuple[Copy, ...] = copies_without(
            lost, num_stages=case.p, num_replicas=case.d, num_microbatches=case.batches[0] // case.d
        )
        self.schedule: ProgramSchedule = schedule_of(
            self.copies, weights=case.schedule, tied_embeddings=case.tied or case.further > 0
        )
        self.ranks = ranks_left(case, lost, parallel_state.get_tensor_model_parallel_rank())
        self.job = sorted(itertools.chain(*(ranks_left(case, lost, each) for each in range(case.t))))
        self.is_left = dist.get_rank() in self.job
        if self.is_left:
            [self.number] = self.schedule.stages_of(self.ranks.index(dist.get_rank()))
            self.share = share_of(self.copies, self.number)
            self.spans = CopyRanks.of(self.schedule, rank=dist.get_rank(), ranks=self.ranks, job=self.job)

    def data(self, case: Case, first: int) -> Iterator[dict]:
        """The microbatches of the whole job from `first` on that this rank's copy takes."""
        for index in range(first, sum(case.batches)):
            if self.share.takes(index - first):
                yield microbatch_data(case, index * case.micro_batch_size)

    def evaluation(self, case: Case) -> Iterator[dict]:
        """Replicas take turns in `evaluation_data`, too."""
        for index, data in enumerate(zip(*(evaluation_data(case, replica) for replica in range(case.d)), strict=True)):
            for replica, each in enumerate(data):
                if self.share.takes(index * case.d + replica):
                    yield each


def go_on(lost: tuple[tuple[int, int], ...], border: int, **options) -> dict | None:
    """Train `border` batches on all ranks, and the others on those that are left; None on a lost rank.

    From the border on the default group lacks the lost ranks, so nobody may use it.
    """
    case = Case(**options)
    with parallel(case):
        left, reports = Left(case, lost), []
        if border:
            stages, update = cases.build(case)
            engine = cases.engine_of(case, stages, update)
            for batch in range(border):
                info = cases.batch_info(case, batch)
                reports += engine.run_batch(info.num_microbatches, info.num_samples)
            reports += engine.drain()
            engine.close()
        if not left.is_left:
            return None
        if border:
            update.regroup(left.spans)
        else:
            stages, update = cases.build(case, copies=left.spans)
        [stage] = stages
        first = sum(case.batches[:border])
        stage.take_from_now(left.share)
        stage.data_iterator, stage.evaluation_iterator = left.data(case, first), left.evaluation(case)
        metrics = ChainGroup("metrics", left.job, backend_name="gloo", timeout=timedelta(seconds=20))
        engine = PipelineEngine(
            left.schedule, stages, update, ranks=left.ranks, first_batch=border, first_microbatch=first,
            metrics_group=metrics.process_group,
        )  # fmt: skip
        for size in case.batches[border:]:
            reports += engine.run_batch(size, size * case.micro_batch_size)
        reports += engine.drain()
        evaluation = engine.evaluate(2 * case.d)
        engine.close()
        metrics.close()
        result = cases._result(case, stages, update, reports)
        update.close()
        return result | {"evaluation": evaluation}


def evaluated(**options) -> dict:
    """What a whole job evaluates behind the same batches."""
    return cases.train(**options, drains=(len(options["batches"]) - 1,))["evaluations"][0]


def refusal(lost: tuple[tuple[int, int], ...], **options) -> str | None:
    """What an update says that cannot have copies; None on a lost rank."""
    case = Case(**options)
    with parallel(case):
        left, (_, update) = Left(case, lost), cases.build(case)
        if not left.is_left:
            return None
        try:
            update.regroup(left.spans)
        except ValueError as error:
            return str(error)
        return "nothing"
