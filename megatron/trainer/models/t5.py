"""The T5 model in stages: an encoder and a decoder as one chain, with weights that do not depend on the split (gpt.py).

Problem: a decoder layer on any stage reads the encoder's output, and the decoder's tokens need the embedding, which the
encoder and the output layer need, too. megatron.core's `T5Model` can only be split between its two halves. With an edge
from the encoder's last stage to each stage of the decoder, the pipeline would no longer be a chain, and 2bw, balanced
activations and tied embeddings require a chain.

Solution: all layers, first the encoder's and then the decoder's, are split like those of a single stack. One tensor
crosses each edge, [encoder tokens + decoder tokens, b, hidden]:

    after encoder layers    the encoder's hidden states so far, and the embedded tokens of the decoder
    after decoder layers    the encoder's output, and the decoder's hidden states so far

The first stage embeds the tokens of both, so that only the first and the last stage have the embedding, as in a GPT.
The gradient of the encoder's output that a stage returns is the gradient from the next stage plus the gradients of its
own cross-attentions. autograd adds them in the order of a single process, so p stages compute the same bits as one.

Under sequence parallelism, a tensor rank has its part of the encoder's tokens, followed by its part of the decoder's.

Relative positions: attention adds a bias for each head and each class of distances, from a table that all layers of a
stack share. Both tables are weights of the first stage, and travel from stage to stage in the last rows of the same
tensor (`_Distances`), one or two rows of the hidden size. So stages share no weight, and a table's gradient comes back
along the chain. A stage makes new rows from the tables that its layers read, so that autograd adds the gradients of its
layers to the gradient from the next stage, in the order of a single process.
"""

import warnings
from collections.abc import Sequence
from copy import copy
from functools import lru_cache

import torch
from torch import Tensor

from megatron.core import tensor_parallel
from megatron.core.datasets.t5_dataset import T5MaskedWordPieceDataset
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.models.common.embeddings.relative_pos_embedding import RelativePositionEmbedding
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.tensor_parallel import scatter_to_tensor_model_parallel_region
from megatron.core.transformer.enums import LayerType, ModelType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import scaled_init_method_normal
from megatron.pipeline.runtime.stages.megatron.pipeline_position import StageLayout
from megatron.trainer.arguments.flags.config import TrainConfig, has_output_bias, rows_of_distances
from megatron.trainer.models.context_parallel import mixed_into_attention
from megatron.trainer.models.core_config import positions_of, rotary_embedding
from megatron.trainer.models.gpt import layer_stream, seeded_spec
from megatron.trainer.ranks import set_seeds

with warnings.catch_warnings():
    warnings.filterwarnings("ignore", message="Apex is not installed")  # torch's own norm replaces Apex's
    from megatron.core.models.T5 import t5_spec

_SPECS = {
    "local": (t5_spec.encoder_model_with_local_spec, t5_spec.decoder_model_with_local_spec),
    "transformer_engine": (
        t5_spec.encoder_model_with_transformer_engine_default_spec,
        t5_spec.decoder_model_with_transformer_engine_default_spec,
    ),
}
"""--transformer-impl -> megatron.core's specifications of an encoder layer and of a decoder layer."""


