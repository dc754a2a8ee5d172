"""Train a GPT through a pipeline program. See README.md and docs/flags.md.

torchrun --nproc-per-node 2 pretrain_gpt.py --pipeline-model-parallel-size 2 --pipeline-schedule 2bw ...
"""

import sys
from functools import partial

from megatron.pipeline import interrupt

if __name__ == "__main__":
    interrupt.end_at_interrupt(says="pretrain_gpt.py: ended by SIGINT")  # before slow imports

from megatron.trainer.arguments.flags.config import TrainConfig
from megatron.trainer.run import entry


def model_provider(args: TrainConfig, config):
    """Return Megatron's `provider(pre_process, post_process) -> model chunk` for a stage's configuration."""
    from megatron.trainer.models.gpt import gpt_model

    return partial(gpt_model, args, config)


def forward_step(data_iterator, model):
    """Megatron's forward step of one microbatch: returns (output, loss function of the output)."""
    from megatron.trainer.data.microbatches import gpt_inputs, language_model_loss
    from megatron.trainer.models.packed_sequences import packed_sequence

    batch = next(data_iterator)
    tokens, labels, loss_mask, attention_mask, position_ids = gpt_inputs(batch)
    packed = packed_sequence(batch["cu_seqlens"]) if "cu_seqlens" in batch else None
    output = model(tokens, position_ids, attention_mask, labels=labels, loss_mask=loss_mask, packed_seq_params=packed)
    return output, partial(language_model_loss, loss_mask)


def datasets_provider(args: TrainConfig, tokenizer):
    """Build the datasets of texts or, with --sft, of conversations."""
    from megatron.trainer.data.conversations import build_conversations
    from megatron.trainer.data.datasets import build_datasets

    return (build_conversations if args.sft else build_datasets)(args, tokenizer)


def program():
    """The run's `TrainingProgram`: its model, forward step and data."""
    from megatron.trainer.start_up.run import TrainingProgram

    return TrainingProgram(
        model_provider=model_provider, forward_step=forward_step, datasets_provider=datasets_provider
    )


if __name__ == "__main__":
    sys.exit(entry.run("pretrain_gpt.py", program))
