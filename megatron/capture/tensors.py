"""A stage's parameters from a folder that Hugging Face wrote: each rank reads only the tensors that it needs.

A folder has ``model.safetensors``, or several files and ``model.safetensors.index.json``, which says in which file each
tensor lies. Of a file only the header and the wanted tensors are read.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron.capture.fake import give_values, is_fake
from megatron.capture.stage import CapturedStage

_ONE = "model.safetensors"
_INDEX = "model.safetensors.index.json"


def tensor_files(folder: Path | str) -> dict[str, Path]:
    """Name of each tensor of a folder -> the file in which it lies.

    Raises ValueError for a folder without safetensors, a broken index, or a file that is no safetensors file.
    """
    folder = Path(folder)
    if (folder / _INDEX).exists():
        try:
            places = json.loads((folder / _INDEX).read_text(encoding="utf-8"))["weight_map"]
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ValueError(f"{folder / _INDEX} has no weight_map; download it again") from error
        return {name: folder / file for name, file in places.items()}
    if not (folder / _ONE).exists():
        raise ValueError(
            f"{folder} has neither {_ONE} nor {_INDEX}; write the model with save_pretrained(..., "
            "safe_serialization=True)"
        )
    with _opened(folder / _ONE) as file:
        return dict.fromkeys(file.keys(), folder / _ONE)


class FolderTensors:
    """The tensors of a folder by their names in its files, for use in a ``with``; a file is opened when it is needed.

    Raises ValueError as `tensor_files`, and for a file whose tensors are not those that the index names.
    """

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        self.places = tensor_files(folder)
        self._stack, self._files = ExitStack(), {}

    def __enter__(self) -> FolderTensors:
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()
        self._files.clear()

    def read(self, name: str, shape: torch.Size | None = None) -> Tensor:
        """One tensor, on the CPU. Raises ValueError where it has another shape than `shape`."""
        path = self.places[name]
        if path not in self._files:
            file = self._stack.enter_context(_opened(path))
            other = set(file.keys()) ^ {each for each, place in self.places.items() if place == path}
            if other:
                raise ValueError(f"{path} and {_INDEX} do not agree about {min(other)}; download both again")
            self._files[path] = file
        file = self._files[path]
        found = tuple(file.get_slice(name).get_shape())
        if shape is not None and found != tuple(shape):
            raise ValueError(
                f"{name} in {path} has shape {found}, and the model has {tuple(shape)}; give the folder and the "
                "configuration of one model"
            )
        return file.get_tensor(name)


@dataclass(frozen=True)
class Wanted:
    """A tensor of a model: all its names there, its own first."""

    names: tuple[str, ...]
    shape: torch.Size
    dtype: torch.dtype


Read = Callable[[FolderTensors, Mapping[str, Wanted]], Iterator[tuple[str, Tensor]]]
"""(files, what is wanted by its own name) -> own name and value, of the wanted dtype, of what the files have."""


def read_by_name(files: FolderTensors, wanted: Mapping[str, Wanted]) -> Iterator[tuple[str, Tensor]]:
    """For files whose tensors have the names of the model's."""
    for own, each in wanted.items():
        name = next((name for name in each.names if name in files.places), None)
        if name is not None:
            yield own, files.read(name, each.shape).to(each.dtype)


def load_stage(
    stage: CapturedStage,
    folder: Path | str,
    *,
    device: torch.device | str = "cpu",
    read: Read = read_by_name,
    initial: Callable[[str, torch.Size, torch.dtype], Tensor] | None = None,
    exact: dict[str, Tensor] | None = None,
) -> tuple[str, ...]:
    """Fill a stage's parameters and persistent buffers.

    Args:
        stage: fake parameters are replaced by real ones on `device`, real ones are written in place.
        folder: what `tensor_files` takes.
        device: of replaced parameters.
        read: finds tensors of the model in the files.
        initial: makes a parameter that the folder lacks, such as a new classifier, from name, shape and dtype; a buffer
            that it lacks keeps its value. None: both are refused.
        exact: receives the values of all that are floating in FP32, as the files have them, on `device`.

    Returns the names that the folder lacked. Raises ValueError for a tensor that is missing or has another shape.
    """
    buffers = _persistent_buffers(stage)
    targets = {**dict(stage.named_parameters()), **buffers}

    def in_files(tensor: Tensor) -> torch.dtype:
        return torch.float32 if exact is not None and tensor.is_floating_point() else tensor.dtype

    wanted = {
        name: Wanted(tuple(stage.names.get(name, (name,))), tensor.shape, in_files(tensor))
        for name, tensor in targets.items()
    }
    values: dict[str, Tensor] = {}

    def settle(name: str, value: Tensor) -> None:
        if exact is not None and value.is_floating_point():
            exact[name] = value.to(device, torch.float32, copy=True)  # never the weight itself
        values[name] = value.to(targets[name].dtype)

    with FolderTensors(folder) as files:
        for name, value in read(files, wanted):
            settle(name, value)
    made = tuple(name for name in targets if name not in values)
    if made and initial is None:
        raise ValueError(f"{folder} has no tensor for {made[0]}; give the folder of a model of this class")
    for name in made:
        each = wanted[name]
        settle(name, buffers[name].clone() if name in buffers else initial(name, each.shape, each.dtype))
    with torch.no_grad():
        for name, tensor in targets.items():
            if not is_fake(tensor):
                tensor.copy_(values[name])
    give_values(stage, lambda name: values[name].to(device))
    return made


def _persistent_buffers(stage: CapturedStage) -> dict[str, Tensor]:
    kept = stage.state_dict(keep_vars=True)
    return {name: buffer for name, buffer in stage.named_buffers() if name in kept}


def _opened(path: Path):
    try:
        return safe_open(path, framework="pt")
    except (FileNotFoundError, SafetensorError) as error:
        raise ValueError(f"{path} is no safetensors file that can be read ({error}); download it again") from error
