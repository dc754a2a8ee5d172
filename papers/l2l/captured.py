"""Real computation on a CPU of a captured Llama, whose layers finetune.py relays, beside `flush` and other systems.

The contenders take turns as in `compute.py`. All begin with the same files of weights and train on the same rows, which
finetune.py reads. The relay and `flush` are built from flags, as in a run. The others train the model of transformers
with its activation checkpointing. The losses must agree.
"""

import argparse
import statistics
import tempfile
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path

import torch
import transformers
from torch import Tensor, nn

from benchmarks.common.tables import Row, show_table, spread
from megatron import backend
from megatron.finetuning.arguments import changed, parse_args
from megatron.finetuning.assembly import BuiltPipeline, build_pipeline
from megatron.finetuning.data.batches import Feed
from megatron.finetuning.job import on_this_device
from megatron.finetuning.optimizers import make_optimizer
from megatron.finetuning.plan import decaying, make_plan
from megatron.finetuning.pretrained import Pretrained
from megatron.finetuning.samples import epochs_of, read_data
from megatron.pipeline.library.ranks import find_ranks
from megatron.pipeline.runtime.stages.module.rank_update import TOGETHER
from papers.l2l import compute
from papers.l2l.compute import Worker, take_turns, work
from papers.l2l.model import bytes_moved
from papers.l2l.peers import FullyShard, Zero, one_rank
from tests.finetuning import tiny

VOCABULARY = 256


class CapturedModel:
    """The model of a folder, and the rows on which all contenders train.

    Args:
        argv: flags of finetune.py, without the schedule.
    """

    def __init__(self, argv: list[str]) -> None:
        self._argv = argv
        self.args = self.with_flags()
        self.data = read_data(self.args)
        self.epochs = epochs_of(self.args, self.data.training)
        self.microbatch_size = self.args.per_device_train_batch_size

    def with_flags(self, *flags: str) -> argparse.Namespace:
        return changed(on_this_device(parse_args([*self._argv, *flags])), resumed_from=None)

    def rows(self, batch: int) -> tuple[tuple[int, ...], ...]:
        """The row numbers of each microbatch of a batch."""
        return next(self.epochs.batches(batch))

    def recomputed(self, wrap=lambda unit: unit) -> nn.Module:
        """The model of transformers. The embedding is a unit, each layer, and the last norm with the head."""
        model = transformers.AutoModelForCausalLM.from_pretrained(
            self.args.model_name_or_path, attn_implementation=self.args.attn_implementation
        ).train()
        model.activation_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": False})
        self._decays = decaying(model)
        self.layer_parameters = sum(each.numel() for each in model.model.layers[0].parameters())
        for unit in (model.model.embed_tokens, *model.model.layers, [model.model.norm, model.lm_head]):
            wrap(unit)
        wrap(model)
        return model

    def loss(self, module: nn.Module, microbatch: int) -> Tensor:
        batch, place = divmod(microbatch, self.args.gradient_accumulation_steps)
        rows = self.rows(batch)[place]
        return module(**self.data.training.batch(rows, len(rows))).loss

    def optimizer(self, module: nn.Module) -> torch.optim.Optimizer:
        return make_optimizer(dict(module.named_parameters()), self.args, decays=self._decays)


class Built:
    """A contender that is built as finetune.py builds a run: `run(m)` trains a batch and returns its loss."""

    def __init__(self, model: CapturedModel, *flags: str) -> None:
        one_rank()
        self.model, args = model, model.with_flags(*flags)
        plan = make_plan(args, model.data)
        feed = Feed(model.data.training, size=model.microbatch_size, seed=args.seed, device=backend.device())
        pretrained = Pretrained(plan.model, args.model_name_or_path, new_head=model.data.task.new_head)
        self.pipeline: BuiltPipeline = build_pipeline(
            plan, args, feed=feed, summary=model.data.task.summary, pretrained=pretrained,
            ranks=find_ranks(None, None, 1), num_steps=args.max_steps,
        )  # fmt: skip
        self._num_parameters = sum(each.numel() for each in plan.captured.parameters.values())

    def run(self, num_microbatches: int) -> float:
        engine, feed = self.pipeline.engine, self.pipeline.feed
        batch, first, rows = engine.next_batch, engine.next_microbatch, self.model.rows(engine.next_batch)
        assert feed.add(batch, first, rows) == num_microbatches
        reports = engine.run_batch(num_microbatches, sum(map(len, rows)))
        reports += engine.drain()
        feed.forget(batch, first)
        return reports[-1].losses["loss"]


class Flush(Built):
    """All state on the device, and the one stage recomputed."""

    num_bytes_moved = 0

    def __init__(self, model: CapturedModel) -> None:
        super().__init__(model, "--pipeline_schedule", "flush")

    @cached_property
    def device_state_bytes(self) -> int:
        """The bytes of weights, gradients and two moments."""
        return 4 * 4 * self._num_parameters


class Relay(Built):
    """Weights, gradients and moments on the host; `stash`: where inputs of layers wait."""

    def __init__(self, model: CapturedModel, stash: str) -> None:
        super().__init__(model, "--pipeline_schedule", "l2l", "--l2l_stash", stash)
        self._update = self.pipeline.updates[TOGETHER]

    @property
    def device_state_bytes(self) -> int:
        """The bytes of the arena of weights and of two gradient buffers."""
        return self._update.weights.num_bytes + self._update.gradients.num_bytes

    @property
    def num_bytes_moved(self) -> int:
        """The bytes of weights, of gradients, and of inputs of layers to the host and back."""
        engine = self.pipeline.engine
        inputs = 0 if engine.stash is None else 2 * engine.stash.num_bytes_offloaded
        return bytes_moved(self._update, engine.next_batch) + inputs


