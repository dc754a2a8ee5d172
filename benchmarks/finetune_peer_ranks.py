"""What the processes of `finetune_peers.py` run for its peers, which take the words of `finetune.py`.

    torchrun --nproc-per-node 2 benchmarks/finetune_peer_ranks.py --peer gpipe --split encoder.block.2 --result F WORDS
    torchrun --nproc-per-node 1 benchmarks/finetune_peer_ranks.py --peer naive --result F WORDS

`gpipe` and `1f1b` are schedules of torch.distributed.pipelining over the stages of its tracer, which begins the second
one at the module `--split`. `naive` is the whole model in one process.
"""

import argparse
import json
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, fx, nn
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe, SplitPoint, pipeline

from megatron import backend
from megatron.finetuning.arguments import parse_args
from megatron.finetuning.data.epochs import Epochs
from megatron.finetuning.data.rows import IGNORED
from megatron.finetuning.samples import read_data

SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
MENDS = ("inputs", "contiguous", "shared")
Batch = list[dict[str, Tensor]]
"""Microbatches."""


class Logits(nn.Module):
    """A model of transformers that takes tensors in a fixed order and returns its logits alone.

    `hands_on`: what it takes is copied first, so that for the second stage it is something that the first one made.
    """

    def __init__(self, model: nn.Module, names: Sequence[str], *, hands_on: bool) -> None:
        super().__init__()
        self.model, self._names, self._hands_on = model, tuple(names), hands_on

    def forward(self, *tensors: Tensor) -> Tensor:
        """Of a microbatch."""
        if self._hands_on:
            tensors = tuple(each + 0 for each in tensors)
        return self.model(**dict(zip(self._names, tensors, strict=True))).logits


class Naive:
    """Forward, backward, the next microbatch; then a step."""

    def __init__(self, model: nn.Module) -> None:
        self.parameters = list(model.parameters())
        self._model = model

    def run(self, batch: Batch) -> float:
        """Leaves the gradients; returns the loss."""
        loss = 0.0
        for microbatch in batch:
            part = self._model(**microbatch).loss / len(batch)
            part.backward()
            loss += part.item()
        return loss


class TorchPipelining:
    """This rank's stage of the tracer's, under one of its package's schedules; the loss is the schedule's `loss_fn`.

    `mend`: do what a T5 needs beyond that, see `finetune_peers.py`.
    """

    def __init__(
        self, model: nn.Module, example: Mapping[str, Tensor], args: argparse.Namespace, *, mend: Collection[str]
    ) -> None:
        self._model = model
        inputs = self._inputs(example)
        pipe = pipeline(
            Logits(model, list(inputs), hands_on="inputs" in mend), tuple(inputs.values()),
            split_spec={f"model.{args.split}": SplitPoint.BEGINNING},
        )  # fmt: skip
        assert pipe.num_stages == args.world_size == 2, pipe.num_stages
        if "contiguous" in mend:
            make_contiguous(*(pipe.get_stage_module(stage) for stage in range(2)))
        module = pipe.get_stage_module(args.rank)
        self.parameters = list(module.parameters())
        self._shared = copies_of_shared(model, module) if "shared" in mend else []
        self._is_last = args.rank == 1
        self._schedule = SCHEDULES[args.peer](
            pipe.build_stage(args.rank, torch.device("cpu")), args.gradient_accumulation_steps, loss_fn=mean_loss
        )

    def run(self, batch: Batch) -> float | None:
        """Leaves the gradients; returns the loss on the last rank."""
        losses: list[Tensor] = []
        if self._is_last:
            target = torch.cat([microbatch["labels"] for microbatch in batch])
            self._schedule.step(target=target, losses=losses, return_outputs=False)
        else:
            inputs = [self._inputs(microbatch) for microbatch in batch]
            self._schedule.step(*(torch.cat(each) for each in zip(*(each.values() for each in inputs), strict=True)))
        for shared in self._shared:
            copies = [each for each in shared if each.grad is not None]  # others are in the stage, and not used
            total = torch.stack([each.grad for each in copies]).sum(0)
            dist.all_reduce(total)
            for each in copies:
                each.grad.copy_(total)
        return torch.stack(losses).mean().item() if losses else None

    def _inputs(self, microbatch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What the model takes beside labels; a decoder takes them shifted."""
        inputs = {name: each for name, each in microbatch.items() if name != "labels"}
        if self._model.config.is_encoder_decoder:
            inputs["decoder_input_ids"] = self._model._shift_right(microbatch["labels"])
        return inputs


def mean_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """As transformers' own for the models here."""
    return nn.functional.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=IGNORED)


def copies_of_shared(model: nn.Module, stage: nn.Module) -> list[list[nn.Parameter]]:
    """By weight that has several names in the model: what the tracer made of it in this stage, one for each user."""
    names: dict[int, list[str]] = {}
    for name, each in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(each), []).append(f"model.{name}")
    own = dict(stage.named_parameters())
    found = [[own[name] for name in shared if name in own] for shared in names.values() if len(shared) > 1]
    assert all(found), "a stage that has no copy would have to take part in the sum, too"
    return found


def make_contiguous(first: fx.GraphModule, second: fx.GraphModule) -> None:
    """Have the first stage hand on contiguous tensors, and the second expect them: gloo and NCCL send no others."""
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", choices=("naive", *SCHEDULES), required=True)
    parser.add_argument("--split", help="the module at which the second stage begins")
    parser.add_argument("--result", type=Path, required=True)
    parser.add_argument("--mend", choices=MENDS, action="append", default=[], help="what the tracer leaves undone")
    own, words = parser.parse_known_args()
    args = parse_args(words)
    args.peer, args.split = own.peer, own.split
    backend.keep_freed_memory()  # as finetune.py
    if args.world_size > 1:
        dist.init_process_group("gloo")
    found = train(args, own.mend)
    if args.rank == args.world_size - 1:
        own.result.write_text(json.dumps(found))
    if args.world_size > 1:
        dist.barrier()
        dist.destroy_process_group()


def train(args: argparse.Namespace, mend: Collection[str]) -> dict[str, list[float]]:
    """`losses` of the batches, and `ends`, seconds of the clock."""
    data = read_data(args)
    words = dict(data.changes)
    model = getattr(transformers, data.task.auto_model).from_pretrained(
        args.model_name_or_path, local_files_only=True, **words
    )
    model.config.use_cache = False
    model.train()
    example = data.example(args.per_device_train_batch_size)
    peer = Naive(model) if args.peer == "naive" else TorchPipelining(model, example, args, mend=mend)
    optimizer = torch.optim.SGD(peer.parameters, lr=args.learning_rate, momentum=args.momentum)
    losses, ends = [], []
    for batch in batches(args, data):
        optimizer.zero_grad()
        losses.append(peer.run(batch))
        optimizer.step()
        ends.append(time.perf_counter())
    return {"losses": losses, "ends": ends}


def batches(args: argparse.Namespace, data) -> Iterator[Batch]:
    """The samples of `finetune.py`, in its order."""
    size = args.per_device_train_batch_size
    epochs = Epochs(
        num_samples=len(data.training), micro_batch_size=size, accumulation=args.gradient_accumulation_steps,
        seed=args.seed, drop_last=args.dataloader_drop_last,
    )  # fmt: skip
    for _, microbatches in zip(range(args.max_steps), epochs.batches(), strict=False):
        yield [data.training.batch(indices, size) for indices in microbatches]


if __name__ == "__main__":
    main()
