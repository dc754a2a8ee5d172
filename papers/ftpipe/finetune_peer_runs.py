"""The arms of `finetune_peers.py`, which take turns in the same two processes; all take the flags of `finetune.py`.

A turn is a dictionary with `arm` and `argv`. Turns of torch also have `schedule`, `split` (the module at which the
tracer's second stage begins) and `mend` (the names of additional repairs, of `MENDS`).
"""

import argparse
import contextlib
import gc
import io
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, islice
from pathlib import Path

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, fx, nn
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe, SplitPoint, pipeline

from megatron.finetuning import job
from megatron.finetuning.arguments import parse_args
from megatron.finetuning.data.batches import IGNORED, Epochs
from megatron.finetuning.samples import Data, read_data
from megatron.pipeline.runtime.failure import failure_guard
from megatron.trainer.ranks import StopSignal
from megatron.trainer.start_up import initialize

SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
MENDS = ("inputs", "contiguous", "shared")
Batch = list[dict[str, Tensor]]
"""The microbatches of a batch."""


class Logits(nn.Module):
    """A model of transformers that takes tensors in a fixed order and returns only its logits.

    `hands_on`: whether inputs are copied first, so that the second stage receives them as results of the first stage.
    """

    def __init__(self, model: nn.Module, names: Sequence[str], *, hands_on: bool) -> None:
        super().__init__()
        self.model, self._names, self._hands_on = model, tuple(names), hands_on

    def forward(self, *tensors: Tensor) -> Tensor:
        """Run the forward of a microbatch."""
        if self._hands_on:
            tensors = tuple(each + 0 for each in tensors)
        return self.model(**dict(zip(self._names, tensors, strict=True))).logits


class Naive:
    """The naive arm: the whole model computes forward and backward of each microbatch in turn."""

    def __init__(self, model: nn.Module) -> None:
        self.parameters = list(model.parameters())
        self._model = model

    def run(self, batch: Batch) -> float:
        """Accumulate the gradients of a batch. Returns the loss."""
        loss = 0.0
        for microbatch in batch:
            part = self._model(**microbatch).loss / len(batch)
            part.backward()
            loss += part.item()
        return loss


class TorchPipelining:
    """This rank's stage of torch's tracer, under a schedule of torch.distributed.pipelining with `loss_fn`."""

    def __init__(
        self, model: nn.Module, example: Mapping[str, Tensor], args: argparse.Namespace, turn: Mapping
    ) -> None:
        mend = turn["mend"]
        self._model = model
        inputs = self._inputs(example)
        given = {f"tensors_{number}": name for number, name in enumerate(inputs)}  # name in the tracer's graph -> name
        pipe = pipeline(
            Logits(model, list(inputs), hands_on="inputs" in mend), tuple(inputs.values()),
            split_spec={f"model.{turn['split']}": SplitPoint.BEGINNING},
        )  # fmt: skip
        assert pipe.num_stages == args.world_size == 2, pipe.num_stages
        if "contiguous" in mend:
            make_contiguous(*(pipe.get_stage_module(stage) for stage in range(2)))
        module = pipe.get_stage_module(args.rank)
        self.parameters = list(module.parameters())
        taken = [node.name for node in module.graph.nodes if node.op == "placeholder" and node.name in given]
        self._taken = {name: given[name] for name in taken}
        self._shared = copies_of_shared(model, module) if "shared" in mend else []
        self._is_last = args.rank == 1
        self._schedule = SCHEDULES[turn["schedule"]](
            pipe.build_stage(args.rank, torch.device("cpu")), args.gradient_accumulation_steps, loss_fn=mean_loss
        )

    def run(self, batch: Batch) -> float | None:
        """Accumulate the gradients of a batch. Returns the loss on the last rank, None on the other."""
        losses: list[Tensor] = []
        inputs = [self._inputs(microbatch) for microbatch in batch]
        taken = {each: torch.cat([one[name] for one in inputs]) for each, name in self._taken.items()}
        if self._is_last:
            target = torch.cat([microbatch["labels"] for microbatch in batch])
            self._schedule.step(target=target, losses=losses, return_outputs=False, **taken)
        else:
            self._schedule.step(*taken.values())
        for shared in self._shared:
            copies = [each for each in shared if each.grad is not None]  # the stage does not use the others
            total = torch.stack([each.grad for each in copies]).sum(0)
            dist.all_reduce(total)
            for each in copies:
                each.grad.copy_(total)
        return torch.stack(losses).mean().item() if losses else None

    def _inputs(self, microbatch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The model's inputs without labels; a decoder also takes the shifted labels."""
        inputs = {name: each for name, each in microbatch.items() if name != "labels"}
        if self._model.config.is_encoder_decoder:
            inputs["decoder_input_ids"] = self._model._shift_right(microbatch["labels"])
        return inputs


def mean_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """The mean loss, equal to the one that transformers computes for these models."""
    return nn.functional.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=IGNORED)


