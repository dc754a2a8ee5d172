"""The three datasets of a classifier, the same on every rank that reads."""

import argparse
import hashlib
from collections.abc import Callable, Sequence

import numpy
import torch

from megatron.core import parallel_state
from megatron.trainer.arguments.rules.classification import data_paths
from megatron.trainer.data.datasets import num_samples
from megatron.trainer.data.epochs import EpochSamples, EvaluationSamples, Samples
from megatron.trainer.data.microbatches import Field

COMMON_FIELDS = (
    Field(name="sample_id", stages="first", shape=lambda size, length: (size,)),
    Field(name="labels", stages="last", shape=lambda size, length: (size,)),
    Field(name="counts", stages="last", shape=lambda size, length: (size,), dtype=torch.float32),
)
"""Every classifier's, with b samples: `sample_id` (int64 [b]) on the first stage, `labels` (int64 [b]) and `counts`
(float32 [b]) on the last."""


def build_datasets(
    args: argparse.Namespace, fields: Sequence[Field], read: Callable[[list[str]], Samples]
) -> list[EpochSamples | EvaluationSamples | None]:
    """Training, validation and test, each None where it is not needed on this rank or not there. Collective.

    Args:
        fields: which stages need which part of a sample.
        read: samples of files and folders; raises ValueError.

    Sets `args.has_split`, a bool for each, and `args.data_digest`, of the training data, the same on every rank.
    Raises ValueError for data that cannot be read, and on every rank where ranks see other data.
    """
    paths, wanted = data_paths(args), num_samples(args)
    args.has_split = tuple(bool(each) and number > 0 for each, number in zip(paths.values(), wanted, strict=True))
    chosen = [each if there else [] for each, there in zip(paths.values(), args.has_split, strict=True)]
    found, args.data_digest = _read_alike(read, chosen if _reads(args, fields) else [[] for _ in chosen])
    train, *others = found
    return [
        train and EpochSamples(train, seed=args.seed, length=wanted[0]),
        *(
            each and EvaluationSamples(
                each, batch_size=args.global_batch_size, per_evaluation=args.eval_iters * args.global_batch_size
            )
            for each in others
        ),
    ]  # fmt: skip


def digest(*arrays: numpy.ndarray) -> str:
    """A digest of what the arrays hold, their types and shapes."""
    hashed = hashlib.blake2b(digest_size=16)
    for array in arrays:
        hashed.update(f"{array.dtype.str}{array.shape}".encode())
        hashed.update(numpy.ascontiguousarray(array).tobytes())
    return hashed.hexdigest()


def _reads(args: argparse.Namespace, fields: Sequence[Field]) -> bool:
    """Whether a stage of this rank needs any part of a sample, and this rank reads for its tensor group."""
    stages = args.schedule.stages_of(parallel_state.get_pipeline_model_parallel_rank())
    if args.elastic_pipeline or args.activation_cache is not None:  # any rank may come to hold the first or last stage
        return parallel_state.get_tensor_model_parallel_rank() == 0
    needed = any(field.is_needed(stage, args.schedule.num_stages) for stage in stages for field in fields)
    return needed and parallel_state.get_tensor_model_parallel_rank() == 0


def _read_alike(
    read: Callable[[list[str]], Samples], paths: list[list[str]]
) -> tuple[list[Samples | None], str | None]:
    """What `read` makes of each of `paths`, None of no path, and the digest of the first. Collective.

    Raises ValueError on every rank if any could not read, or finds other data than the others: stages read for
    themselves, so labels would belong to other samples.
    """
    found: list[Samples | None] = [None] * len(paths)
    problem = None
    try:
        found = [read(each) if each else None for each in paths]
    except ValueError as error:
        problem = str(error)
    own = problem, [None if each is None else each.digest for each in found]
    gathered: list[tuple[str | None, list[str | None]]] = [own] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(gathered, own)
    if (first := next((each for each, _ in gathered if each), None)) is not None:
        raise ValueError(first)
    readers = [(rank, digests) for rank, (_, digests) in enumerate(gathered) if any(digests)]
    for rank, digests in readers:
        if digests != readers[0][1]:
            raise ValueError(
                f"rank {rank} finds other data than rank {readers[0][0]} under the same names; give all hosts the same "
                "files"
            )
    return found, readers[0][1][0] if readers else None
