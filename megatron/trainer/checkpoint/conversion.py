"""Conversion of checkpoints block by block, so that a model need not fit into memory.

Three formats hold weights: a Hugging Face folder (`hugging_face`), a torch_dist checkpoint (`CheckpointWeights`), and a
checkpoint in Megatron-LM's old format, with a file for each rank (`RankFilesWeights`). Each is read as the tensors of
`tensor_table`, so each can be written as a torch_dist checkpoint (`write_checkpoint`) or a Hugging Face folder
(`write_hugging_face`). No process group and no model is needed.
"""

from __future__ import annotations

import itertools
import math
import pickle
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.utils import _create_file_view

from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.pipeline.runtime.failure.errors import CheckpointError
from megatron.trainer.arguments.flags.config import TrainConfig
from megatron.trainer.checkpoint import unpickling
from megatron.trainer.checkpoint.arguments import saved_arguments
from megatron.trainer.checkpoint.boxes import Box, overlap
from megatron.trainer.checkpoint.directory import (
    COMMON_FILE,
    CheckpointLocation,
    begin,
    commit,
    discard,
    find_damage,
    read_manifest,
    save_with_torch,
    write_manifest,
)
from megatron.trainer.checkpoint.hugging_face import Weights, blocks, box_of
from megatron.trainer.checkpoint.loader import CHECKSUMS_ENTRY, INDEX_FILE, reading
from megatron.trainer.checkpoint.state import FORMAT_VERSION, sharding_metadata
from megatron.trainer.checkpoint.tensor_table import (
    FURTHER_LAYERS,
    LAYERS,
    ModelTensor,
    RowRange,
    Source,
    canonical,
    sources_of,
)
from megatron.trainer.files.safetensors_files import write_folder

# --- Megatron-LM's old format, as a source ----------------------------------------------------------------------------


unpickling.install()

_RANK = "mp_rank_{tensor:02d}"
_FILE = "model_optim_rng.pt"
_EXPERT, _ALL_EXPERTS = "mlp.experts.local_experts.", "mlp.experts.experts."


