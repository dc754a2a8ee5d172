"""Train a ViT that classifies images through a pipeline program. See docs/classification.md and docs/flags.md.

torchrun --nproc-per-node 2 pretrain_vision_classify.py --pipeline-model-parallel-size 2 --data-path TRAIN VALID ...
"""

import sys
from functools import partial

from megatron.pipeline import interrupt

if __name__ == "__main__":
    interrupt.end_at_interrupt(says="pretrain_vision_classify.py: ended by SIGINT")  # before slow imports

from megatron.trainer.arguments.flags.config import TrainConfig
from megatron.trainer.arguments.flags.parser import PROGRAMS
from megatron.trainer.run import entry

DEFAULTS = PROGRAMS["vit"][1]


def model_provider(args: TrainConfig, config):
    """Return Megatron's `provider(pre_process, post_process) -> model chunk` for a stage's configuration."""
    from megatron.trainer.models.classifiers import VisionTransformer

    return partial(VisionTransformer.build, args, config)


def forward_step(data_iterator, model):
    """Megatron's forward step of one microbatch: returns (output, loss function of the output)."""
    from megatron.trainer.models.classifiers import classification_loss

    batch = next(data_iterator)
    output = model(batch.get("images"))
    return output, partial(classification_loss, batch.get("labels"), batch.get("counts"))


def program():
    """The run's `TrainingProgram`: its model, forward step and data."""
    from megatron.trainer.data.classification import build_vision_datasets, vision_fields
    from megatron.trainer.models.classifiers import loss_names
    from megatron.trainer.start_up.run import TrainingProgram

    return TrainingProgram(
        model_provider=model_provider,
        forward_step=forward_step,
        datasets_provider=build_vision_datasets,
        fields_provider=vision_fields,
        loss_names=loss_names,
    )


if __name__ == "__main__":
    sys.exit(entry.run("pretrain_vision_classify.py", program, defaults=DEFAULTS))
