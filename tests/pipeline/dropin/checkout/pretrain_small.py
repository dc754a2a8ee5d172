"""What a user starts: a small GPT on made-up samples, which depend on their numbers only."""

import torch

from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import TransformerConfig
from megatron.training import get_args, pretrain


def model_provider(pre_process=True, post_process=True, vp_stage=None):
    args = get_args()
    config = TransformerConfig(
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        num_attention_heads=args.num_attention_heads,
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=args.virtual_pipeline_model_parallel_size,
        pipeline_dtype=torch.float32,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )
    return GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(),
        vocab_size=args.vocab_size,
        max_sequence_length=args.seq_length,
        pre_process=pre_process,
        post_process=post_process,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        vp_stage=vp_stage,
    )


def samples(first):
    args = get_args()
    number = first
    while True:
        rows = []
        for _ in range(args.micro_batch_size):
            generator = torch.Generator().manual_seed(number)
            rows.append(torch.randint(args.vocab_size, (args.seq_length + 1,), generator=generator))
            number += 1
        yield torch.stack(rows)


def data_iterators_provider(num_chunks):
    args = get_args()
    made = [(samples(args.consumed_train_samples), samples(10**6)) for _ in range(num_chunks)]
    if args.virtual_pipeline_model_parallel_size is None:
        return made[0]
    return tuple(list(each) for each in zip(*made, strict=True))


def loss_func(losses):
    total = losses.float().sum()
    num_tokens = torch.tensor(losses.numel())
    return total / num_tokens, {"lm loss": torch.stack([total.detach(), num_tokens.float()])}


def forward_step(data_iterator, model):
    tokens = next(data_iterator)
    inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    length = inputs.shape[1]
    positions = torch.arange(length).expand_as(inputs)
    mask = torch.ones(1, 1, length, length).tril() < 0.5
    output = model(inputs, positions, mask, labels=labels)
    return output, loss_func


if __name__ == "__main__":
    pretrain(data_iterators_provider, model_provider, forward_step)
