"""A tiny GPT trained with megatron.core alone, for checkpoint tests; data by sample index, whatever the degrees."""

import argparse
from dataclasses import dataclass, field

import torch

from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module

VOCABULARY, SEQUENCE, GLOBAL_BATCH = 64, 16, 4


@dataclass
class SmallRun:
    """Model, optimizer and scheduler of one rank."""

    args: argparse.Namespace
    chunks: list
    optimizer: object
    scheduler: object
    losses: list[float] = field(default_factory=list)

    def train(self, first: int, num_iterations: int) -> list[float]:
        """Losses of these iterations (mean over the global batch), on every rank."""
        return [self._iteration(iteration) for iteration in range(first, first + num_iterations)]

    def _iteration(self, iteration: int) -> float:
        (chunk,) = self.chunks
        data_rank, data_size = (parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size())
        chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        samples = iter(range(iteration * GLOBAL_BATCH + data_rank, (iteration + 1) * GLOBAL_BATCH, data_size))
        reports = get_forward_backward_func()(
            forward_step_func=_forward_step,
            data_iterator=samples,
            model=[chunk],
            num_microbatches=GLOBAL_BATCH // data_size,
            seq_length=SEQUENCE,
            micro_batch_size=1,
            forward_only=False,
        )
        self.optimizer.step()
        self.scheduler.step(increment=GLOBAL_BATCH)
        total = torch.tensor([sum(report.item() for report in reports)] if reports else [0.0], dtype=torch.float64)
        torch.distributed.all_reduce(total)
        return total.item() / GLOBAL_BATCH / parallel_state.get_tensor_model_parallel_world_size()

    def parameters(self) -> dict[str, torch.Tensor]:
        """Copies of this rank's weights by name."""
        return {name: value.detach().clone() for name, value in self.chunks[0].named_parameters()}


def _forward_step(samples, model):
    generator = torch.Generator().manual_seed(1000 + next(samples))
    tokens = torch.randint(0, VOCABULARY, (1, SEQUENCE + 1), generator=generator)
    positions = torch.arange(SEQUENCE).unsqueeze(0)
    mask = torch.tril(torch.ones(1, 1, SEQUENCE, SEQUENCE)) < 0.5
    output = model(tokens[:, :-1], positions, mask, labels=tokens[:, 1:])
    return output, _mean_loss


def _mean_loss(output):
    loss = output.float().mean()
    return loss, loss.detach().clone()


def arguments(**changes) -> argparse.Namespace:
    """The arguments that checkpoints look at, as the command line would leave them."""
    values = dict(
        num_layers=4, hidden_size=16, num_attention_heads=4, ffn_hidden_size=64, seq_length=SEQUENCE,
        max_position_embeddings=SEQUENCE, position_embedding_type="learned_absolute", normalization="LayerNorm",
        add_bias_linear=True, add_qkv_bias=False, group_query_attention=False, num_query_groups=1,
        swiglu=False, untie_embeddings_and_output_weights=False, padded_vocab_size=VOCABULARY,
        make_vocab_size_divisible_by=16, tensor_model_parallel_size=1, pipeline_model_parallel_size=1,
        bf16=False, fp16=False, optimizer="adam", use_distributed_optimizer=False, load=None, save=None, ckpt_step=None,
        finetune=False, skip_train=False, no_load_optim=False, no_load_rng=False, no_save_optim=False,
        no_save_rng=False, async_save=False, dist_ckpt_strictness="assume_ok_unexpected",
        ckpt_fully_parallel_load=False, ckpt_fully_parallel_save=True, hidden_dropout=0.0, seed=1234,
    )  # fmt: skip
    return argparse.Namespace(**{**values, **changes})


def start(args: argparse.Namespace) -> SmallRun:
    """Initialise the parallel groups of `args` and build the run; `finish` undoes it."""
    parallel_state.initialize_model_parallel(args.tensor_model_parallel_size, args.pipeline_model_parallel_size)
    torch.manual_seed(args.seed)
    model_parallel_cuda_manual_seed(args.seed)
    dtype = torch.bfloat16 if args.bf16 else torch.float32
    config = TransformerConfig(
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        num_attention_heads=args.num_attention_heads,
        ffn_hidden_size=args.ffn_hidden_size,
        attention_dropout=args.hidden_dropout,
        hidden_dropout=args.hidden_dropout,
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        pipeline_dtype=dtype,
        params_dtype=dtype,
        bf16=args.bf16,
        gated_linear_unit=args.swiglu,
        activation_func=torch.nn.functional.silu if args.swiglu else torch.nn.functional.gelu,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        finalize_model_grads_func=finalize_model_grads,
        batch_p2p_comm=False,
        deallocate_pipeline_outputs=False,
    )
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(normalization=args.normalization),
        args.padded_vocab_size,
        args.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
    )
    model = Float16Module(config, model) if args.bf16 else model
    ddp = DistributedDataParallelConfig(
        use_distributed_optimizer=args.use_distributed_optimizer, grad_reduce_in_fp32=True
    )
    chunk = DistributedDataParallel(config, ddp, model)
    chunk.broadcast_params()
    config.grad_scale_func = None
    config.no_sync_func = None
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer=args.optimizer, lr=1e-2, min_lr=0.0, weight_decay=0.01, bf16=args.bf16, params_dtype=dtype,
            clip_grad=1.0, use_distributed_optimizer=args.use_distributed_optimizer,
        ),
        [chunk],
    )  # fmt: skip
    scheduler = OptimizerParamScheduler(
        optimizer, init_lr=0.0, max_lr=1e-2, min_lr=0.0, lr_warmup_steps=8, lr_decay_steps=400, lr_decay_style="cosine",
        start_wd=0.01, end_wd=0.01, wd_incr_steps=400, wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=False,
    )  # fmt: skip
    return SmallRun(args, [chunk], optimizer, scheduler)


def finish() -> None:
    """Leave no parallel state behind."""
    parallel_state.destroy_model_parallel()
