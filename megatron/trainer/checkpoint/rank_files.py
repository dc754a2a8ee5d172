"""Weights of a checkpoint in Megatron-LM's old format: one file for each tensor and pipeline rank."""

from __future__ import annotations

import itertools
import math
import pickle
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from megatron.pipeline.runtime.failure.errors import CheckpointError
from megatron.trainer.checkpoint import unpickling
from megatron.trainer.checkpoint.hugging_face import Box, box_of, copy_common
from megatron.trainer.checkpoint.tensor_table import FURTHER_LAYERS, Tensor, canonical

unpickling.install()

_RANK = "mp_rank_{tensor:02d}"
_FILE = "model_optim_rng.pt"
_EXPERT, _ALL_EXPERTS = "mlp.experts.local_experts.", "mlp.experts.experts."


class RankFilesWeights:
    """The weights of a checkpoint in Megatron-LM's old format: `mp_rank_XX/model_optim_rng.pt`, or
    `mp_rank_XX_YYY/...` with the pipeline rank behind the tensor rank, and the rank among those that share out experts
    behind both. Files are mapped, not read whole.

    Raises CheckpointError for a file that is missing, cannot be read or calls something, for weights of models that
    are not megatron.core's, and where the checkpoint lacks a tensor of the model.

    Attributes:
        args: the arguments of the run that saved.
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
        try:
            return torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        except FileNotFoundError as error:
            raise CheckpointError(f"checkpoint file {file} is missing") from error
        except (RuntimeError, EOFError, pickle.UnpicklingError, OSError, ValueError, KeyError) as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise CheckpointError(f"checkpoint file {file} cannot be read: {reason}") from error

    def _add(self, rank: int, stages: list[dict], first_expert: int) -> None:
        chunks = sum(key.startswith("model") and key[5:].isdecimal() for key in stages[0]) or 1
        offset = 0
        for chunk in range(chunks):
            for stage in stages:
                model = stage.get("model" if chunks == 1 else f"model{chunk}")
                if not isinstance(model, Mapping) or any(isinstance(value, Mapping) for value in model.values()):
                    raise CheckpointError(
                        f"checkpoint {self.path} holds no model of megatron.core (--use-legacy-models); convert it "
                        "with the Megatron-LM that saved it"
                    )
                layers = 0
                for name, value in model.items():
                    if isinstance(value, torch.Tensor):
                        key, index, layer = _place_of(name, offset, first_expert)
                        layers = max(layers, layer + 1)
                        parts = self._parts.setdefault((key, index), [])
                        if len(parts) == rank:  # else it lies on several: a tied embedding, all but experts
                            parts.append(value)
                offset += layers

    def require(self, tensors: Iterator[Tensor]) -> None:
        """Raise CheckpointError where the checkpoint lacks a tensor of the model, or has it in another shape."""
        for tensor in tensors:
            parts = self._parts.get((tensor.key, tensor.index), ())
            if len(parts) != self._size:
                raise CheckpointError(f"checkpoint {self.path} does not hold {tensor.key}, which its arguments ask for")
            if sum(math.prod(last - first for first, last in box) for box, _ in self._places(tensor)) != math.prod(
                tensor.shape
            ):
                raise CheckpointError(
                    f"checkpoint {self.path} holds {tensor.key} of shape {tuple(parts[0].shape)} on each of "
                    f"{self._size} tensor ranks, and its arguments say {tensor.shape}"
                )

    def _places(self, tensor: Tensor) -> Iterator[tuple[Box, torch.Tensor]]:
        """The parts of a tensor, and where they lie in it. A gated layer's rank has a part of both halves."""
        parts = self._parts[tensor.key, tensor.index]
        local = tuple(parts[0].shape)
        if local == tensor.shape:
            yield tuple((0, size) for size in tensor.shape), parts[0]
            return
        halves = 2 if len(tensor.pieces) == 2 else 1  # a gate, and what it multiplies
        by_rows = local[0] != tensor.shape[0]
        for rank, part in enumerate(parts):
            if not by_rows:
                yield ((0, local[0]), (rank * local[1], (rank + 1) * local[1])), part
                continue
            rows = local[0] // halves
            for half in range(halves):
                first = half * (tensor.shape[0] // halves) + rank * rows
                box = ((first, first + rows), *((0, size) for size in local[1:]))
                yield box, part[half * rows : (half + 1) * rows]

    def dtype(self, tensor: Tensor) -> torch.dtype:
        return self._parts[tensor.key, tensor.index][0].dtype

    def read(self, tensor: Tensor, rows: tuple[int, int], columns: tuple[int, int] | None = None) -> torch.Tensor:
        box = box_of(tensor, rows, columns)
        found = torch.empty([last - first for first, last in box], dtype=self.dtype(tensor))
        for its, part in self._places(tensor):
            copy_common(found, box, part, its)
        return found


def _place_of(name: str, offset: int, first_expert: int) -> tuple[str, tuple[int, ...], int]:
    """A parameter's key, its place among layers and experts, and the number of its layer in the chunk (-1: none).

    `offset`: layers of the chunks before. `first_expert`: the number of the file's first expert.
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
