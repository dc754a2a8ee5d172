"""The weights of a Hugging Face model, read as the tensors of a checkpoint, and their loading into a run.

Only requested parts are read: for a conversion a block of rows, for a rank its own part of each tensor.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import torch

from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace, extract_matching_values, merge
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factory_merges
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess
from megatron.pipeline.runtime.failure.agreement import agreed
from megatron.trainer.arguments.flags.config import TrainConfig
from megatron.trainer.arguments.hugging_face import difference, facts_of, model_of, read_config
from megatron.trainer.checkpoint.boxes import Box
from megatron.trainer.checkpoint.checkpoint import Restoration, RunParts
from megatron.trainer.checkpoint.loader import is_extra_state
from megatron.trainer.checkpoint.state import loading_metadata, with_copies
from megatron.trainer.checkpoint.tensor_rows import REPEATED, tensors_of
from megatron.trainer.checkpoint.tensor_table import ModelTensor, RowRange, canonical, sources_of
from megatron.trainer.files.safetensors_files import BUFFERS, WeightsFolder

BLOCK = 32 * 2**20
"""The number of bytes read at once."""


class Weights(Protocol):
    """A model's tensors as a checkpoint has them, from any source."""

    def dtype(self, tensor: ModelTensor) -> torch.dtype: ...

    def read(self, tensor: ModelTensor, rows: tuple[int, int], columns: tuple[int, int] | None = None) -> torch.Tensor:
        """Read a part of a tensor to the CPU: rows `[first, last)` and, for a matrix, columns `[first, last)`."""


