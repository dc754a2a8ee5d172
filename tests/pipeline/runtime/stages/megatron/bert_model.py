"""What a BERT needs beside the tiny GPT of megatron_model.py: samples of many lengths, some tokens masked.

The forward step and the losses are those of pretrain_bert.py; the reference uses them too, and
tests/trainer/data/test_bert.py checks them by hand.
"""

from functools import partial

import torch

from megatron.core.utils import get_model_config
from megatron.trainer.data.masked import bert_inputs, bert_loss

SEQUENCE, VOCABULARY, MASK = 16, 64, 4


def sample(number: int) -> dict[str, torch.Tensor]:
    """Sample `number` of the run, as megatron.core's dataset gives it: 6 to 16 tokens, then padding."""
    generator = torch.Generator().manual_seed(3000 + number)

    def draw(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator)

    length = int(draw(6, SEQUENCE + 1))
    words = torch.where(torch.arange(SEQUENCE) < length, draw(5, VOCABULARY, SEQUENCE), 0)
    masked = torch.zeros(SEQUENCE, dtype=torch.int64)
    masked[torch.randperm(length, generator=generator)[: int(draw(1, 5))]] = 1
    return {
        "text": torch.where(masked == 1, MASK, words),
        "types": (torch.arange(SEQUENCE) >= length // 2).long() * (torch.arange(SEQUENCE) < length),
        "labels": torch.where(masked == 1, words, -1),
        "is_random": draw(0, 2).squeeze(),
        "padding_mask": (torch.arange(SEQUENCE) < length).long(),
        "loss_mask": masked.float(),
    }


def microbatch_data(case, first_sample: int) -> dict[str, torch.Tensor]:
    """Fields of a microbatch, for every stage alike."""
    samples = [sample(first_sample + i) for i in range(case.micro_batch_size)]
    batch = {name: torch.stack([each[name] for each in samples]) for name in samples[0]}
    if not case.binary_head:
        del batch["types"], batch["is_random"]
    return batch


def forward_step(data_iterator, model):
    """pretrain_bert.py's."""
    batch = next(data_iterator)
    output = model(**bert_inputs(batch))
    per_token = get_model_config(model).calculate_per_token_loss
    return output, partial(bert_loss, batch.get("loss_mask"), batch.get("is_random"), per_token=per_token)