class RankFilesWeights:
    """The weights of a checkpoint in Megatron-LM's old format, with a folder for each rank.

    Folders are named `mp_rank_XX` by the tensor rank, then `_YYY` by the pipeline rank and `_ZZZ` by the expert rank
    where there are several. Files are mapped into memory, not read whole.

    Raises CheckpointError for a file that is missing, cannot be read or calls a function, for weights of models that
    are not megatron.core's, and if the checkpoint lacks a tensor of the model.

    Attributes:
        args: the arguments of the run that saved the checkpoint.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        folders = sorted(entry.name for entry in path.iterdir() if entry.name.startswith("mp_rank_"))
        first = self._load(folders[0])
        self.args = first.get("args")
        if self.args is None:
            raise CheckpointError(
                f"checkpoint {path} holds no arguments; only Megatron-LM's own files can be converted"
            )
        self._size = self.args.tensor_model_parallel_size
        spread = getattr(self.args, "expert_model_parallel_size", None) or 1
        cut = getattr(self.args, "expert_tensor_parallel_size", None) or self._size
        if spread > 1 and cut != self._size:
            raise CheckpointError(
                f"checkpoint {path} has its experts on {spread} ranks, each cut over {cut} tensor ranks, and "
                f"other layers over {self._size}, which is not read in the old format; save it with --ckpt-format "
                "torch_dist"
            )
        stages = self.args.pipeline_model_parallel_size
        self._parts: dict[tuple[str, tuple[int, ...]], list[torch.Tensor]] = {}
        for rank, part in itertools.product(range(self._size), range(spread)):
            behind = f"_{part:03d}" if spread > 1 else ""
            names = [
                _RANK.format(tensor=rank) + (f"_{stage:03d}" if stages > 1 else "") + behind for stage in range(stages)
            ]
            missing = [name for name in names if name not in folders]
            if missing:
                raise CheckpointError(f"checkpoint {path} lacks {missing[0]}; copy all folders of ranks")
            first_expert = part * (self.args.num_experts // spread) if spread > 1 else 0
            self._add(rank, [self._load(name) for name in names], first_expert)

    def _load(self, name: str) -> dict:
        file = self.path / name / _FILE
        with reading(file):
            return torch.load(file, map_location="cpu", weights_only=True, mmap=True)

    def _add(self, rank: int, stages: list[dict], first_expert: int) -> None:
        chunks = sum(key.startswith("model") and key[5:].isdecimal() for key in stages[0]) or 1
        before: Counter[str] = Counter()  # layers of the stages so far, by stack
        for chunk in range(chunks):
            for stage in stages:
                model = stage.get("model" if chunks == 1 else f"model{chunk}")
                if not isinstance(model, Mapping) or any(isinstance(value, Mapping) for value in model.values()):
                    raise CheckpointError(
                        f"checkpoint {self.path} holds no model of megatron.core (--use-legacy-models); convert it "
                        "with the Megatron-LM that saved it"
                    )
                layers: Counter[str] = Counter()
                for name, value in model.items():
                    if isinstance(value, torch.Tensor):
                        stack = name.partition(".")[0]
                        key, index, layer = _place_of(name, before[stack], first_expert)
                        layers[stack] = max(layers[stack], layer + 1)
                        parts = self._parts.setdefault((key, index), [])
                        if len(parts) == rank:  # else already added: tied, or in another expert's folder
                            parts.append(value)
                before += layers

    def require(self, tensors: Iterator[ModelTensor]) -> None:
        """Raise CheckpointError if the checkpoint lacks a tensor of the model, or has it in another shape."""
        for tensor in tensors:
            parts = self._parts.get((tensor.key, tensor.index), ())
            if len(parts) != self._size:
                raise CheckpointError(f"checkpoint {self.path} does not hold {tensor.key}, which its arguments ask for")
            if sum(box.size for box, _ in self._places(tensor)) != math.prod(tensor.shape):
                raise CheckpointError(
                    f"checkpoint {self.path} holds {tensor.key} of shape {tuple(parts[0].shape)} on each of "
                    f"{self._size} tensor ranks, and its arguments say {tensor.shape}"
                )

    def _places(self, tensor: ModelTensor) -> Iterator[tuple[Box, torch.Tensor]]:
        """Yield the box and the data of each part of a tensor.

        A rank's part of a gated layer has rows of both halves.
        """
        parts = self._parts[tensor.key, tensor.index]
        local = tuple(parts[0].shape)
        if local == tensor.shape:
            yield Box.whole(tensor.shape), parts[0]
            return
        halves = 2 if len(tensor.pieces) == 2 else 1  # a gate, and the factor that it multiplies
        by_rows = local[0] != tensor.shape[0]
        for rank, part in enumerate(parts):
            if not by_rows:
                yield Box.at((0, rank * local[1]), local), part
                continue
            rows = local[0] // halves
            for half in range(halves):
                first = half * (tensor.shape[0] // halves) + rank * rows
                yield Box.at((first, 0)[: len(local)], (rows, *local[1:])), part[half * rows : (half + 1) * rows]

    def dtype(self, tensor: ModelTensor) -> torch.dtype:
        return self._parts[tensor.key, tensor.index][0].dtype

    def read(self, tensor: ModelTensor, rows: tuple[int, int], columns: tuple[int, int] | None = None) -> torch.Tensor:
        box = box_of(tensor, rows, columns)
        found = torch.empty(box.shape, dtype=self.dtype(tensor))
        for its, part in self._places(tensor):
            if common := overlap(box, its):
                found[common.within(box)] = part[common.within(its)]
        return found


def _place_of(name: str, offset: int, first_expert: int) -> tuple[str, tuple[int, ...], int]:
    """A parameter's key, its index among layers and experts, and the number of its layer in the chunk (-1: none).

    `offset`: the number of layers in the chunks before. `first_expert`: the number of the file's first expert.
    """
    key, number = canonical(name)
    if not number:
        return key, (), -1
    is_further = key.startswith(FURTHER_LAYERS)
    place = number if is_further else (number[0] + offset,)
    before, is_expert, rest = key.partition(_EXPERT)
    if is_expert:
        expert, _, rest = rest.partition(".")
        key, place = f"{before}{_ALL_EXPERTS}{rest}", (*place, first_expert + int(expert))
    return key, place, -1 if is_further else number[0]


_LARGEST_FILE = 4 * 2**30  # bytes of one file in a checkpoint

# --- a torch_dist checkpoint, as a source -----------------------------------------------------------------------------


class CheckpointWeights:
    """The newest weights of a torch_dist checkpoint.

    Raises CheckpointError if a file is missing, damaged or truncated, or if the checkpoint lacks a tensor of the model.
    """

    def __init__(self, location: CheckpointLocation, tensors: Iterator[ModelTensor]) -> None:
        self._path = location.path
        files = read_manifest(location.path)
        problems = [] if files is None else find_damage(location.path, files, sorted(files))
        if problems:
            raise CheckpointError("; ".join(problems))
        try:
            self._index = FileSystemReader(str(location.path)).read_metadata()
        except Exception as error:  # unpickling damaged bytes can raise anything
            raise CheckpointError(f"checkpoint file {location.path / INDEX_FILE} cannot be read: {error}") from error
        self._key_of = {canonical(key): key for key in self._index.state_dict_metadata}
        self._last: tuple[object, torch.Tensor] | None = None
        for tensor in tensors:
            key, axes = self._place(tensor)
            there = tuple(self._index.state_dict_metadata[key].size)
            expected = (*tensor.stack[len(tensor.stack) - len(axes) :], *tensor.shape)
            if there != expected:
                raise CheckpointError(
                    f"checkpoint {self._path} holds {key} of shape {there}, and its arguments say {expected}"
                )

    def _place(self, tensor: ModelTensor) -> tuple[str, tuple[int, ...]]:
        """The key of a tensor, and its index in this key's stack."""
        if (key := self._key_of.get((tensor.key, ()))) is not None:
            return key, tensor.index
        key = self._key_of.get((tensor.key, tensor.index[:1]))
        if key is None:
            raise CheckpointError(f"checkpoint {self._path} does not hold {tensor.key}, which its arguments ask for")
        return key, tensor.index[1:]

    def dtype(self, tensor: ModelTensor) -> torch.dtype:
        return self._index.state_dict_metadata[self._place(tensor)[0]].properties.dtype

    def read(self, tensor: ModelTensor, rows: tuple[int, int], columns: tuple[int, int] | None = None) -> torch.Tensor:
        key, axes = self._place(tensor)
        box = box_of(tensor, rows, columns)
        whole = Box.at((*axes, *box.start), (*(1 for _ in axes), *box.shape))
        found = torch.empty(whole.shape, dtype=self.dtype(tensor))
        missing = whole.size
        for chunk in self._index.state_dict_metadata[key].chunks:
            its = Box.at(chunk.offsets, chunk.sizes)
            if common := overlap(whole, its):
                found[common.within(whole)] = self._chunk(key, chunk.offsets)[common.within(its)]
                missing -= common.size
        if missing:
            raise CheckpointError(f"checkpoint {self._path} has {key} in part only")
        return found.view(box.shape)

    def _chunk(self, key: str, offset: torch.Size) -> torch.Tensor:
        """A part as it was written.

        It is kept until another part is read, since several of our tensors may come from one part.
        """
        if self._last is None or self._last[0] != (key, offset):
            self._last = None
            place = self._index.storage_data[MetadataIndex(key, offset)]
            with open(self._path / place.relative_path, "rb") as stream:
                view = _create_file_view(stream, place.offset, place.length)
                self._last = (key, offset), torch.load(view, map_location="cpu", weights_only=True)
        return self._last[1]


