"""A job of megatron.core's stages whose ranks keep copies of each other's shards of the distributed optimizer."""

import torch
import torch.distributed as dist

from megatron.pipeline.runtime.stages.megatron.optimizers import groups_of_replicas
from tests.pipeline.runtime.stages.megatron import megatron_cases as cases
from tests.pipeline.runtime.stages.megatron.megatron_model import Case, parallel

NAMES = ("param", "exp_avg", "exp_avg_sq", "weights")


def shards(begins: int = 0, **options) -> list[dict]:
    """Train, and return what this rank has of its own shard and of its copy: name -> one tensor a bucket. So for dense
    weights, and for experts that ranks share out.

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
        further = update.shards.of_optimizers[0].extra_state
        names = NAMES if further is None else (*NAMES, further)
        result = [
            {
                "replica": dist.get_process_group_ranks(group).index(dist.get_rank()),
                "ranks": dist.get_process_group_ranks(group),
                "overflows": sum(report.overflow for report in reports),
                "own": {name: [flat.clone() for flat in shard._own(name)] for name in names},
                "copy": {name: [flat.clone() for flat in shard.copy_of(name)] for name in names},
                "held": shard.held,
                "bytes": shard.num_bytes,
            }
            for shard, group in zip(
                update.shards.of_optimizers, groups_of_replicas(update.optimizer, update.chunks[0]), strict=True
            )
        ]
        assert all(torch.isfinite(flat).all() for each in result for flats in each["own"].values() for flat in flats)
        engine.close()
        update.close()
        return result
