"""Classifiers of texts (a BERT) and of images (a ViT), in stages, with their head and their loss.

megatron.core's BertModel always has an output layer over the vocabulary. So this module assembles a BERT from its
parts, with the same names, so that its checkpoints load: embedding and layers of `pretrain_bert.py`'s model, with a
pooler and a new head.

megatron.core's own vision models cannot be split into stages, and their local layers attend causally. Here the first
stage converts patches to tokens, the last stage predicts the class, and the layers of every stage attend to all
patches.

Weights do not depend on the number of stages (see gpt.py).
"""

from typing import ClassVar

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from megatron.core import tensor_parallel
from megatron.core.models.bert.pooler import Pooler
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.transformer.enums import AttnMaskType, ModelType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.trainer.arguments.flags.config import TrainConfig
from megatron.trainer.arguments.flags.model import NUM_TOKEN_TYPES
from megatron.trainer.models.bert import bert_layer_spec
from megatron.trainer.models.core_config import positions_of, rotary_embedding
from megatron.trainer.models.gpt import layer_spec, layer_stream
from megatron.trainer.ranks import set_seeds
from megatron.trainer.report.metrics import CLASS_LOSS

# --- the head of the last stage, a full copy on every tensor rank -----------------------------------------------------


class _ClassificationHead(MegatronModule):
    """The head of a classifier: dropout and a linear layer, from features [b, hidden] to logits [b, classes].

    Args:
        dropout: probability of the dropout before the linear layer.
    """

    dropout_place = "head", 0

    def __init__(self, args: TrainConfig, config: TransformerConfig, *, dropout: float = 0.0) -> None:
        super().__init__(config)
        self.dropout = nn.Dropout(dropout)
        self.linear = nn.Linear(config.hidden_size, args.num_classes)
        with torch.no_grad():
            config.init_method(self.linear.weight)
            self.linear.bias.zero_()
        for parameter in self.parameters():
            parameter.is_embedding_or_output_parameter = True  # --decoupled-lr

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Compute logits [b, classes] from features [b, hidden]."""
        return self.linear(self.dropout(features))


def _pooled(hidden: torch.Tensor, config: TransformerConfig, *, reads_first: bool) -> torch.Tensor:
    """The features of samples, [b, hidden], from [tokens, b, hidden]: the first token or the mean over all tokens."""
    if config.sequence_parallel:  # all tensor ranks compute the same from here on, so gradients need no sum
        hidden = tensor_parallel.gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
    return hidden[0] if reads_first else hidden.mean(dim=0)


# --- the loss ---------------------------------------------------------------------------------------------------------

ACCURACY = "accuracy"


def loss_names(args: TrainConfig) -> tuple[str, ...]:
    """The names of the values that `classification_loss` reports."""
    return CLASS_LOSS, ACCURACY


def classification_loss(
    labels: torch.Tensor | None, counts: torch.Tensor | None, logits: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """The cross entropy in FP32 of the samples with a nonzero count.

    Args:
        labels: int64 [b], the classes; None on stages without a loss, which do not call this function.
        counts: float32 [b], 0 for a sample that only fills an evaluation's last batch.
        logits: [b, classes].

    Returns (sum of losses, number of samples, {"loss", "accuracy": tensor [sum, samples]}); the tensors are detached.
    """
    losses = cross_entropy(logits.float(), labels, reduction="none") * counts
    number, total = counts.sum(), losses.sum()
    hits = ((logits.argmax(dim=-1) == labels) * counts).sum()
    return total, number, {
        CLASS_LOSS: torch.stack([total.detach(), number]),
        ACCURACY: torch.stack([hits, number]),
    }  # fmt: skip


# --- the common part of both models -----------------------------------------------------------------------------------


class _Classifier(MegatronModule):
    """The part of a classifier on one stage: layers; on the first stage also an embedding, on the last stage a head.

    Args:
        config: configuration of the stage, which determines its layers.
        pre_process, post_process: whether the stage has the embedding, and whether it has the head.
    """

    share_embeddings_and_output_weights = False
    new_parts = ("classification_head",)
    """Children that --pretrained-checkpoint does not load."""
    block: ClassVar[str]
    """The name of the block of layers, in the model and in checkpoints."""

    def __init__(self, config: TransformerConfig, *, pre_process: bool, post_process: bool) -> None:
        super().__init__(config)
        self.pre_process, self.post_process = pre_process, post_process
        self.model_type = ModelType.encoder_or_decoder

    def set_input_tensor(self, input_tensor: torch.Tensor | list[torch.Tensor]) -> None:
        """Set the input of the layers to the tensor from the previous stage."""
        block = getattr(self, self.block)
        block.set_input_tensor(input_tensor[0] if isinstance(input_tensor, list) else input_tensor)

    @classmethod
    def build(
        cls, args: TrainConfig, config: TransformerConfig, pre_process: bool = True, post_process: bool = True
    ) -> "_Classifier":
        """Build the part of the stage that `config` describes; `args` have the shapes of embedding and head.

        At the end, `set_seeds(args.seed)` resets the random states.
        """
        set_seeds(args.seed)
        model = cls(args, config, pre_process=pre_process, post_process=post_process)
        set_seeds(args.seed)
        return model


# --- a BERT -----------------------------------------------------------------------------------------------------------


class BertClassifier(_Classifier):
    """The part of a BERT with a classification head on one stage."""

    block = "encoder"
    optional_parts = ("pooler",)
    """Children that --pretrained-checkpoint may lack: a BERT without a binary head has no pooler."""

    def __init__(self, args: TrainConfig, config: TransformerConfig, *, pre_process: bool, post_process: bool) -> None:
        super().__init__(config, pre_process=pre_process, post_process=post_process)
        self.seq_length = args.seq_length
        self.masks_rows = args.transformer_impl == "local"  # Transformer Engine needs only the mask of keys
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
        self.rotary_pos_emb = rotary_embedding(args, config)
        self.encoder = TransformerBlock(
            config=config, spec=bert_layer_spec(args), pre_process=pre_process, post_process=post_process
        )
        if post_process:
            set_seeds(layer_stream(args, config.num_layers + 2))
            self.pooler = Pooler(config.hidden_size, config.init_method, config, config.sequence_parallel)
            self.classification_head = _ClassificationHead(args, config, dropout=config.hidden_dropout)

    def forward(self, text: torch.Tensor | None, padding_mask: torch.Tensor) -> torch.Tensor:
        """Compute [tokens, b, hidden], or on the last stage logits [b, classes].

        Args:
            text: token ids [b, s] on the first stage; None on others.
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
        types = torch.zeros_like(text) if self.has_token_types else None
        return self.embedding(input_ids=text, position_ids=positions_of(text), tokentype_ids=types)


