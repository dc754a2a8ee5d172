"""The BERT model, with weights that do not depend on the number of stages (see gpt.py)."""

import dataclasses
import warnings

import torch
from torch import nn

from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.trainer.arguments.flags.config import TrainConfig
from megatron.trainer.arguments.flags.model import NUM_TOKEN_TYPES
from megatron.trainer.models.gpt import draw_output_weight, layer_stream, seeded_spec
from megatron.trainer.ranks import set_seeds

with warnings.catch_warnings():
    warnings.filterwarnings("ignore", message="Apex is not installed")  # torch's own norm replaces Apex's
    from megatron.core.models.bert import bert_layer_specs
    from megatron.core.models.bert.bert_model import BertModel


def bert_model(
    args: TrainConfig, config: TransformerConfig, pre_process: bool = True, post_process: bool = True
) -> BertModel:
    """Build the BERT's layers for the stage that `config` describes.

    `args.padded_vocab_size` gives the number of rows of the embedding. At the end, `set_seeds(args.seed)` resets the
    random states.
    """
    set_seeds(args.seed)
    model = BertModel(
        config=config,
        num_tokentypes=NUM_TOKEN_TYPES if args.bert_binary_head else 0,
        transformer_layer_spec=bert_layer_spec(args),
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        fp16_lm_cross_entropy=args.fp16_lm_cross_entropy,
        parallel_output=True,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=args.rotary_percent,
        seq_len_interpolation_factor=args.rotary_seq_len_interpolation_factor,
        add_binary_head=args.bert_binary_head,
    )
    if post_process:
        if args.untie_embeddings_and_output_weights:
            draw_output_weight(args, config, model.output_layer.weight)
        _initialize_heads(args, config, model)
    set_seeds(args.seed)
    return model


def bert_layer_spec(args: TrainConfig) -> ModuleSpec:
    """The module specification of a layer; a copy, since megatron.core sets the kind of mask in it."""
    if args.transformer_impl == "transformer_engine":
        spec = bert_layer_specs.get_bert_layer_with_transformer_engine_spec()
    else:
        spec = bert_layer_specs.bert_layer_local_spec
    return seeded_spec(args, dataclasses.replace(spec))


def _initialize_heads(args: TrainConfig, config: TransformerConfig, model: BertModel) -> None:
    """Initialise the heads again, from a random stream of their own.

    megatron.core draws them after the rank's layers, so they would depend on the number of these layers.
    """
    set_seeds(layer_stream(args, config.num_layers + 2))
    layers: list[nn.Linear] = [model.lm_head.dense]
    if model.binary_head is not None:
        layers += [model.pooler.dense, model.binary_head]
    with torch.no_grad():
        for layer in layers:
            config.init_method(layer.weight)
