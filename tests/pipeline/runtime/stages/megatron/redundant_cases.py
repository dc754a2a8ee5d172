"""A job of megatron.core's stages whose ranks keep copies of each other's shards of the distributed optimizer."""

import torch

from megatron.core import parallel_state
from tests.pipeline.runtime.stages.megatron import megatron_cases as cases
from tests.pipeline.runtime.stages.megatron.megatron_model import Case, parallel

NAMES = ("param", "exp_avg", "exp_avg_sq", "weights")


def shards(begins: int = 0, **options) -> dict:
    """Train, and return what this rank has of its own shard and of its copy: name -> one tensor a bucket.

    `begins`: batches before the copies are made.
    """
    case = Case(distributed_optimizer=True, **options)
    with parallel(case):
        stages, update = cases.build(case)
        engine = cases.engine_of(case, stages, update)
        for batch in range(len(case.batches)):
            if batch == begins:
                engine.drain()
                update.keep_shards()
            info = cases.batch_info(case, batch)
            engine.run_batch(info.num_microbatches, info.num_samples)
        reports = engine.drain()
        names = (*NAMES, "older") if update.versions.window > 1 and not case.predict else NAMES
        result = {
            "replica": parallel_state.get_data_parallel_rank(),
            "stage": parallel_state.get_pipeline_model_parallel_rank(),
            "overflows": sum(report.overflow for report in reports),
            "own": {name: [flat.clone() for flat in update.shards._own(name)] for name in names},
            "copy": {name: [flat.clone() for flat in update.shards.copy_of(name)] for name in names},
            "held": update.shards.held,
            "bytes": update.shards.num_bytes,
        }
        assert all(torch.isfinite(flat).all() for flats in result["own"].values() for flat in flats)
        engine.close()
        update.close()
        return result
