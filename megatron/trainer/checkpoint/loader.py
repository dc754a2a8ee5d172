"""Reading a checkpoint at any parallel degrees: checks of its files and its model, then the tensors.

Errors are found before any tensor is changed, and all ranks report the same error: a damaged common file, a model with
other arguments (see `arguments`), damaged or missing files (each rank checks a share of them), and tensors that the job
needs and that the checkpoint lacks or has in another shape.
"""

import io
import pickle
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import CheckpointException, FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict  # `load` has no `no_dist` in torch 2.6

from megatron.core import parallel_state
from megatron.core.dist_checkpointing import load
from megatron.core.dist_checkpointing.dict_utils import extract_matching_values, nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.serialization import get_default_load_sharded_strategy
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelLoadStrategyWrapper
from megatron.pipeline.runtime.failure.agreement import agree, agreed, control_group, gathered
from megatron.pipeline.runtime.failure.errors import CheckpointError
from megatron.pipeline.runtime.stages.megatron.checkpointed_versions import (
    OLDER_VERSIONS,
    PREDICTED_VERSION,
    UPCOMING_VERSION,
)
from megatron.pipeline.start_up.core_version import installed_core
from megatron.trainer.checkpoint import unpickling
from megatron.trainer.checkpoint.directory import (
    COMMON_FILE,
    MANIFEST,
    CheckpointLocation,
    find_damage,
    find_short_files,
    iterations_hint,
    read_manifest,
)
from megatron.trainer.checkpoint.state import with_copies
from megatron.trainer.checkpoint.tensor_table import SAME_KEYS

unpickling.install()

INDEX_FILE = ".metadata"
CHECKSUMS_ENTRY = "has_checksums"
_BESIDE_WEIGHTS = (
    "optimizer.", "chained_", "rng_state", "rerun_state", OLDER_VERSIONS, PREDICTED_VERSION, UPCOMING_VERSION,
)  # fmt: skip


