"""The peers of `freeze_peers.py`, each of which trains a stage of a ViT with some layers frozen by hand."""

import gc
import json
import time
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.functional import cross_entropy

from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import unwrap_model
from megatron.trainer.arguments import parse_args
from megatron.trainer.models import core_config
from megatron.trainer.models.gpt import build_chunks, wrap_for_training
from megatron.trainer.plan import from_flags
from megatron.trainer.programs import pretrain_vision_classify as door
from megatron.trainer.run.pretraining import assemble, complete
from megatron.trainer.start_up import initialize
from megatron.trainer.start_up.optimizer import build_optimizer
from megatron.trainer.start_up.run import Run


def freeze(chunk: torch.nn.Module, args, depth: int) -> None:
    """Freeze the first `depth` layers, and with them the embedding."""
    if depth and chunk.pre_process:
        chunk.embedding.requires_grad_(False)
    for layer in chunk.decoder.layers:
        layer.requires_grad_(layer.layer_number > depth)


def forward_step(data_iterator, model):
    """Run a forward step in Megatron-LM's form, with a mean for each microbatch, since the schedule counts tokens in
    whole numbers."""
    output, loss_function = door.forward_step(data_iterator, model)

    def mean(logits: torch.Tensor):
        total, number, report = loss_function(logits)
        return total / number, report

    return output, mean


class Core:
    """megatron.core's forward_backward_pipelining_without_interleaving, as Megatron-LM's training step calls it."""

    def __init__(self, run: Run, chunk: torch.nn.Module) -> None:
        args = run.args
        chunk.config.finalize_model_grads_func = finalize_model_grads
        chunk.config.deallocate_pipeline_outputs = True
        self.chunk = wrap_for_training([chunk], core_config.ddp_config(args), on_host=False)[0]
        self.optimizer = build_optimizer(args, [self.chunk])
        self.args, self.data = args, run.samples(0, "training", 0)[0]
        self.schedule = get_forward_backward_func()

    def batch(self, num_microbatches: int) -> float | None:
        self.chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        numbers = self.schedule(
            forward_step_func=forward_step, data_iterator=self.data, model=[self.chunk],
            num_microbatches=num_microbatches, seq_length=self.args.seq_length,
            micro_batch_size=self.args.micro_batch_size,
        )  # fmt: skip
        self.optimizer.step()
        return sum((each["loss"][0] / each["loss"][1]).item() for each in numbers) / len(numbers) if numbers else None


class Torch:
    """torch.distributed.pipelining's 1F1B, with torch's AdamW."""

    def __init__(self, run: Run, chunk: torch.nn.Module) -> None:
        self.chunk, self.data = chunk, run.samples(0, "training", 0)[0]
        trained = [parameter for parameter in chunk.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=run.args.lr, weight_decay=0.05) if trained else None
        self.trained = trained
        self.stage = PipelineStage(_Stage(chunk), dist.get_rank(), 2, torch.device("cpu"))
        self.schedule = None

    def batch(self, num_microbatches: int) -> float | None:
        if self.schedule is None:
            self.schedule = Schedule1F1B(self.stage, num_microbatches, loss_fn=cross_entropy)
        if self.optimizer is not None:
            self.optimizer.zero_grad()
        batches = [next(self.data) for _ in range(num_microbatches)]
        loss = None
        if self.chunk.pre_process:
            self.schedule.step(torch.cat([each["images"] for each in batches]))
        else:
            losses: list[torch.Tensor] = []
            labels = torch.cat([each["labels"] for each in batches])
            self.schedule.step(target=labels, losses=losses, return_outputs=False)
            loss = torch.stack(losses).mean().item()
        norm = torch.stack(torch._foreach_norm([each.grad for each in self.trained])).square().sum() \
            if self.trained else torch.zeros(())  # fmt: skip
        dist.all_reduce(norm)
        if self.trained and norm > 1:
            torch._foreach_mul_([each.grad for each in self.trained], float(1 / norm.sqrt()))
        if self.optimizer is not None:
            self.optimizer.step()
        return loss


class _Stage(torch.nn.Module):
    """The chunk in the form of torch.distributed.pipelining, which passes received tensors as arguments."""

    def __init__(self, chunk: torch.nn.Module) -> None:
        super().__init__()
        self.chunk = chunk

    def forward(self, received: torch.Tensor) -> torch.Tensor:
        if self.chunk.pre_process:
            return self.chunk(received)
        self.chunk.set_input_tensor(received)
        return self.chunk(None)


PEERS = {"torch 1F1B": Torch, "megatron.core 1F1B": Core}


def train(name: str, depth: str, result: str, *flags: str) -> None:
    """Train on one rank of a job. The last stage's rank writes the seconds of each batch and the first loss to
    `result`."""
    args, _ = complete(parse_args(list(flags), defaults=door.DEFAULTS))
    timeout = timedelta(minutes=args.distributed_timeout_minutes)
    initialize.join_process_group(initialize.rendezvous(), args.distributed_backend, timeout)
    with initialize.left_in_order():
        run = assemble(initialize.set_up(args), door.program())
        args = run.args
        model = core_config.transformer_config(args)
        provider = partial(run.program.model_provider, args)
        stage = parallel_state.get_pipeline_model_parallel_rank()
        layers = from_flags.layers_of_stages(model)
        [chunk] = unwrap_model(build_chunks(provider, model, stages=(stage,), layers=layers))
        freeze(chunk, args, int(depth))
        peer = PEERS[name](run, chunk)
        gc.collect()
        gc.freeze()
        losses, seconds = [], []
        for _ in range(24):
            start = time.perf_counter()
            losses.append(peer.batch(args.global_batch_size // args.micro_batch_size))
            seconds.append(time.perf_counter() - start)
        slowest = torch.tensor(seconds, dtype=torch.float64)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        if losses[0] is not None:
            Path(result).write_text(json.dumps({"seconds": slowest.tolist(), "first_loss": losses[0]}))
        dist.barrier()
        run.engine.close()
        run.update.close()