CONTENDERS = {
    "flush": Flush,
    "l2l": lambda model: Relay(model, "host"),
    "l2l, inputs on the device": lambda model: Relay(model, "device"),
    "FSDP2, CPUOffloadPolicy": FullyShard,
    "ZeRO-Offload": lambda model: Zero(model, 2),
    "ZeRO-3, all offloaded": lambda model: Zero(model, 3),
}
"""Name -> the function that makes the contender, in the order of the table."""

PEERS = {"FSDP2": "FSDP2, CPUOffloadPolicy", "ZeRO-3": "ZeRO-3, all offloaded"}
"""The contenders that keep all of the model on the host, as the relay does: short name -> name."""
RELAYS = ("l2l", "l2l, inputs on the device")
NAMES = tuple(CONTENDERS)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--contenders", nargs="+", choices=NAMES, default=list(NAMES), help="flush is always one")
    for name, default in (("layers", 8), ("hidden", 256), ("sequence", 128), ("microbatch-size", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--microbatches", type=int, default=8, help="m")
    parser.add_argument("--rounds", type=int, default=5)


def write_folder(folder: Path, args: argparse.Namespace) -> list[str]:
    """Write a Llama, its tokenizer and texts. Returns the flags of a run that trains it on full rows."""
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=args.hidden, intermediate_size=4 * args.hidden,
        num_hidden_layers=args.layers, num_attention_heads=4, num_key_value_heads=4,
        max_position_embeddings=args.sequence, pad_token_id=0, eos_token_id=3,
    )  # fmt: skip
    torch.manual_seed(1)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    least_words = 3  # of a text; so there is a row for each microbatch at least
    num_samples = 2 * args.microbatches * args.microbatch_size * args.sequence // least_words
    texts = tiny.data_file(folder, "causal-lm", num_samples=num_samples)
    flags = {
        "model_name_or_path": folder, "task": "causal-lm", "train_file": texts, "output_dir": folder / "out",
        "max_seq_length": args.sequence, "per_device_train_batch_size": args.microbatch_size,
        "gradient_accumulation_steps": args.microbatches, "max_steps": args.rounds + 2, "optim": "adamw_torch_fused",
        "learning_rate": 1e-3, "weight_decay": 0.01, "lr_scheduler_type": "constant", "max_grad_norm": 0,
    }  # fmt: skip
    pairs = [str(word) for name, value in flags.items() for word in (f"--{name}", value)]
    return [*pairs, "--do_train", "--dataloader_drop_last"]


def measure(args: argparse.Namespace) -> list[Row]:
    names = [name for name in NAMES if name in {"flush", *args.contenders}]
    with tempfile.TemporaryDirectory() as folder:
        extent = {"argv": write_folder(Path(folder), args)}
        workers = {name: Worker(name, extent, 1, args.microbatches, __spec__.name) for name in names}
        return with_peers(take_turns(workers, 1, rounds=args.rounds))


def with_peers(rows: list[Row]) -> list[Row]:
    """Add `over` to the rows that ran: name of a peer that ran -> for each round, the speed over the peer's."""
    seconds = {row["contender"]: row["seconds"] for row in rows if row["failed"] is None}
    for row in rows:
        if row["failed"] is None:
            row["over"] = {
                peer: [theirs / own for theirs, own in zip(seconds[peer], row["seconds"], strict=True)]
                for peer in PEERS.values()
                if peer in seconds
            }
    return rows


def device_bytes(row: Row) -> int:
    return row["state"] + row["made"]


def complaints(rows: list[Row]) -> list[str]:
    """The violated requirements, a sentence each: equal losses, and a relay is nowhere behind its peers."""
    ran = {row["contender"]: row for row in rows if row["failed"] is None}
    found = []
    for name, row in ran.items():
        tolerance = 0 if name in RELAYS else 1e-5
        pairs = zip(row["losses"], ran["flush"]["losses"], strict=True)
        if not all(abs(own - flush) <= tolerance * abs(flush) for own, flush in pairs):
            found.append(f"{name}: its losses are not those of flush, within {tolerance}")
    for name, relay in ran.items():
        if name in RELAYS:
            found.extend(f"{name}: {each}" for peer in relay["over"] for each in _behind(relay, ran[peer]))
    return found


def _behind(relay: Row, peer: Row) -> Iterator[str]:
    """In what a relay is behind a peer. Bytes count where all of the peer's are counted."""
    name = peer["contender"]
    if (ratio := statistics.median(relay["over"][name])) < 1:
        yield f"{ratio:.3f} of the speed of {name}"
    if peer["moved"] is None:
        return
    if device_bytes(relay) > device_bytes(peer):
        yield f"{device_bytes(relay)} bytes on the device, and {name} has {device_bytes(peer)}"
    if relay["moved"] > peer["moved"]:
        yield f"{relay['moved']} bytes moved, and {name} moves {peer['moved']}"


def _over(peer: str) -> Callable[[Row], str]:
    return lambda row: spread(row["over"][peer], 3) if peer in row.get("over", {}) else ""


_SHARED = ("", "seconds a batch", "over flush", "device MiB", "of it state", "MiB moved", "last loss")
COLUMNS = {name: compute.COLUMNS[name] for name in _SHARED}
COLUMNS |= {f"over {short}": _over(peer) for short, peer in PEERS.items()}


def show(rows: list[Row]) -> None:
    show_table("real computation of a captured Llama: flush, the relay, and others that offload", COLUMNS, rows)


if __name__ == "__main__":
    work(CONTENDERS, CapturedModel)