@contextmanager
def reading(path: Path, say: Callable[[str], str] = str) -> Iterator[None]:
    """Raise CheckpointError if the block, which reads `path` with torch, finds the file missing or unreadable.

    `say`: makes the error's text from its first sentence.
    """
    try:
        yield
    except FileNotFoundError as error:
        raise CheckpointError(say(f"checkpoint file {path} is missing")) from error
    except (RuntimeError, EOFError, pickle.UnpicklingError, OSError, ValueError, KeyError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(say(f"checkpoint file {path} cannot be read: {reason}")) from error


def read_common_state(location: CheckpointLocation) -> dict:
    """Read the part of a checkpoint that is the same for all ranks: arguments, iteration, scheduler, ...

    Not collective. Raises CheckpointError if the file is missing or damaged.
    """
    path = location.path / COMMON_FILE
    files = _manifest(location)
    if files is not None:
        _raise_damage(location, find_damage(location.path, files, [COMMON_FILE]))
    with reading(path, partial(_with_hint, location)):
        common = _common_beside_tensors(location) or torch.load(path, map_location="cpu", weights_only=True)
    if files is None and common.get(CHECKSUMS_ENTRY):
        missing = location.path / MANIFEST
        raise CheckpointError(_with_hint(location, f"checkpoint file {missing} is missing"))
    return common


def _common_beside_tensors(location: CheckpointLocation) -> dict | None:
    """The common state of a Megatron-LM checkpoint that has no file for it, as from core 0.19 on; None for others."""
    if (location.path / COMMON_FILE).exists() or not (location.path / INDEX_FILE).exists():
        return None
    entry = "common_state/shard_0_1"
    if entry not in FileSystemReader(str(location.path)).read_metadata().state_dict_metadata:
        return None
    if installed_core().has_common_file:
        raise CheckpointError(
            f"checkpoint {location.path} was saved with megatron.core 0.19 or later, and the installed one does not "
            "read it; use 0.19 or later"
        )
    found: dict = {entry: io.BytesIO()}
    try:
        _load_state_dict(found, storage_reader=FileSystemReader(str(location.path)), no_dist=True)
    except CheckpointException as error:  # CheckpointException is no Exception, so no other handler would catch it
        raise CheckpointError(_with_hint(location, f"checkpoint {location.path} cannot be read: {error}")) from error
    loaded = found[entry]
    if isinstance(loaded, io.BytesIO):
        loaded.seek(0)
        loaded = torch.load(loaded, map_location="cpu", weights_only=True)
    return loaded[0]


class CheckpointReader:
    """A checkpoint opened for loading.

    Collective: every rank must call the constructor, `left_over` and `load`.

    Args:
        common: the result of `read_common_state` for this checkpoint.
        fully_parallel: data-parallel replicas share the reading of tensors that they all need.

    Raises CheckpointError on every rank if a file is damaged, truncated or missing.
    """

    def __init__(self, location: CheckpointLocation, *, common: dict | None = None, fully_parallel: bool = False):
        self.location, self.common = location, common or {}
        self._fully_parallel = fully_parallel
        with agreed():
            self._verify()
        with agreed():
            self.index = self._read_index()
            if _manifest(location) is None:
                _raise_damage(location, find_short_files(location.path, self._least_sizes()))

    def holds(self, sharded: ShardedObject | ShardedTensor) -> bool:
        """Whether the checkpoint has the key of a tensor, or the shard of an object."""
        return _index_key(sharded) in self.index.state_dict_metadata

    def holds_key(self, key: str) -> bool:
        """Whether the checkpoint has an entry with the key `key`."""
        return key in self.index.state_dict_metadata

    def holds_prefix(self, prefix: str) -> bool:
        """Whether any key of the checkpoint starts with `prefix`."""
        return any(key.startswith(prefix) for key in self.index.state_dict_metadata)

    def left_over(self, state: dict) -> list[str]:
        """The keys of the checkpoint's weights that no rank requests with `state`.

        Transformer Engine's extra states, optimizer states and random states are not counted.
        """
        mine = {value.key for value in nested_values(load_preprocess(state)[0]) if isinstance(value, ShardedTensor)}
        weights = {key for key, entry in self.index.state_dict_metadata.items() if hasattr(entry, "size")}
        rest = weights.difference(*gathered(mine, control_group()))
        return sorted(key for key in rest if "_extra_state" not in key and not key.startswith(_BESIDE_WEIGHTS))

    def respell(self, state: dict) -> None:
        """Give the tensors of `state` the checkpoint's keys if it spells them differently (`SAME_KEYS`).

        So local layers with experts load the weights that Transformer Engine's layers have saved, and vice versa.
        """
        for value in nested_values(state):
            if not isinstance(value, ShardedTensor) or self.holds(value):
                continue
            for one, other in SAME_KEYS.items():
                for key in (value.key.replace(one, other), value.key.replace(other, one)):
                    if self.holds_key(key):
                        value.key = key

    def load(self, state: dict) -> dict:
        """Read the entries that `state` requests, into its tensors if it has them, and the common state.

        Transformer Engine's extra states are left out if the checkpoint has none. Raises CheckpointError on every rank
        if the checkpoint lacks a tensor or has it in another shape.
        """
        state, _ = extract_matching_values(state, lambda value: not is_extra_state(value) or self.holds(value))
        agree(self._find_misfit(state))
        strategy = None
        if self._fully_parallel:
            group = parallel_state.get_data_parallel_group(with_context_parallel=True)
            strategy = FullyParallelLoadStrategyWrapper(
                get_default_load_sharded_strategy(str(self.location.path)), group
            )
        with warnings.catch_warnings():
            # megatron.core uses functions of torch that are deprecated in newer versions.
            warnings.filterwarnings("ignore", category=FutureWarning)
            return with_copies(load(state, str(self.location.path), strategy))

    def _verify(self) -> None:
        files = _manifest(self.location)
        if files is None:
            return
        names = sorted(files, key=lambda name: -files[name]["size"])
        share = names[dist.get_rank() :: dist.get_world_size()]
        _raise_damage(self.location, find_damage(self.location.path, files, share))

    def _read_index(self) -> Metadata:
        path = self.location.path / INDEX_FILE
        try:
            return FileSystemReader(str(self.location.path)).read_metadata()
        except FileNotFoundError as error:
            raise CheckpointError(_with_hint(self.location, f"checkpoint file {path} is missing")) from error
        except Exception as error:  # unpickling damaged bytes can raise anything
            raise CheckpointError(_with_hint(self.location, f"checkpoint file {path} is damaged: {error}")) from error

    def _least_sizes(self) -> dict[str, int]:
        sizes: dict[str, int] = {}
        for item in self.index.storage_data.values():
            sizes[item.relative_path] = max(sizes.get(item.relative_path, 0), item.offset + item.length)
        return sizes

    def _find_misfit(self, state: dict) -> str | None:
        sharded_state, _, _ = load_preprocess(state)
        wanted = [value for value in nested_values(sharded_state) if isinstance(value, (ShardedTensor, ShardedObject))]
        missing = sorted({value.key for value in wanted if not self.holds(value)})
        if missing:
            remedy = ""
            if all(key.startswith("optimizer.") for key in missing):
                remedy = "; it was saved without this optimizer state: pass --no-load-optim to start with a fresh one"
            return _with_hint(self.location, f"checkpoint {self.location.path} does not hold {missing[0]!r}{remedy}")
        for value in wanted:
            if isinstance(value, ShardedTensor) and not value.allow_shape_mismatch:
                there = tuple(self.index.state_dict_metadata[value.key].size)
                if there != tuple(value.global_shape):
                    return (
                        f"checkpoint {self.location.path} holds another model: {value.key!r} has shape {there} there "
                        f"and {tuple(value.global_shape)} here"
                    )
        return None


def _manifest(location: CheckpointLocation) -> dict | None:
    try:
        return read_manifest(location.path)
    except CheckpointError as error:
        raise CheckpointError(_with_hint(location, str(error))) from error


def _raise_damage(location: CheckpointLocation, problems: list[str]) -> None:
    if problems:
        raise CheckpointError(_with_hint(location, "; ".join(problems)))


def _with_hint(location: CheckpointLocation, problem: str) -> str:
    return f"{problem}. {iterations_hint(location.root, but=None if location.is_release else location.iteration)}"


def _index_key(sharded: ShardedObject | ShardedTensor) -> str:
    return sharded.unique_key if isinstance(sharded, ShardedObject) else sharded.key


def is_extra_state(value: object) -> bool:
    """Whether `value` is an extra state of Transformer Engine, which a model does not need if a checkpoint lacks it."""
    return isinstance(value, ShardedObject) and value.key.endswith("_extra_state")
