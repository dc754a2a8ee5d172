"""A stage's parameters from a folder that Hugging Face wrote: each rank reads only the tensors that it needs.

A folder has ``model.safetensors``, or several files and ``model.safetensors.index.json``, which says in which file each
tensor lies. Of a file only the header and the wanted tensors are read.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
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


def names_in_files(names: Iterable[str], renamed: Callable[[str], str] | None) -> dict[str, str]:
    """Name of a tensor -> its name in the files, where `renamed` says the name in the model of one in a file.

    A file may have the model's own names, too.
    """
    found = {name: name for name in names}
    if renamed is not None:
        for name in list(found):
            found.setdefault(renamed(name), name)
    return found


def load_stage(
    stage: CapturedStage,
    folder: Path | str,
    *,
    device: torch.device | str = "cpu",
    base: str = "",
    renamed: Callable[[str], str] | None = None,
    initial: Callable[[str, torch.Size, torch.dtype], Tensor] | None = None,
    exact: dict[str, Tensor] | None = None,
) -> tuple[str, ...]:
    """Fill a stage's parameters and persistent buffers.

    Args:
        stage: fake parameters are replaced by real ones on `device`, real ones are written in place.
        folder: what `tensor_files` takes.
        device: of replaced parameters.
        base: the name of the model inside the model (``base_model_prefix``), without which a folder of the inner model
            has its names.
        renamed: the name in the model of a tensor in a file, where modules were renamed since; None: the same.
        initial: makes a parameter that the folder lacks, such as a new classifier, from name, shape and dtype; None:
            that is refused.
        exact: receives the values of all that are floating in FP32, as the files have them, on `device`.

    Returns the names that `initial` made. Raises ValueError for a tensor that is missing or has another shape.
    """
    places = tensor_files(folder)
    wanted = {**dict(stage.named_parameters()), **_persistent_buffers(stage)}
    known = names_in_files(places, renamed)
    found = {name: _name_in(known, stage.names.get(name, (name,)), base) for name in wanted}
    values: dict[str, Tensor] = {}

    def converted(name: str, value: Tensor) -> Tensor:
        if exact is not None and value.is_floating_point():
            exact[name] = value.to(device, torch.float32, copy=True)  # never the weight itself
        return value.to(wanted[name].dtype)

    for path in dict.fromkeys(places[there] for there in found.values() if there is not None):
        with _opened(path) as file:
            for name, there in found.items():
                if there is not None and places[there] == path:
                    values[name] = converted(name, _read(file, path, there, wanted[name]))
    made = tuple(name for name, there in found.items() if there is None)
    if made and initial is None:
        raise ValueError(f"{folder} has no tensor for {made[0]}; give the folder of a model of this class")
    for name in made:
        dtype = wanted[name].dtype
        value = initial(name, wanted[name].shape, torch.float32 if dtype.is_floating_point else dtype)
        values[name] = converted(name, value)
    with torch.no_grad():
        for name, tensor in wanted.items():
            if not is_fake(tensor):
                tensor.copy_(values[name])
    give_values(stage, lambda name: values[name].to(device))
    return made


def _persistent_buffers(stage: CapturedStage) -> dict[str, Tensor]:
    kept = stage.state_dict(keep_vars=True)
    return {name: buffer for name, buffer in stage.named_buffers() if name in kept}


def _name_in(known: Mapping[str, str], names: Sequence[str], base: str) -> str | None:
    """What a tensor of these names is called in the files."""
    short = tuple(name.removeprefix(f"{base}.") for name in names) if base else ()
    long = tuple(f"{base}.{name}" for name in names) if base else ()
    return next((known[name] for name in (*names, *short, *long) if name in known), None)


def _read(file, path: Path, name: str, like: Tensor) -> Tensor:
    shape = tuple(file.get_slice(name).get_shape())
    if shape != tuple(like.shape):
        raise ValueError(
            f"{name} in {path} has shape {shape}, and the model has {tuple(like.shape)}; give the folder and the "
            "configuration of one model"
        )
    return file.get_tensor(name)


def _opened(path: Path):
    try:
        return safe_open(path, framework="pt")
    except (FileNotFoundError, SafetensorError) as error:
        raise ValueError(f"{path} is no safetensors file that can be read ({error}); download it again") from error
