"""Evaluation: forward only, with the newest weights, on data of its own. The pipeline must be drained."""

from collections.abc import Callable

from megatron.pipeline.runtime.engine import PipelineEngine
from megatron.pipeline.runtime.stages.megatron.auxiliary import ROUTER_LOSSES, loss_names
from megatron.trainer.arguments.flags.config import TrainConfig
from megatron.trainer.arguments.rules.data import split_shares

_SPLITS = ("training", "validation", "test")


def evaluate(engine: PipelineEngine, args: TrainConfig, agree_to_stop: Callable[[], bool]) -> dict[str, float] | None:
    """Mean of each loss, by name, over `--eval-iters` batches of the full global batch size; the same on every rank.

    Args:
        engine: drained; its stage has the evaluation's iterator.
        agree_to_stop: collective question after every batch, whether any rank wants to stop.

    Returns None if the evaluation was broken off.
    """
    sums: dict[str, tuple[float, float]] = {}
    num_microbatches = _num_microbatches(args)
    of_backwards = (*ROUTER_LOSSES.values(), *loss_names(args.mtp_num_layers))  # which nothing has without a backward
    for _ in range(args.eval_iters):
        for name, (batch_sum, batch_count) in engine.evaluate(num_microbatches).items():
            if name in of_backwards:
                continue
            numerator, denominator = sums.get(name, (0.0, 0.0))
            sums[name] = (numerator + batch_sum, denominator + batch_count)
        if agree_to_stop():
            return None
    return {name: numerator / max(denominator, 1.0) for name, (numerator, denominator) in sums.items()}


def without_data(args: TrainConfig) -> list[str]:
    """Notes on evaluations that the run would make, and has no data for (`has_split`).

    Raises ValueError where the flags ask for evaluations by name, and nobody has said that there are no data for them.
    """
    if not args.eval_iters:
        return []
    if args.skip_train and not any(args.has_split[1:]):
        raise ValueError(f"--skip-train evaluates, and there are no validation or test data; {_remedy(args)}")
    notes, asks = [], [name for name in ("eval_interval", "eval_iters") if name in args.given]
    for index in (1, 2):
        is_meant = args.split is not None and split_shares(args.split)[index] > 0
        if args.has_split[index] or not (is_meant or (index == 1 and asks)):
            continue
        what = f"there are no {_SPLITS[index]} data"
        if index == 1 and is_meant and asks:
            flags = " ".join(f"--{name.replace('_', '-')} {getattr(args, name)}" for name in asks)
            raise ValueError(f"{flags}: {what}, so nothing is evaluated; {_remedy(args)}, or give --eval-iters 0")
        few = f": --split {args.split} leaves them no document" if is_meant else ""
        notes.append(f"{what}{few}, so {'the run evaluates nothing' if index == 1 else 'nothing is tested at the end'}")
    return notes


def _remedy(args: TrainConfig) -> str:
    return "give --valid-data-path" if args.split is None else f"give more text, or another --split than {args.split}"


def evaluation_samples(args: TrainConfig) -> int:
    """The samples that one evaluation takes, over all replicas."""
    return args.eval_iters * _num_microbatches(args) * args.batch_sizes.samples_per_microbatch


def _num_microbatches(args: TrainConfig) -> int:
    return args.global_batch_size // args.batch_sizes.samples_per_microbatch
