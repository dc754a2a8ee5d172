"""Train a T5 through a pipeline program. See README.md and docs/flags.md.

torchrun --nproc-per-node 2 pretrain_t5.py --pipeline-model-parallel-size 2 --pipeline-schedule 2bw ...
"""

import sys
from functools import partial

from megatron.pipeline import interrupt

if __name__ == "__main__":
    interrupt.end_at_interrupt(says="pretrain_t5.py: ended by SIGINT")  # before slow imports

from megatron.trainer.arguments.flags.config import TrainConfig
from megatron.trainer.arguments.flags.parser import PROGRAMS
from megatron.trainer.run import entry

DEFAULTS = PROGRAMS["t5"][1]


def model_provider(args: TrainConfig, config):
    """Return Megatron's `provider(pre_process, post_process) -> model chunk` for a stage's configuration."""
    from megatron.trainer.models.t5 import t5_model

    return partial(t5_model, args, config)


def forward_step(data_iterator, model):
    """Megatron's forward step of one microbatch: returns (output, loss function of the output)."""
    from megatron.trainer.data.masked import t5_inputs
    from megatron.trainer.data.microbatches import language_model_loss

    batch = next(data_iterator)
    output = model(**t5_inputs(batch))
    return output, partial(language_model_loss, batch.get("loss_mask"))


def program():
    """The run's `TrainingProgram`: its model, forward step and data."""
    from megatron.trainer.data.masked import build_t5_datasets, t5_fields
    from megatron.trainer.start_up.run import TrainingProgram

    return TrainingProgram(
        model_provider=model_provider,
        forward_step=forward_step,
        datasets_provider=build_t5_datasets,
        fields_provider=t5_fields,
    )


if __name__ == "__main__":
    sys.exit(entry.run("pretrain_t5.py", program, defaults=DEFAULTS))
