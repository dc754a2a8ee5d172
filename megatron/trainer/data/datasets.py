"""The datasets of a run: megatron.core's datasets for training, validation and test, as the flags describe them.

`build_datasets` builds the datasets of a GPT. Other models use `build_blended`, the common part.
"""

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron.core import parallel_state
from megatron.core.datasets import gpt_dataset
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.blended_megatron_dataset_config import BlendedMegatronDatasetConfig
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig, MockGPTDataset
from megatron.core.datasets.indexed_dataset import IndexedDataset, get_bin_path
from megatron.core.tokenizers.base_tokenizer import MegatronTokenizerBase
from megatron.documents import counted
from megatron.documents.files import problem_with_directory
from megatron.pipeline.runtime.failure.agreement import on_rank_zero
from megatron.pipeline.start_up import dataset_helpers
from megatron.trainer.arguments.flags.config import TrainConfig
from megatron.trainer.data.microbatches import Field, gpt_fields
from megatron.trainer.files.indexed_files import BinReader, blends, check_indexed_dataset, damaged_index_cache

SPLITS = ("training", "validation", "test")


class TokenFiles(IndexedDataset):
    """megatron.core's indexed dataset, with a reader that names a .bin file that is truncated during the run."""

    def initialize(self, path_prefix: str, multimodal: bool, mmap: bool, *options: object) -> None:
        super().initialize(path_prefix, multimodal, False, *options)
        self.bin_reader = BinReader(get_bin_path(path_prefix))


class GPTDataset(gpt_dataset.GPTDataset):
    """megatron.core's GPT dataset over `TokenFiles`. The class keeps its name, since index files depend on the name."""

    @staticmethod
    def build_low_level_dataset(dataset_path: str, config: GPTDatasetConfig) -> IndexedDataset:
        return TokenFiles(dataset_path)