def copies_of_shared(model: nn.Module, stage: nn.Module) -> list[list[nn.Parameter]]:
    """For each weight with several names in the model, the tracer's copies of it in this stage, one for each user."""
    names: dict[int, list[str]] = {}
    for name, each in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(each), []).append(f"model.{name}")
    own = dict(stage.named_parameters())
    found = [[own[name] for name in shared if name in own] for shared in names.values() if len(shared) > 1]
    assert all(found), "a stage that has no copy would have to take part in the sum, too"
    return found


def make_contiguous(first: fx.GraphModule, second: fx.GraphModule) -> None:
    """Make the first stage send contiguous tensors, and the second expect them, since gloo and NCCL need them."""
    output = next(node for node in first.graph.nodes if node.op == "output")
    for node in dict.fromkeys(output.all_input_nodes):
        with first.graph.inserting_before(output):
            made = first.graph.call_function(torch.ops.aten.contiguous.default, (node,))
        made.meta["val"] = node.meta["val"].contiguous()
        output.replace_input_with(node, made)
    first.recompile()
    for node in second.graph.nodes:
        if node.op == "placeholder":
            node.meta["val"] = node.meta["val"].contiguous()


def run_all(listed: str, result: str) -> None:
    """Run the turns of the file `listed`. Rank 0 writes to `result` the `losses` of the batches, and the steady
    `seconds` of a batch."""
    turns = json.loads(Path(listed).read_text())
    stop = StopSignal().install()
    first = parse_args(turns[0]["argv"])
    job.join_job(first)
    with initialize.left_in_order(), failure_guard.guard():
        done = []
        for turn in turns:
            done.append({"arm": turn["arm"], **run(turn, stop)})
            gc.collect()
            if first.rank == 0:
                Path(result).write_text(json.dumps(done))
                print(f"{turn['arm']}: {1000 * done[-1]['seconds']:.0f} ms a batch", file=sys.stderr, flush=True)


def run(turn: Mapping, stop: StopSignal) -> dict:
    """Run one turn. Returns the same result on both ranks."""
    args = job.on_this_device(parse_args(turn["argv"]))
    dist.barrier()
    if turn["arm"] == "naive":
        found = train(args, turn) if args.rank == 0 else None
    elif "schedule" in turn:
        found = train(args, turn)
    else:
        found = finetuned(args, stop)
    gathered: list = [None, None]
    dist.all_gather_object(gathered, found)
    losses = next(each["losses"] for each in reversed(gathered) if each and each["losses"])
    return {"losses": losses, "seconds": gathered[0]["seconds"]}


def finetuned(args: argparse.Namespace, stop: StopSignal) -> dict:
    """Run `finetune.py` in this process. Returns `losses` and `seconds` on rank 0."""
    with contextlib.redirect_stdout(io.StringIO()):
        job.run(args, stop)
    if args.rank:
        return {"losses": [], "seconds": 0.0}
    metrics = Path(args.metrics_file)
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    metrics.unlink()
    # The log's times would not do: without waiting, reports of batches come late, and the last ones all at once.
    ends = list(accumulate(line["step_time_ms"] / 1000 for line in lines))
    return {"losses": [line["loss"] for line in lines], "seconds": steady_seconds(ends)}


def steady_seconds(ends: Sequence[float]) -> float:
    """The seconds of a batch from the times at which batches ended, without the first and the last quarter of them."""
    quarter = max(len(ends) // 4, 1)
    if len(ends) < 3:
        raise ValueError(f"{len(ends)} batches have no steady state between the first and the last; give 3 or more")
    return (ends[-quarter - 1] - ends[quarter - 1]) / (len(ends) - 2 * quarter)


def train(args: argparse.Namespace, turn: Mapping) -> dict:
    """Run a peer. Returns `losses`, if this rank knows them, and `seconds`."""
    data = read_data(args)
    model = getattr(transformers, data.task.auto_model).from_pretrained(
        args.model_name_or_path, local_files_only=True, **data.changes
    )
    model.config.use_cache = False
    model.train()
    example = data.example(args.per_device_train_batch_size)
    peer = TorchPipelining(model, example, args, turn) if "schedule" in turn else Naive(model)
    optimizer = torch.optim.SGD(peer.parameters, lr=args.learning_rate, momentum=args.momentum)
    losses, ends = [], []
    for batch in islice(batches(args, data), args.max_steps):
        optimizer.zero_grad()
        losses.append(peer.run(batch))
        optimizer.step()
        ends.append(time.perf_counter())
    return {"losses": [each for each in losses if each is not None], "seconds": steady_seconds(ends)}


def batches(args: argparse.Namespace, data: Data) -> Iterator[Batch]:
    """Yield the batches of `finetune.py`, in its order."""
    size = args.per_device_train_batch_size
    epochs = Epochs(
        num_samples=len(data.training), micro_batch_size=size, accumulation=args.gradient_accumulation_steps,
        seed=args.seed, drop_last=args.dataloader_drop_last,
    )  # fmt: skip
    for microbatches in epochs.batches():
        yield [data.training.batch(indices, size) for indices in microbatches]