class T5Stage(LanguageModule):
    """The part of a T5 on one stage.

    Its names are those of megatron.core's `T5Model`, except that `output_layer` is not in `lm_head`.

    Args:
        config: configuration of the stage; its layout gives the number of layers of each stage.
        pre_process, post_process: whether the stage has the embedding, and whether it has the output layer.
    """

    def __init__(self, args: TrainConfig, config: TransformerConfig, *, pre_process: bool, post_process: bool) -> None:
        super().__init__(config)
        self.pre_process, self.post_process = pre_process, post_process
        self.model_type = ModelType.encoder_or_decoder
        self.share_embeddings_and_output_weights = not args.untie_embeddings_and_output_weights
        self.head_scale = config.hidden_size**-0.5 if args.scaled_tied_head else None
        parts = config.tensor_model_parallel_size if config.sequence_parallel else 1
        self.lengths = args.encoder_seq_length // parts, args.decoder_seq_length // parts
        self.input_tensor: Tensor | None = None
        self.rotary_pos_emb = rotary_embedding(args, config)
        self._masks = attention_masks if args.transformer_impl == "local" else _masks_of_engine
        self.rotary_lengths = args.encoder_seq_length, args.decoder_seq_length
        if pre_process:
            set_seeds(layer_stream(args, 0))
            self.embedding = LanguageModelEmbedding(
                config=config,
                vocab_size=args.padded_vocab_size,
                max_sequence_length=args.max_position_embeddings,
                position_embedding_type=args.position_embedding_type,
            )
        self.distances = _Distances(args) if args.position_embedding_type == "relative" else None
        self.lengths += (self.distances.num_rows,) if self.distances is not None else ()
        if pre_process and self.distances is not None:
            self.encoder_relative_pos_emb, self.decoder_relative_pos_emb = self.distances.tables(config)
        counts = _stacks(_layers_of_stages(config), args.encoder_num_layers)
        specs = [_fitted(args, spec()) for spec in _SPECS[args.transformer_impl]]
        stage = self.pp_group.rank()
        (encoder, decoder), here = counts, [count[stage] for count in counts]
        is_behind_encoder = sum(encoder[: stage + 1]) == args.encoder_num_layers
        self.encoder = self.decoder = None
        if here[0]:
            self.encoder = _stack(args, config, specs[0], encoder, stage, first=0, ends=is_behind_encoder)
        if here[1] or post_process:
            self.decoder = _stack(
                args, config, specs[1], decoder, stage, first=args.encoder_num_layers, ends=post_process
            )
        if post_process:
            set_seeds(layer_stream(args, args.num_layers + 1))
            tied, has_bias = self.share_embeddings_and_output_weights, has_output_bias(args)
            self.output_layer = tensor_parallel.ColumnParallelLinear(
                config.hidden_size,
                args.padded_vocab_size,
                config=config,
                init_method=config.init_method,
                bias=has_bias,
                skip_bias_add=not has_bias,
                skip_weight_param_allocation=pre_process and tied,
            )
        if pre_process or post_process:
            self.setup_embeddings_and_output_layer()

    def set_input_tensor(self, input_tensor: Tensor | list[Tensor] | None) -> None:
        """Set the tensor from the previous stage: [encoder tokens + decoder tokens, b, hidden]."""
        self.input_tensor = input_tensor[0] if isinstance(input_tensor, list) else input_tensor

    def forward(
        self,
        encoder_tokens: Tensor | None,
        decoder_tokens: Tensor | None,
        encoder_padding: Tensor,
        decoder_padding: Tensor,
        labels: Tensor | None = None,
    ) -> Tensor:
        """Compute the tensor for the next stage, [encoder tokens + decoder tokens, b, hidden].

        On the last stage, compute the cross entropy [b, decoder tokens], or without labels logits [b, decoder tokens,
        part of the vocabulary].

        Args:
            encoder_tokens, decoder_tokens: token ids [b, s] on the first stage; None on others.
            encoder_padding, decoder_padding: [b, s], 0 at padding.
            labels: token ids [b, decoder tokens] on the last stage; None on others.
        """
        of_encoder, of_decoder, of_both = self._masks(encoder_padding, decoder_padding)
        tables: tuple[Tensor | None, ...] = (None, None)
        if self.pre_process:
            source, target = self._embedded(encoder_tokens, decoder_tokens)
            if self.distances is not None:
                stacks = (self.encoder_relative_pos_emb, self.decoder_relative_pos_emb)
                tables = tuple(stack.relative_attention_bias.weight for stack in stacks)
        else:
            source, target, *rows = self.input_tensor.split(self.lengths)
            if self.distances is not None:
                tables = self.distances.read(rows[0])
        if self.encoder is not None:
            source = self.encoder(source, of_encoder, rotary_pos_emb=self._rotated(0), attention_bias=tables[0])
        if self.decoder is not None:
            target = self.decoder(
                target, of_decoder, context=source, context_mask=of_both, rotary_pos_emb=self._rotated(1),
                attention_bias=tables[1],
            )  # fmt: skip
        if not self.post_process and self.distances is not None:
            return torch.cat((source, target, self.distances.rows(tables, like=source)))
        if not self.post_process:
            return torch.cat((source, target))
        weight = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        if self.head_scale is not None:
            target = target * self.head_scale
        logits, _ = self.output_layer(target, weight=weight)
        if labels is None:
            return logits.transpose(0, 1).contiguous()
        return self.compute_language_model_loss(labels, logits)

    def _embedded(self, encoder_tokens: Tensor, decoder_tokens: Tensor) -> tuple[Tensor, Tensor]:
        """The embedded tokens [s, b, hidden] of encoder and decoder.

        Calling `forward` directly bypasses the hook that seeds dropout, so that encoder and decoder have different
        masks.
        """
        source, target = ((tokens, positions_of(tokens)) for tokens in (encoder_tokens, decoder_tokens))
        return self.embedding(*source), self.embedding.forward(*target)

    def _rotated(self, stack: int) -> Tensor | None:
        return None if self.rotary_pos_emb is None else self.rotary_pos_emb(self.rotary_lengths[stack])