# --- the results ------------------------------------------------------------------------------------------------------


def write_checkpoint(root: Path, weights: Weights, tensors: list[ModelTensor], *, args: TrainConfig) -> Path:
    """Write a torch_dist checkpoint without a training position ("release"); it appears completely or not at all.

    Args:
        root: the directory, which must have no checkpoint.
        args: completed; stored with the weights.

    Returns the checkpoint's directory.
    """
    staging = begin(root, 0)
    try:
        apart = args.num_experts is not None and args.moe_layer_freq != 1  # by megatron.core's rule
        index = _write_tensors(staging, weights, tensors, apart=apart)
        common = {
            "args": saved_arguments(args, iteration=0, consumed_train_samples=0, consumed_valid_samples=0),
            "checkpoint_version": FORMAT_VERSION,
            "iteration": 0,
            "num_floating_point_operations_so_far": 0.0,
            CHECKSUMS_ENTRY: True,
            "content_metadata": sharding_metadata(args),
        }
        with open(staging / COMMON_FILE, "wb") as stream:
            save_with_torch(common, stream)
        with open(staging / INDEX_FILE, "wb") as stream:
            pickle.dump(index, stream)
        save_config(CheckpointingConfig("torch_dist", 1), str(staging))
        write_manifest(staging)
        return commit(root, staging)
    except BaseException:
        discard(staging)
        raise