def num_samples(args: TrainConfig) -> list[int]:
    """The number of samples for training, validation and test in the whole run, as Megatron-LM counts them."""
    train = args.train_samples or args.batch_sizes.samples_after(args.train_iters)
    per_evaluation = args.eval_iters * args.global_batch_size
    return [train, (args.train_iters // args.eval_interval + 1) * per_evaluation, per_evaluation]


@dataclass(frozen=True)
class Datasets:
    """The data of a run on one rank.

    Attributes:
        parts: the datasets for training, validation and test; None for a split without data, or if this rank needs
            none.
        has_split: for training, validation and test, whether there are data; the same on every rank.
        digest: the digest of the training data, if they have one.
        notes: sentences about the data for the log; the same on every rank.
    """

    parts: list
    has_split: tuple[bool, ...]
    digest: str | None = None
    notes: tuple[str, ...] = ()


def needs_some(args: TrainConfig, fields: Sequence[Field]) -> bool:
    """Whether a stage of this rank needs one of the fields, or may need it after a change of the pipeline."""
    stages = args.schedule.stages_of(parallel_state.get_pipeline_model_parallel_rank())
    return args.elastic_pipeline or any(
        field.is_needed(stage, args.schedule.num_stages) for stage in stages for field in fields
    )


def build_datasets(args: TrainConfig, tokenizer: MegatronTokenizerBase) -> Datasets:
    """The three datasets of a GPT, as `build_blended` returns them."""
    if args.mock_data:
        logging.getLogger(gpt_dataset.__name__).setLevel(logging.ERROR)  # no warning that mock indices are not cached
    return build_blended(
        args,
        MockGPTDataset if args.mock_data else GPTDataset,
        GPTDatasetConfig,
        reads=needs_some(args, gpt_fields(args)),
        num_elements=lambda contents: contents.num_sequences,
        tokenizer=tokenizer,
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=args.reset_attention_mask,  # the attention itself makes a plain causal mask
    )


def build_blended(
    args: TrainConfig,
    dataset_class: type,
    config_class: type[BlendedMegatronDatasetConfig],
    *,
    reads: bool,
    num_elements: Callable[[Any], int],
    contents_of: Callable[[str], Any] = check_indexed_dataset,
    check: Callable[[BlendedMegatronDatasetConfig, tuple[bool, ...]], None] | None = None,
    **options: object,
) -> Datasets:
    """The datasets for training, validation and test.

    Collective: every rank must call it.

    Args:
        dataset_class, config_class: megatron.core's classes; `options` are further fields of the configuration.
        reads: whether a stage of this rank needs samples.
        contents_of: checks a file and returns its description; raises ValueError.
        num_elements: the number of elements in a file that `--split` divides, from the file's description.
        check: called with the configuration and the existing splits; raises ValueError for data that make no samples.

    Raises ValueError for files that are missing, empty or truncated, for a training split without documents, and for a
    cache of sample indices that cannot be written.
    """
    dataset_helpers.provide()
    blend, per_split = blends(args)
    prefixes = [prefix for each in (blend, *(per_split or ())) if each for prefix in each[0]]
    sizes = [num_elements(contents_of(prefix)) for prefix in prefixes]
    config = config_class(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=per_split,
        split=None if per_split else args.split,
        num_dataset_builder_threads=args.num_dataset_builder_threads,
        path_to_cache=args.data_cache_path,
        **options,
    )
    wanted = num_samples(args)
    if blend is not None:
        _drop_empty_splits(config, sizes)
    has_split = _existing_splits(config, wanted)
    if not has_split[0] and not args.skip_train:
        raise ValueError("the training split has no documents; change --split or give more text")
    if not config.mock and (problem := on_rank_zero(lambda: _problem_with_cache(args.data_cache_path))) is not None:
        raise ValueError(problem)
    if check is not None:
        check(config, has_split)
    reads = reads and parallel_state.get_tensor_model_parallel_rank() == 0
    builds = reads or torch.distributed.get_rank() == 0  # rank 0 writes the sample indices that the other ranks read
    builder = BlendedMegatronDatasetBuilder(dataset_class, wanted, lambda: builds, config)
    try:
        datasets = builder.build()
    except (AssertionError, IndexError, ZeroDivisionError) as error:
        raise ValueError(
            f"no samples of {args.seq_length} tokens can be made from {' '.join(prefixes) or 'mock data'}: "
            f"{str(error) or type(error).__name__}; give more text or shorten --seq-length"
        ) from error
    except Exception as error:  # megatron.core raises plain Exception if it cannot write
        folders = [args.data_cache_path] if args.data_cache_path else [f"{prefix}/cache" for prefix in prefixes]
        if (problem := damaged_index_cache(folders)) is not None:
            raise ValueError(problem) from error
        if not isinstance(error.__cause__, OSError):
            raise
        raise ValueError(
            f"the sample indices cannot be written: {error.__cause__}; name a directory where files can be created "
            f"with --data-cache-path"
        ) from error
    if not reads:
        return Datasets([None] * len(datasets), has_split)
    _check_lengths(args, datasets, wanted)
    return Datasets(datasets, has_split)


def _problem_with_cache(path: str | None) -> str | None:
    """The reason why sample indices cannot be written to `path`; None if they can.

    A folder with files is accepted, since it may have all the indices.
    """
    if path is None or (os.path.isdir(path) and os.listdir(path)):
        return None
    return problem_with_directory("--data-cache-path", path)


def _drop_empty_splits(config: BlendedMegatronDatasetConfig, num_elements: list[int]) -> None:
    """Leave out a split without documents, in which megatron.core would search for samples forever.

    Raises ValueError if only some files have no documents for a split.
    """
    for index, bounds in enumerate(config.split_matrix):
        if bounds is None:
            continue
        sizes = [round(bounds[1] * number) - round(bounds[0] * number) for number in num_elements]
        if max(sizes) == 0:
            config.split_matrix[index] = None
        elif min(sizes) == 0:
            prefix = config.blend[0][sizes.index(0)]
            raise ValueError(
                f"{prefix} has too few documents for a {SPLITS[index]} split; change --split, give more text, "
                f"or name data per split"
            )


def _existing_splits(config: BlendedMegatronDatasetConfig, wanted: list[int]) -> tuple[bool, bool, bool]:
    """For each of the three splits, whether it has data that the run uses; the same on every rank."""
    there = config.split_matrix if config.split_matrix is not None else config.blend_per_split
    return tuple(part is not None and number > 0 for part, number in zip(there, wanted, strict=True))


def _check_lengths(args: TrainConfig, datasets: list, wanted: list[int]) -> None:
    for name, dataset, number in zip(SPLITS, datasets, wanted, strict=True):
        if number == 0 or (name == "training" and args.skip_train):
            continue
        if dataset is not None and len(dataset) < number:
            raise ValueError(
                f"the {name} data holds {counted(len(dataset), 'sample')} but the run takes {number}; give the parts "
                f"of the blend weights, so that they are repeated, or shorten the run"
            )