# --- relative positions -----------------------------------------------------------------------------------------------


class _Distances:
    """A T5's two tables of relative position biases, each [classes, heads], and their form between stages."""

    def __init__(self, args: TrainConfig) -> None:
        self._shape = args.relative_attention_num_buckets, args.num_attention_heads
        self._furthest = args.relative_attention_max_distance
        self._seed = layer_stream(args, args.num_layers + 2)
        self.num_rows = rows_of_distances(args)

    def tables(self, config: TransformerConfig) -> tuple[RelativePositionEmbedding, RelativePositionEmbedding]:
        """The first stage's modules with the tables, with initial weights from a stream of their own."""
        set_seeds(self._seed)
        return tuple(
            RelativePositionEmbedding(is_encoder, config.init_method, self._shape[1], self._shape[0], self._furthest)
            for is_encoder in (True, False)
        )

    def rows(self, tables: tuple[Tensor, Tensor], *, like: Tensor) -> Tensor:
        """Both tables as rows [n, b, hidden] of the tensor for the next stage, equal for all samples."""
        numbers = torch.cat([table.flatten() for table in tables]).to(like.dtype)
        missing = self.num_rows * like.size(2) - numbers.numel()
        return torch.nn.functional.pad(numbers, (0, missing)).view(self.num_rows, 1, -1).expand(-1, like.size(1), -1)

    def read(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The tables from the rows that `rows` made."""
        size = self._shape[0] * self._shape[1]
        return tuple(table.view(self._shape) for table in rows[:, 0].flatten()[: 2 * size].split(size))


class _Relative:
    """A mixin for megatron.core's local attention; its `attention_bias` is a table of biases [classes, heads]."""

    is_encoder: bool
    furthest: int

    def forward(
        self, query, key, value, attention_mask, attn_mask_type=None, attention_bias=None, packed_seq_params=None
    ):
        """Compute the attention, as the wrapped class does, with the biases added to the scores."""
        softmax, table = self.scale_mask_softmax, scatter_to_tensor_model_parallel_region(attention_bias)
        classes = _classes(query.size(0), table.size(0), self.furthest, self.is_encoder, table.device)
        bias = torch.nn.functional.embedding(classes, table).permute(2, 0, 1)
        mask, softmax.mask_func = softmax.mask_func, lambda scores, masked: mask(scores + bias, masked)
        try:
            return super().forward(query, key, value, attention_mask, attn_mask_type)
        finally:
            softmax.mask_func = mask


@lru_cache(maxsize=8)
def _classes(length: int, number: int, furthest: int, is_encoder: bool, device: torch.device) -> Tensor:
    """The class of the distance between each two tokens, computed once for all layers: int32 [queries, keys]."""
    places = torch.arange(length, device=device)
    return RelativePositionEmbedding._relative_position_bucket(
        None, places[None, :] - places[:, None], is_encoder, number, furthest
    ).int()


def _fitted(args: TrainConfig, spec: ModuleSpec) -> ModuleSpec:
    """A new specification of a layer, with the norms and the attention of the flags."""
    parts = spec.submodules
    if args.normalization == "RMSNorm" and args.transformer_impl == "local":
        norms = [name for name, each in vars(parts).items() if name.endswith("layernorm") and each is not IdentityOp]
        for name in norms:  # Apex has no such norm
            setattr(parts, name, WrappedTorchNorm)
    if args.position_embedding_type == "relative":
        facts = {"is_encoder": parts.cross_attention is IdentityOp, "furthest": args.relative_attention_max_distance}
        spec = mixed_into_attention(spec, type("Relative", (_Relative,), facts))
    return spec


# --- masks ------------------------------------------------------------------------------------------------------------


def attention_masks(encoder_padding: Tensor, decoder_padding: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The masks of the encoder's and the decoder's self-attention, and of the decoder's attention to the encoder.

    Returns bool [b, 1, queries, keys], True where a query does not attend to a key: if either is padding, and in the
    decoder's self-attention if the key comes later.
    """
    source, target = encoder_padding.bool(), decoder_padding.bool()
    of_encoder, of_decoder, of_both = (
        ~(queries[:, None, :, None] & keys[:, None, None, :])
        for queries, keys in ((source, source), (target, target), (target, source))
    )
    return of_encoder, of_decoder | torch.ones_like(of_decoder[0, 0]).triu(1), of_both


def _masks_of_engine(encoder_padding: Tensor, decoder_padding: Tensor) -> tuple:
    """The masks in the form that the installed Transformer Engine reads; megatron.core chooses the form."""
    return T5MaskedWordPieceDataset.config_attention_mask(
        encoder_padding, decoder_padding, encoder_padding < 0.5, decoder_padding < 0.5, use_local=False
    )


# --- the two stacks of a stage ----------------------------------------------------------------------------------------


def _layers_of_stages(config: TransformerConfig) -> tuple[int, ...]:
    """The number of layers of each stage, in both stacks together."""
    layout = config.pipeline_model_parallel_layout
    if layout is None:
        return (config.num_layers,)
    return tuple(held.count(LayerType.decoder) for (held,) in layout.layout)


def _stacks(layers: Sequence[int], of_encoder: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The number of encoder layers on each stage (these come first), and the number of decoder layers."""
    encoder, left = [], of_encoder
    for count in layers:
        encoder.append(min(count, left))
        left -= encoder[-1]
    return tuple(encoder), tuple(count - own for count, own in zip(layers, encoder, strict=True))


def _stack(
    args: TrainConfig,
    config: TransformerConfig,
    spec: ModuleSpec,
    layers: Sequence[int],
    stage: int,
    *,
    first: int,
    ends: bool,
) -> TransformerBlock:
    """The layers of one stack on a stage.

    `layers`: the number of the stack's layers on each stage. `first`: the number of layers of the model before the
    stack. `ends`: whether the stack's final norm follows.
    """
    own = copy(config)
    own.num_layers = sum(layers)
    own.pipeline_model_parallel_layout = StageLayout(layers, stage)
    if not args.init_method_xavier_uniform:  # by the depth of the stack, as in Megatron-LM
        own.output_layer_init_method = scaled_init_method_normal(config.init_method_std, own.num_layers)
    seeded = seeded_spec(args, spec, before=first)
    # A block without `pre_process` would read `input_tensor`, which here contains both stacks.
    return TransformerBlock(config=own, spec=seeded, pre_process=True, post_process=ends)


def t5_model(
    args: TrainConfig, config: TransformerConfig, pre_process: bool = True, post_process: bool = True
) -> T5Stage:
    """Build the T5's layers for the stage that `config` describes.

    `args.padded_vocab_size` gives the number of rows of the embedding. At the end, `set_seeds(args.seed)` resets the
    random states.
    """
    set_seeds(args.seed)
    model = T5Stage(args, config, pre_process=pre_process, post_process=post_process)
    set_seeds(args.seed)
    return model