def blocks(
    tensor: ModelTensor, itemsize: int, *, by_columns: bool = False
) -> Iterator[tuple[tuple[int, int], tuple[int, int] | None]]:
    """Yield (rows, columns) of consecutive parts that make up a tensor, each of at most `BLOCK` bytes or one row."""
    rows = tensor.shape[0]
    columns = tensor.shape[1] if len(tensor.shape) == 2 else None
    along, across = (columns, rows) if by_columns else (rows, columns or 1)
    step = max(1, BLOCK // (across * itemsize))
    for first in range(0, along, step):
        part = (first, min(first + step, along))
        if by_columns:
            yield (0, rows), part
        else:
            yield part, None if columns is None else (0, columns)


def box_of(tensor: ModelTensor, rows: tuple[int, int], columns: tuple[int, int] | None) -> Box:
    """The box of a part of a tensor, from its rows and columns."""
    spans = (rows,) if len(tensor.shape) == 1 else (rows, columns or (0, tensor.shape[1]))
    return Box(*zip(*spans, strict=True))


class HuggingFaceWeights:
    """The weights of a folder of safetensors files, as the tensors of our model.

    Raises ValueError if the folder lacks a tensor of the model, has one that the model does not use, or has one of
    another shape; and if a tensor that repeats another differs from it, such as an output layer from the embedding to
    which the configuration ties it.

    Args:
        left_out: prefixes of names of tensors that the model does not use.
    """

    def __init__(
        self, folder: Path | str, model_type: str, args: TrainConfig, *, left_out: tuple[str, ...] = ()
    ) -> None:
        self.files = WeightsFolder(folder)
        self.tensors = {(each.key, each.index): each for each in tensors_of(model_type, args)}
        self._name_of: dict[str, str] = {}
        self._last: tuple[object, torch.Tensor] | None = None
        there = self.files.tensors
        sources = sources_of(iter(self.tensors.values()))
        for name, source in sources.items():
            # A model that was saved without its head has names without the inner model's prefix.
            own = name if name in there else name.partition(".")[2]
            if own not in there:
                if source.copy_of is not None:
                    continue
                raise ValueError(
                    f"{folder} has no tensor {name}, which its config.json asks for; give the folder of one model"
                )
            if there[own].shape != source.shape:
                raise ValueError(
                    f"{own} in {there[own].path} has shape {there[own].shape}, and config.json asks for "
                    f"{source.shape}; give the folder of one model"
                )
            self._name_of[name] = own
        repeated = {name: key for name, key in REPEATED.items() if name in there and name not in self._name_of}
        unused = there.keys() - set(self._name_of.values()) - repeated.keys()
        unused = sorted(name for name in unused if not name.endswith(BUFFERS) and not name.startswith(left_out))
        if unused:
            raise ValueError(
                f"{folder} has {unused[0]}{f' and {len(unused) - 1} more' if len(unused) > 1 else ''}, of which a "
                f"{model_type} by its config.json has no use; give the folder of one model"
            )
        for name, key in repeated.items():
            self._require_same(name, self.tensors[key, ()], "set tie_word_embeddings to false there")
        for name, source in sources.items():
            if source.copy_of is not None and name in self._name_of:
                self._require_same(name, source.places[0][0], "the layers of multi-token prediction share it here")

    def _require_same(self, name: str, tensor: ModelTensor, remedy: str) -> None:
        own = self._name_of[tensor.pieces[0].name]
        same = self.files.tensors[name].shape == self.files.tensors[own].shape
        for (first, last), _ in blocks(tensor, self.dtype(tensor).itemsize) if same else ():
            last = min(last, tensor.pieces[0].count)
            same = same and (
                first >= last or torch.equal(self.files.rows(name, first, last), self.files.rows(own, first, last))
            )
        if not same:
            raise ValueError(
                f"{self.files.folder} has another {name} than {own}, and by its config.json they are one; {remedy}"
            )

    def find(self, key: str, index: tuple[int, ...]) -> ModelTensor | None:
        """The tensor with a checkpoint's key at an index in its stack of layers and experts; None if there is none."""
        own, number = canonical(key)
        return self.tensors.get((own, (*number, *index)))

    def dtype(self, tensor: ModelTensor) -> torch.dtype:
        found = {self.files.tensors[self._name_of[piece.name]].dtype for piece in tensor.pieces}
        if len(found) > 1:
            names = ", ".join(dict.fromkeys(piece.name for piece in tensor.pieces))
            raise ValueError(
                f"{self.files.folder} has {names} in several dtypes, and they are one tensor here; save them in one"
            )
        return found.pop()

    def read(self, tensor: ModelTensor, rows: tuple[int, int], columns: tuple[int, int] | None = None) -> torch.Tensor:
        (first, last), width = rows, () if columns is None else (columns[1] - columns[0],)
        found = torch.zeros((last - first, *width), dtype=self.dtype(tensor))
        for piece in tensor.pieces:
            start, stop = max(first, piece.first), min(last, piece.first + piece.count)
            if start >= stop:
                continue
            begin = piece.source + (start - piece.first) * piece.step
            end = begin + (stop - start - 1) * piece.step + 1
            if tensor.transposed:
                data = self._rows(tensor, piece, *columns)[:, begin : end : piece.step].T
            else:
                data = self._rows(tensor, piece, begin, end)[:: piece.step]
                data = data if columns is None else data[:, columns[0] : columns[1]]
            found[start - first : stop - first] = data
        return found

    def _rows(self, tensor: ModelTensor, piece: RowRange, first: int, last: int) -> torch.Tensor:
        """Rows of a tensor in the files, or of one expert's part of it.

        The rows of a transposed tensor are needed again for each of its pieces, so they are kept until others are read.
        """
        name = self._name_of[piece.name]
        offset = tensor.index[-1] * self.files.tensors[name].shape[1] if tensor.stacked else 0
        asked = name, offset + first, offset + last
        if self._last is None or self._last[0] != asked:
            self._last = None
            data = self.files.rows(*asked, axes=2 if tensor.stacked else 1)
            if not tensor.transposed:
                return data
            self._last = asked, data
        return self._last[1]


class _Store:
    """A store of a run's state (`StateStore`) that has only weights."""

    common: dict = {}  # noqa: RUF012

    def __init__(self, weights: HuggingFaceWeights) -> None:
        self._weights = weights

    def holds(self, sharded: object) -> bool:
        return False

    def holds_key(self, key: str) -> bool:
        return any(canonical(key)[0] == own for own, _ in self._weights.tensors)

    def holds_prefix(self, prefix: str) -> bool:
        return any(own.startswith(prefix) for own, _ in self._weights.tensors)

    def load(self, state: dict) -> dict:
        """Read the weights that `state` requests into its tensors. Raises ValueError on every rank."""
        state, _ = extract_matching_values(state, lambda value: not is_extra_state(value))
        sharded, rest, factories = load_preprocess(state)
        with agreed(), torch.no_grad():
            loaded = dict_list_map_inplace(self._filled, sharded)
            self._weights.files.close()
        merge(rest, loaded)
        return with_copies(apply_factory_merges(rest, factories))

    def _filled(self, asked: object) -> object:
        assert isinstance(asked, ShardedTensor), asked
        axes = asked.prepend_axis_num
        tensor = self._weights.find(asked.key, tuple(asked.global_offset[:axes]))
        if tensor is None:
            raise ValueError(
                f"the model has {asked.key}, and {self._weights.files.folder} none; leave out the flag that adds it"
            )
        offset, there = asked.global_offset[axes:], asked.global_shape[axes:]
        assert asked.allow_shape_mismatch or tuple(there) == tensor.shape, f"{asked.key} is {there} and {tensor.shape}"
        columns = (offset[1], offset[1] + asked.local_shape[1]) if len(offset) == 2 else None
        data, first = asked.data, offset[0]
        for (start, stop), _ in blocks(tensor, 2 * self._weights.dtype(tensor).itemsize):
            start, stop = max(start, first), min(stop, first + asked.local_shape[0])
            if start < stop:
                data[start - first : stop - first].copy_(self._weights.read(tensor, (start, stop), columns))
        return data


def load_hugging_face(parts: RunParts, *, args: TrainConfig) -> None:
    """Load each rank's part of the weights of the folder `args.load_hf` into model, master weights and weight versions.

    Rows of the vocabulary that the folder lacks are zero. Collective. Raises ValueError on every rank if the weights
    cannot be read, or if they are not of the model that the folder's configuration describes.
    """
    with agreed():
        model = model_of(read_config(args.load_hf), Path(args.load_hf) / "config.json")
        if (differs := difference(facts_of(args), model.facts, model.family.free)) is not None:
            raise ValueError(f"--load-hf {args.load_hf} is another model than the run's: {differs}; leave the flag out")
        further = [model.facts["mtp_num_layers"] or 0, args.mtp_num_layers or 0]
        left_out = tuple(f"model.layers.{args.num_layers + number}." for number in range(further[1], further[0]))
        weights = HuggingFaceWeights(args.load_hf, model.model_type, args, left_out=left_out)
    store = _Store(weights)
    restoration = Restoration(
        store, parts, loading_metadata(args, None), iteration=0, random_state=None, with_optimizer=False
    )
    restoration.complete(store.load(restoration.request))
