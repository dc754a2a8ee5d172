"""A BERT that tells classes: embedding and layers of `pretrain_bert.py`'s model, with a pooler and a new head.

megatron.core's BertModel always has an output layer over the vocabulary, so the parts are put together here, under its
names, for its checkpoints to fit. Weights do not depend on how many stages hold them (see gpt.py).
"""

import argparse

import torch

from megatron.core.models.bert.pooler import Pooler
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.transformer.enums import ModelType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.trainer.arguments.flags.bert import NUM_TOKEN_TYPES
from megatron.trainer.models.bert import bert_layer_spec
from megatron.trainer.models.classification_head import ClassificationHead
from megatron.trainer.models.gpt import layer_stream
from megatron.trainer.ranks.seeds import set_seeds


class BertClassifier(MegatronModule):
    """The part of a BERT with a classification head that a stage holds.

    Args:
        args: the shape of embedding and head.
        config: of the stage.
        pre_process, post_process: the stage embeds, or tells the class.
    """

    share_embeddings_and_output_weights = False
    new_parts = ("classification_head",)
    optional_parts = ("pooler",)
    """What --pretrained-checkpoint does not bring, and what it may lack: that of a BERT without a binary head."""

    def __init__(
        self, args: argparse.Namespace, config: TransformerConfig, *, pre_process: bool, post_process: bool
    ) -> None:
        super().__init__(config)
        self.pre_process, self.post_process = pre_process, post_process
        self.model_type = ModelType.encoder_or_decoder
        self.seq_length = args.seq_length
        self.masks_rows = args.transformer_impl == "local"  # Transformer Engine takes the keys' mask alone
        self.has_token_types = args.bert_binary_head
        if pre_process:
            set_seeds(layer_stream(args, 0))
            self.embedding = LanguageModelEmbedding(
                config=config,
                vocab_size=args.padded_vocab_size,
                max_sequence_length=args.max_position_embeddings,
                position_embedding_type=args.position_embedding_type,
                num_tokentypes=NUM_TOKEN_TYPES if args.bert_binary_head else 0,
            )
            for parameter in self.embedding.parameters():
                parameter.is_embedding_or_output_parameter = True  # --decoupled-lr
        self.rotary_pos_emb = _rotary(args, config)
        self.encoder = TransformerBlock(
            config=config, spec=bert_layer_spec(args), pre_process=pre_process, post_process=post_process
        )
        if post_process:
            set_seeds(layer_stream(args, config.num_layers + 2))
            self.pooler = Pooler(config.hidden_size, config.init_method, config, config.sequence_parallel)
            self.classification_head = ClassificationHead(args, config, dropout=config.hidden_dropout)

    def set_input_tensor(self, input_tensor: torch.Tensor | list[torch.Tensor]) -> None:
        """What the stage before has sent."""
        self.encoder.set_input_tensor(input_tensor[0] if isinstance(input_tensor, list) else input_tensor)

    def forward(self, text: torch.Tensor | None, padding_mask: torch.Tensor) -> torch.Tensor:
        """[tokens, b, hidden], of the last stage logits [b, classes].

        Args:
            text: token ids [b, s], of the first stage.
            padding_mask: [b, s], 0 at padding.
        """
        hidden = self._embedded(text) if self.pre_process else None
        hidden = self.encoder(
            hidden_states=hidden,
            attention_mask=attention_mask(padding_mask, masks_rows=self.masks_rows),
            rotary_pos_emb=None if self.rotary_pos_emb is None else self.rotary_pos_emb(self.seq_length),
        )
        return self.classification_head(self.pooler(hidden, 0)) if self.post_process else hidden

    def _embedded(self, text: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(text.size(1), device=text.device).expand_as(text)
        return self.embedding(
            input_ids=text,
            position_ids=positions,
            tokentype_ids=torch.zeros_like(text) if self.has_token_types else None,
        )


def attention_mask(padding_mask: torch.Tensor, *, masks_rows: bool) -> torch.Tensor:
    """True where a token does not look: bool [b, 1, s, s], or [b, 1, 1, s] where the kernels want the keys alone."""
    keys = padding_mask[:, None, None, :]
    return (keys * padding_mask[:, None, :, None] if masks_rows else keys) < 0.5


def _rotary(args: argparse.Namespace, config: TransformerConfig) -> RotaryEmbedding | None:
    if args.position_embedding_type != "rope":
        return None
    return RotaryEmbedding(
        kv_channels=config.kv_channels,
        rotary_percent=args.rotary_percent,
        rotary_interleaved=config.rotary_interleaved,
        seq_len_interpolation_factor=args.rotary_seq_len_interpolation_factor,
        use_cpu_initialization=config.use_cpu_initialization,
    )


def bert_classifier(
    args: argparse.Namespace, config: TransformerConfig, *, pre_process: bool = True, post_process: bool = True
) -> BertClassifier:
    """Build the part of the BERT that a stage holds; which, `config` says.

    Random states are left as `set_seeds(args.seed)` leaves them.
    """
    set_seeds(args.seed)
    model = BertClassifier(args, config, pre_process=pre_process, post_process=post_process)
    set_seeds(args.seed)
    return model
