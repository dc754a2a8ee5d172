"""A GPT of megatron.core for benchmarks that compute: a stage for each rank, equal for every contender.

Weights depend only on a seed and the stage, data only on the microbatch's number, so that losses can be compared.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.trainer.start_up.optimizer import choose_kernel

LEARNING_RATE, WEIGHT_DECAY = 1.0e-4, 0.01
_WITHOUT_FUSIONS = dict.fromkeys(
    ("bias_activation_fusion", "bias_dropout_fusion", "masked_softmax_fusion", "persist_layer_norm",
     "gradient_accumulation_fusion"), False,
)  # fmt: skip


@dataclass(frozen=True)
class Model:
    """The sizes of the model.

    Each stage has `layers` transformer layers. The first stage has `extra_layers` more, to balance the output layer of
    the last stage, whose cost depends on `vocab_size`. megatron.core's optimizer clips gradients to the norm
    `clip_grad`; 0: it does not. `optimizer_kernel`: what takes the steps, as `--optimizer-kernel` of training.
    """

    hidden_size: int
    heads: int
    layers: int
    extra_layers: int
    seq_length: int
    micro_batch_size: int
    vocab_size: int
    clip_grad: float = 0.0
    optimizer_kernel: str = "loop"

    @property
    def tokens_per_microbatch(self) -> int:
        return self.seq_length * self.micro_batch_size


@dataclass(frozen=True)
class Data:
    """One microbatch: tokens and labels, each an int64 tensor [micro_batch_size, seq_length]."""

    tokens: torch.Tensor
    labels: torch.Tensor


def is_last_stage() -> bool:
    return parallel_state.is_pipeline_last_stage()


def microbatch(model: Model, index: int) -> Data:
    generator = torch.Generator().manual_seed(1000 + index)
    shape = (model.micro_batch_size, model.seq_length + 1)
    tokens = torch.randint(model.vocab_size, shape, generator=generator)
    return Data(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


def gpt_stage(
    *, num_layers: int, num_stages: int, hidden_size: int, heads: int, vocab_size: int, seq_length: int,
    dtype: torch.dtype = torch.float32, layer_spec: ModuleSpec | None = None, **config: Any,
) -> GPTModel:  # fmt: skip
    """Build this rank's stage of a GPT, with weights from the stage's seed.

    Embeddings are untied and there is no dropout, since not every contender supports them. `layer_spec`: the layers,
    instead of megatron.core's own. `config`: further fields of `TransformerConfig`, or others than the fusions here.
    """
    tensor_parallel.model_parallel_cuda_manual_seed(1234)
    torch.manual_seed(1234 + parallel_state.get_pipeline_model_parallel_rank())
    settings = TransformerConfig(
        num_layers=num_layers, hidden_size=hidden_size, num_attention_heads=heads,
        pipeline_model_parallel_size=num_stages, pipeline_dtype=dtype, params_dtype=dtype, bf16=dtype is torch.bfloat16,
        hidden_dropout=0.0, attention_dropout=0.0, **{**_WITHOUT_FUSIONS, **config},
    )  # fmt: skip
    return GPTModel(
        config=settings, transformer_layer_spec=layer_spec or get_gpt_layer_local_spec(), vocab_size=vocab_size,
        max_sequence_length=seq_length, pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=is_last_stage(), share_embeddings_and_output_weights=False,
    )  # fmt: skip


def gpt_chunk(model: Model) -> GPTModel:
    """Build this rank's stage of a pipeline of two, in FP32, with the weights from which every contender starts."""
    first = model.layers + model.extra_layers
    return gpt_stage(
        num_layers=first + model.layers, num_stages=2, hidden_size=model.hidden_size, heads=model.heads,
        vocab_size=model.vocab_size, seq_length=model.seq_length, num_layers_in_first_pipeline_stage=first,
        num_layers_in_last_pipeline_stage=model.layers, deallocate_pipeline_outputs=True,
        finalize_model_grads_func=finalize_model_grads,
    )  # fmt: skip


def chunk_with_optimizer(model: Model) -> tuple[DistributedDataParallel, MegatronOptimizer]:
    """Build this rank's stage in megatron.core's DDP, and megatron.core's Adam."""
    gpt = gpt_chunk(model)
    chunk = DistributedDataParallel(gpt.config, DistributedDataParallelConfig(), gpt)
    config = OptimizerConfig(optimizer="adam", lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, clip_grad=model.clip_grad)
    optimizer = get_megatron_optimizer(config, [chunk])
    choose_kernel(optimizer, model.optimizer_kernel)
    return chunk, optimizer


def adamw(model: Model, parameters: Iterable[torch.nn.Parameter]) -> torch.optim.AdamW:
    """torch's AdamW with the settings of megatron.core's Adam here."""
    fused = True if model.optimizer_kernel == "fused" else None
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, eps=1e-8, fused=fused)


def apply(gpt: torch.nn.Module, model: Model, data: Data) -> torch.Tensor:
    """Run the chunk's forward. Returns hidden states [s, b, h], or on the last stage the tokens' losses [b, s]."""
    position_ids = torch.arange(model.seq_length).expand_as(data.tokens)
    return gpt(data.tokens, position_ids, None, labels=data.labels if is_last_stage() else None)


def mean_loss(losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The mean loss over the tokens, in the form of Megatron-LM's loss functions."""
    loss = losses.float().mean()
    return loss, {"lm loss": loss.detach().clone()}  # megatron.core divides the loss in place


def forward_step(model: Model):
    """The chunk's forward step in Megatron-LM's form. Its data iterators must yield `Data`."""
    return lambda data_iterator, gpt: (apply(gpt, model, next(data_iterator)), mean_loss)