def attention_mask(padding_mask: torch.Tensor, *, masks_rows: bool) -> torch.Tensor:
    """The attention mask: True where a query does not attend to a key.

    Returns bool [b, 1, s, s], or [b, 1, 1, s] for kernels that need only the mask of keys.
    """
    keys = padding_mask[:, None, None, :]
    return (keys * padding_mask[:, None, :, None] if masks_rows else keys) < 0.5


# --- a ViT ------------------------------------------------------------------------------------------------------------


class PatchEmbedding(MegatronModule):
    """The embedding of images: a linear layer over each patch, a class token in front, learned positions, dropout."""

    dropout_place = "embedding", 0

    def __init__(self, args: TrainConfig, config: TransformerConfig) -> None:
        super().__init__(config)
        self.patch_dim = args.patch_dim
        self.projection = nn.Linear(args.patch_dim**2 * args.num_channels, config.hidden_size)
        self.class_token = nn.Parameter(torch.empty(config.hidden_size)) if args.vision_class_token else None
        self.position_embeddings = nn.Parameter(torch.empty(args.seq_length, config.hidden_size))
        self.dropout = nn.Dropout(config.hidden_dropout)
        with torch.no_grad():
            config.init_method(self.projection.weight)
            self.projection.bias.zero_()
            config.embedding_init_method(self.position_embeddings)
            if self.class_token is not None:
                config.embedding_init_method(self.class_token[None])
        for parameter in self.parameters():
            parameter.is_embedding_or_output_parameter = True  # --decoupled-lr

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Compute [tokens, b, hidden] from images [b, height, width, channels].

        With sequence parallelism the result has only this rank's tokens.
        """
        hidden = self.projection(patches(images.to(self.projection.weight.dtype), self.patch_dim))
        if self.class_token is not None:
            hidden = torch.cat([self.class_token.expand(len(hidden), 1, -1), hidden], dim=1)
        hidden = (hidden + self.position_embeddings).transpose(0, 1).contiguous()
        if self.config.fp32_residual_connection:
            hidden = hidden.float()
        if not self.config.sequence_parallel:
            return self.dropout(hidden)
        hidden = tensor_parallel.scatter_to_sequence_parallel_region(hidden)
        with tensor_parallel.get_cuda_rng_tracker().fork():
            return self.dropout(hidden)


def patches(images: torch.Tensor, size: int) -> torch.Tensor:
    """The patches of images, row by row: [b, patches, size * size * channels] from [b, height, width, channels]."""
    batch, height, width, channels = images.shape
    grid = images.reshape(batch, height // size, size, width // size, size, channels)
    return grid.transpose(2, 3).reshape(batch, -1, size * size * channels)


class VisionTransformer(_Classifier):
    """The part of a ViT on one stage."""

    block = "decoder"

    def __init__(self, args: TrainConfig, config: TransformerConfig, *, pre_process: bool, post_process: bool) -> None:
        super().__init__(config, pre_process=pre_process, post_process=post_process)
        self.reads_first = args.vision_class_token
        if pre_process:
            set_seeds(layer_stream(args, 0))
            self.embedding = PatchEmbedding(args, config)
        self.decoder = TransformerBlock(
            config=config, spec=_layer_spec(args), pre_process=pre_process, post_process=post_process
        )
        if post_process:
            set_seeds(layer_stream(args, config.num_layers + 1))
            self.classification_head = _ClassificationHead(args, config)

    def forward(self, images: torch.Tensor | None) -> torch.Tensor:
        """Compute [tokens, b, hidden], or on the last stage logits [b, classes].

        `images`: [b, height, width, channels] on the first stage; None on others.
        """
        hidden = self.embedding(images) if self.pre_process else None
        hidden = self.decoder(hidden_states=hidden, attention_mask=None)
        if not self.post_process:
            return hidden
        return self.classification_head(_pooled(hidden, self.config, reads_first=self.reads_first))


def _layer_spec(args: TrainConfig) -> ModuleSpec:
    spec = layer_spec(args)
    spec.submodules.self_attention.params["attn_mask_type"] = AttnMaskType.no_mask
    return spec
