"""A ViT as megatron.core's transformer layers, in stages.

megatron.core's own vision models hold all of a model, and their local layers attend causally. Here the first stage
turns patches into tokens, the last one tells the class, and every stage has its layers, which attend to all patches.
Weights do not depend on how many stages hold them (see gpt.py).
"""

import argparse

import torch
from torch import nn

from megatron.core import tensor_parallel
from megatron.core.transformer.enums import AttnMaskType, ModelType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.trainer.models.classification_head import ClassificationHead, pooled
from megatron.trainer.models.gpt import layer_spec, layer_stream
from megatron.trainer.ranks.seeds import set_seeds


class PatchEmbedding(MegatronModule):
    """Images to tokens: a linear layer over each patch, a class token before them, learned positions, dropout."""

    dropout_place = "embedding", 0

    def __init__(self, args: argparse.Namespace, config: TransformerConfig) -> None:
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
        """[b, height, width, channels] to [tokens, b, hidden]; with sequence parallelism this rank's tokens."""
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
    """[b, height, width, channels] to [b, patches, size * size * channels], row by row."""
    batch, height, width, channels = images.shape
    grid = images.reshape(batch, height // size, size, width // size, size, channels)
    return grid.transpose(2, 3).reshape(batch, -1, size * size * channels)


class VisionTransformer(MegatronModule):
    """The part of a ViT that a stage holds.

    Args:
        args: the shape of images and head.
        config: of the stage.
        pre_process, post_process: the stage embeds, or tells the class.
    """

    share_embeddings_and_output_weights = False
    new_parts = ("classification_head",)
    """What --pretrained-checkpoint does not bring."""

    def __init__(
        self, args: argparse.Namespace, config: TransformerConfig, *, pre_process: bool, post_process: bool
    ) -> None:
        super().__init__(config)
        self.pre_process, self.post_process = pre_process, post_process
        self.model_type = ModelType.encoder_or_decoder
        self.reads_first = args.vision_class_token
        if pre_process:
            set_seeds(layer_stream(args, 0))
            self.embedding = PatchEmbedding(args, config)
        self.decoder = TransformerBlock(
            config=config, spec=_layer_spec(args), pre_process=pre_process, post_process=post_process
        )
        if post_process:
            set_seeds(layer_stream(args, config.num_layers + 1))
            self.classification_head = ClassificationHead(args, config)

    def set_input_tensor(self, input_tensor: torch.Tensor | list[torch.Tensor]) -> None:
        """What the stage before has sent."""
        self.decoder.set_input_tensor(input_tensor[0] if isinstance(input_tensor, list) else input_tensor)

    def forward(self, images: torch.Tensor | None) -> torch.Tensor:
        """[tokens, b, hidden], of the last stage logits [b, classes]. `images`: of the first stage."""
        hidden = self.embedding(images) if self.pre_process else None
        hidden = self.decoder(hidden_states=hidden, attention_mask=None)
        if not self.post_process:
            return hidden
        return self.classification_head(pooled(hidden, self.config, reads_first=self.reads_first))


def vision_model(
    args: argparse.Namespace, config: TransformerConfig, *, pre_process: bool = True, post_process: bool = True
) -> VisionTransformer:
    """Build the part of the ViT that a stage holds; which, `config` says.

    Random states are left as `set_seeds(args.seed)` leaves them.
    """
    set_seeds(args.seed)
    model = VisionTransformer(args, config, pre_process=pre_process, post_process=post_process)
    set_seeds(args.seed)
    return model


def _layer_spec(args: argparse.Namespace) -> ModuleSpec:
    spec = layer_spec(args)
    spec.submodules.self_attention.params["attn_mask_type"] = AttnMaskType.no_mask
    return spec
