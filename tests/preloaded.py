"""What every worker of a pool needs, imported once: the server from which workers are forked loads this module."""

import gc

from megatron import backend

backend.install()

import pytest  # noqa: F401 - the modules of cases import it
import torch._dynamo  # the first optimizer would import it
import torch.export  # noqa: F401 - the first capture would
import transformers.trainer_utils  # noqa: F401 - the first run of fine-tuning would, with peft and accelerate: 1 s

import megatron.core.tokenizers.text  # the first tokenizer would, and with it all of transformers: 1 s
import megatron.finetuning.job  # the first fine-tuned model would
import megatron.trainer.data.datasets  # the first dataset would import it
import megatron.trainer.run.pretraining  # noqa: F401 - with it torch and all of megatron.core that a case uses

gc.freeze()  # the collection after each case need not look at what was imported