def _as_written(tensor: ModelTensor, apart: bool) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
    """The key of a tensor in a checkpoint, its index in this key's stack, and the size of the stack.

    `apart`: layers differ, so each has its own keys, as layers of multi-token prediction always have.
    """
    for stack in (LAYERS, FURTHER_LAYERS):
        if tensor.key.startswith(stack) and (apart or stack == FURTHER_LAYERS):
            key = f"{stack}{tensor.index[0]}.{tensor.key.removeprefix(stack)}"
            return key, tensor.index[1:], tensor.stack[1:]
    return tensor.key, tensor.index, tensor.stack


def _write_tensors(folder: Path, weights: Weights, tensors: list[ModelTensor], *, apart: bool) -> Metadata:
    """Write all tensors into files of `folder`. Returns the index."""
    entries: dict[str, TensorStorageMetadata] = {}
    places: dict[MetadataIndex, _StorageInfo] = {}
    number, place = 0, 0
    stream = open(folder / "__0_0.distcp", "wb")  # noqa: SIM115 (another file follows when it is full)
    try:
        for tensor in tensors:
            dtype = weights.dtype(tensor)
            key, index, stack = _as_written(tensor, apart)
            ones = (1,) * len(index)
            if key not in entries:
                size = torch.Size((*stack, *tensor.shape))
                entries[key] = TensorStorageMetadata(TensorProperties(dtype=dtype), size, [])
            if entries[key].properties.dtype != dtype:
                raise ValueError(f"{key} has several dtypes in different layers; save the model in one")
            for rows, columns in blocks(
                tensor, dtype.itemsize, by_columns=tensor.transposed and len(tensor.shape) == 2
            ):
                if place >= _LARGEST_FILE:
                    stream.close()
                    number, place = number + 1, 0
                    stream = open(folder / f"__0_{number}.distcp", "wb")  # noqa: SIM115
                data = weights.read(tensor, rows, columns)
                save_with_torch(data.view(*ones, *data.shape), stream)
                box = box_of(tensor, rows, columns)
                offset = torch.Size((*index, *box.start))
                chunks = entries[key].chunks
                places[MetadataIndex(key, offset, len(chunks))] = _StorageInfo(
                    f"__0_{number}.distcp", place, stream.tell() - place
                )
                chunks.append(ChunkStorageMetadata(offset, torch.Size((*ones, *data.shape))))
                place = stream.tell()
    finally:
        stream.close()
    return Metadata(state_dict_metadata=entries, storage_data=places)


def write_hugging_face(folder: Path, weights: Weights, tensors: list[ModelTensor], *, largest_file: int) -> None:
    """Write a model's tensors into a folder of safetensors files, with transformers' names.

    `largest_file`: bytes of a file; a larger tensor has its own file.
    """
    sources = sources_of(iter(tensors))
    wanted = {name: (weights.dtype(source.places[0][0]), source.shape) for name, source in sources.items()}
    parts = ((name, part) for name, source in sources.items() for part in _parts_of(weights, source))
    write_folder(folder, wanted, parts, largest_file=largest_file)


def _parts_of(weights: Weights, source: Source) -> Iterator[torch.Tensor]:
    """Yield the parts of one of the files' tensors, row by row."""
    for tensor, pieces in source.places:
        itemsize = weights.dtype(tensor).itemsize
        if tensor.transposed:
            for rows, columns in blocks(tensor, itemsize, by_columns=True):  # our columns are the files' rows
                yield _as_there(weights.read(tensor, rows, columns), pieces).T
            continue
        if any(piece.step > 1 for piece in pieces):
            columns = (0, tensor.shape[1]) if len(tensor.shape) == 2 else None
            yield _as_there(weights.read(tensor, (0, tensor.shape[0]), columns), pieces)
            continue
        for piece in pieces:
            for (first, last), columns in blocks(tensor, itemsize):
                rows = (max(first, piece.first), min(last, piece.first + piece.count))
                if rows[0] < rows[1]:
                    yield weights.read(tensor, rows, columns)


def _as_there(whole: torch.Tensor, pieces: tuple[RowRange, ...]) -> torch.Tensor:
    """All rows of our tensor in the order of the files."""
    there = whole.new_empty((sum(piece.count for piece in pieces), *whole.shape[1:]))
    for piece in pieces:
        own = slice(piece.source, piece.source + (piece.count - 1) * piece.step + 1, piece.step)
        there[own] = whole[piece.first : piece.first + piece.count]
    return there
