"""Training as pretrain_gpt.py does it, on the stand-in for CUDA (`tests/pipeline/runtime/cuda/recording`)."""

from unittest import mock

import pytest

from tests import workers
from tests.trainer.run import run_case
from tests.trainer.run.run_case import data_flags


@pytest.mark.parametrize(
    "flags",
    [
        "--pipeline-model-parallel-size 2 --fp16 --clip-grad 0.5 --eval-iters 1 --eval-interval 3",
        "--tensor-model-parallel-size 2 --sequence-parallel --untie-embeddings-and-output-weights",
        "--use-distributed-optimizer --bf16 --recompute-granularity selective",
    ],
)
@pytest.mark.full
def test_training_is_in_order(flags):
    """The program's own data, model, step function and update: nothing is unordered, the computing thread waits for no
    kernel, and no group is used in a new way once the first receive has been posted.
    """
    flags += f" --pipeline-schedule 2bw --train-iters 4 {data_flags()}"
    outcomes = workers.run(2, f"{__name__}:recorded_case", flags=flags)
    for rank, (findings, num_operations) in enumerate(outcomes):
        assert not findings, f"rank {rank}: {findings}"
        assert num_operations > 3000


def recorded_case(flags: str) -> tuple[list[tuple[str, str]], int]:
    from megatron.pipeline.runtime.engine import PipelineEngine
    from megatron.trainer.data.microbatches import MicrobatchIterator
    from megatron.trainer.start_up import run as parts_of_run
    from tests.pipeline.runtime.cuda.recorded_cases import pooled
    from tests.pipeline.runtime.cuda.recording import recording

    with recording() as recorder:

        class RecordedEngine(PipelineEngine):
            def __init__(self, schedule, stages, *args, **options):
                for stage in stages:
                    for tensor in (*stage.model.module.parameters(), *stage.model.module.buffers()):
                        recorder.mark_on_device(tensor)
                super().__init__(schedule, stages, *args, **options | {"backend": "nccl"})

            def run_batch(self, *args):
                with recorder.training():
                    return super().run_batch(*args)

            def drain(self):
                with recorder.training():
                    reports = super().drain()
                recorder.find_held(pooled=pooled(self, None))
                return reports

        share = MicrobatchIterator._share

        def share_pinned(self, field, batch):  # as the loader's batches are on CUDA
            return share(self, field, batch and {name: recorder.pin(tensor) for name, tensor in batch.items()})

        with (
            mock.patch.object(parts_of_run, "PipelineEngine", RecordedEngine),
            mock.patch.object(MicrobatchIterator, "_share", share_pinned),
            mock.patch.object(run_case, "_digests_of_gradients", lambda update: []),  # reads them on the host
        ):
            run_case.train_case(flags)
        return recorder.findings, recorder.counts["operations"]
