"""Train a BERT through a pipeline program. See README.md and docs/flags.md.

torchrun --nproc-per-node 2 pretrain_bert.py --pipeline-model-parallel-size 2 --pipeline-schedule 2bw ...
"""

import sys
from functools import partial

from megatron.pipeline import interrupt

if __name__ == "__main__":
    interrupt.end_at_interrupt(says="pretrain_bert.py: ended by SIGINT")  # before slow imports

from megatron.trainer.arguments.flags.config import TrainConfig
from megatron.trainer.arguments.flags.parser import PROGRAMS
from megatron.trainer.run import entry

DEFAULTS = PROGRAMS["bert"][1]


def model_provider(args: TrainConfig, config):
    """Return Megatron's `provider(pre_process, post_process) -> model chunk` for a stage's configuration."""
    from megatron.trainer.models.bert import bert_model

    return partial(bert_model, args, config)


def forward_step(data_iterator, model):
    """Megatron's forward step of one microbatch: returns (output, loss function of the output)."""
    from megatron.core.utils import get_model_config
    from megatron.trainer.data.masked import bert_inputs, bert_loss

    batch = next(data_iterator)
    output = model(**bert_inputs(batch))
    per_token = get_model_config(model).calculate_per_token_loss
    return output, partial(bert_loss, batch.get("loss_mask"), batch.get("is_random"), per_token=per_token)


def program():
    """The run's `TrainingProgram`: its model, forward step and data."""
    from megatron.trainer.data.masked import bert_fields, build_bert_datasets, loss_names
    from megatron.trainer.start_up.run import TrainingProgram

    return TrainingProgram(
        model_provider=model_provider,
        forward_step=forward_step,
        datasets_provider=build_bert_datasets,
        fields_provider=bert_fields,
        loss_names=loss_names,
    )


if __name__ == "__main__":
    sys.exit(entry.run("pretrain_bert.py", program, defaults=DEFAULTS))
