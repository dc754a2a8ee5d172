"""finetune.py, whose ranks are lost in places that LOSSES names, as tests/trainer/run/losing_ranks.py has them.

The places `forward`, `backward`, `chain`, `norm`, `step`, `stepped`, `without sums`, `evaluation`, `new groups`,
`regroup` and `state` are those of pretraining. A checkpoint has the places `save`, and on rank 0 `commit` and
`committed`; the model at the end has `finish`, and what comes behind it `end`.
"""

import json
import os
import sys

from megatron.finetuning import finetune
from tests.trainer.run import losing_ranks
from tests.trainer.run.losing_ranks import around, note


class Places(losing_ranks.Places):
    """The losses of this rank that are to come, in the places of a fine-tuning."""

    def watch(self) -> None:
        from megatron.finetuning import checkpoint, job
        from megatron.finetuning.lost_ranks import LostRanks
        from megatron.finetuning.report import Report
        from megatron.finetuning.trainer import Trainer
        from megatron.pipeline.runtime.engine import PipelineEngine
        from megatron.pipeline.runtime.stages.module.graph_stage import GraphModuleStage
        from megatron.pipeline.runtime.stages.module.update import ModuleUpdate

        def begun(trainer, *rest, **options) -> None:
            self._iteration = lambda: trainer.iteration
            self._membership = trainer.lost_ranks.membership

        def of_microbatch(place: str):
            return lambda stage, *rest: self.come_to(place, self._iteration())

        def reported(report, made, seconds) -> None:
            if report.writes:
                note("reported", made.batch + 1)

        around(Trainer, "__init__", after=begun)
        around(GraphModuleStage, "forward", before=of_microbatch("forward"))
        around(GraphModuleStage, "backward", after=of_microbatch("backward"))
        around(ModuleUpdate, "reduce_grad", before=self._of_version("chain"))
        around(ModuleUpdate, "reduce_norm", before=self._of_version("norm"))
        around(ModuleUpdate, "step", before=self._of_version("step"), after=self._of_version("stepped"))
        around(
            ModuleUpdate, "_complete", before=lambda _, batch, sums: self.come_to("without sums", batch.info.index + 1)
        )
        around(ModuleUpdate, "regroup", before=self._of_time("regroup"))
        around(PipelineEngine, "evaluate", before=self._of_time("evaluation"))
        around(checkpoint, "save", before=self._of_time("save"))
        around(checkpoint, "replace_folder", before=self._of_time("commit"), after=self._of_time("committed"))
        around(checkpoint, "save_model", before=self._of_time("finish"))
        around(job, "_end", before=self._of_time("end"))
        around(LostRanks, "_survivors", after=self._of_time("new groups"))
        around(LostRanks, "_hand_over", before=self._of_time("state"))
        around(Report, "batch", after=reported)


if __name__ == "__main__":
    note("began", os.getpid())
    Places(json.loads(os.environ["LOSSES"])).watch()
    sys.exit(finetune.main())
