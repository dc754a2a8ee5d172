"""What a T5 needs beside the tiny GPT of megatron_model.py: two stacks of half the layers each, and its samples.

The engine trains the stages and the forward step of pretrain_t5.py. The reference trains megatron.core's own whole
`T5Model` with the masks that megatron.core makes.
"""

from types import SimpleNamespace

import torch

from megatron.core.datasets.t5_dataset import T5MaskedWordPieceDataset
from megatron.core.models.T5.t5_model import T5Model
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import unwrap_model
from megatron.pipeline.runtime.stages.megatron.pipeline_position import at_stage, config_of_stage
from megatron.trainer.arguments.flags.config import edge_length as edge_length_of
from megatron.trainer.data.masked import t5_inputs
from megatron.trainer.data.microbatches import language_model_loss
from megatron.trainer.models.t5 import T5Stage, t5_model, t5_spec

ENCODER, DECODER, VOCABULARY = 16, 8, 64
CLASSES, FURTHEST = 8, 10  # of distances, so that the farthest tokens of the encoder share a class


def arguments(case) -> SimpleNamespace:
    """What `T5Stage` reads of a run's flags."""
    return SimpleNamespace(
        encoder_num_layers=case.layers // 2, decoder_num_layers=case.layers // 2, num_layers=case.layers,
        encoder_seq_length=ENCODER, decoder_seq_length=DECODER, max_position_embeddings=ENCODER, seed=1234,
        padded_vocab_size=VOCABULARY, untie_embeddings_and_output_weights=not case.tied, transformer_impl="local",
        position_embedding_type=case.position, rotary_percent=1.0, rotary_seq_len_interpolation_factor=None,
        init_method_xavier_uniform=False, context_parallel_size=1, sft=False, architecture="t5", seq_length=ENCODER,
        residual_from_norm=False, normalization=case.normalization, hidden_size=case.hidden,
        num_attention_heads=4, relative_attention_num_buckets=CLASSES, relative_attention_max_distance=FURTHEST,
        tensor_model_parallel_size=case.t, sequence_parallel=case.sequence_parallel, scaled_tied_head=False,
    )  # fmt: skip


def edge_length(case) -> int:
    return edge_length_of(arguments(case))


def stage(case, config: TransformerConfig, index: int, num_stages: int) -> T5Stage:
    """One of so many stages, of equally many layers, or of two with `first_layers` on the first."""
    layers = [case.layers // num_stages] * num_stages
    if case.first_layers is not None:
        layers = [case.first_layers, case.layers - case.first_layers]
    own = config_of_stage(config, index, layers)
    with at_stage(index, num_stages, builds=True):
        return t5_model(arguments(case), own, pre_process=index == 0, post_process=index == num_stages - 1)


def whole(case, config: TransformerConfig) -> T5Model:
    """megatron.core's model in one piece."""
    config.num_layers = case.layers // 2
    if case.position == "relative":  # megatron.core's own bias is made outside of what it recomputes
        config.recompute_granularity = None
    specs = [t5_spec.encoder_model_with_local_spec(), t5_spec.decoder_model_with_local_spec()]
    for spec in specs:
        spec.submodules.self_attention.submodules.core_attention = BiasedAttention
    return T5Model(
        config=config,
        encoder_config=config,
        transformer_encoder_layer_spec=specs[0],
        transformer_decoder_layer_spec=specs[1],
        vocab_size=VOCABULARY,
        max_sequence_length=ENCODER,
        share_embeddings_and_output_weights=case.tied,
        position_embedding_type=case.position,
        relative_attention_num_buckets=CLASSES,
        relative_attention_max_distance=FURTHEST,
    )


class BiasedAttention(DotProductAttention):
    """Local attention that takes the bias [1, heads, s, s] that megatron.core's T5Model makes of its tables."""

    def forward(self, query, key, value, attention_mask, attn_mask_type=None, attention_bias=None, **options):
        softmax = self.scale_mask_softmax
        plain = softmax.mask_func
        if attention_bias is not None:
            softmax.mask_func = lambda scores, mask: (scores + attention_bias).masked_fill(mask, -10000.0)
        output = super().forward(query, key, value, attention_mask, attn_mask_type, **options)
        softmax.mask_func = plain
        return output


def sample(number: int) -> dict[str, torch.Tensor]:
    """Sample `number` of the run, as megatron.core's dataset gives it: some tokens, then padding."""
    generator = torch.Generator().manual_seed(4000 + number)

    def draw(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator)

    def padded(size: int, length: int, padding: int = 0) -> torch.Tensor:
        return torch.where(torch.arange(size) < length, draw(5, VOCABULARY, size), padding)

    source, target = int(draw(6, ENCODER + 1)), int(draw(3, DECODER + 1))
    return {
        "text_enc": padded(ENCODER, source),
        "text_dec": padded(DECODER, target),
        "labels": padded(DECODER, target, -1),
        "loss_mask": (torch.arange(DECODER) < target).float(),
        "enc_mask": (torch.arange(ENCODER) < source).long(),
        "dec_mask": (torch.arange(DECODER) < target).long(),
    }


def microbatch_data(case, first_sample: int) -> dict[str, torch.Tensor]:
    """Fields of a microbatch, for every stage alike."""
    samples = [sample(first_sample + i) for i in range(case.micro_batch_size)]
    return {name: torch.stack([each[name] for each in samples]) for name in samples[0]}


def forward_step(data_iterator, model):
    """pretrain_t5.py's; to megatron.core's whole model, what Megatron-LM hands it."""
    batch = next(data_iterator)

    def loss_function(output):
        total, count, numbers = language_model_loss(batch["loss_mask"], output)
        return total * batch["factor"], count, numbers

    if not isinstance(unwrap_model(model), T5Model):
        return model(**t5_inputs(batch)), loss_function
    tokens = batch["text_enc"], batch["text_dec"]
    masks = T5MaskedWordPieceDataset.config_attention_mask(*tokens, None, None, use_local=True)
    return model(*tokens, *masks, lm_labels=batch["labels"].clamp(min=0)), loss_function
