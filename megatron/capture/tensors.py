"""The parameters of stages: captured without memory, and then read from a folder that Hugging Face wrote.

Problem: a model of 2.85 billion parameters takes 11 GB, and each rank needs a part of it. torch's ``meta`` device does
not help, because the graph would name that device wherever the model makes a tensor.

Solution: a model is captured and cut with fake parameters, which are CPU tensors with a shape and no values. A
parameter becomes fake as soon as a module registers it, so the model initialises nothing. Buffers stay real: a
checkpoint lacks buffers that are not persistent, such as the frequencies of rotary embeddings. Each rank then reads the
tensors of its stages. A folder has ``model.safetensors``, or several files and ``model.safetensors.index.json``, which
names the file of each tensor. Only the header and the wanted tensors of a file are read.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor, FakeTensorMode

from megatron.capture.cut import CapturedStage
from megatron.capture.statistics import counted_in

_ONE = "model.safetensors"
_INDEX = "model.safetensors.index.json"


def tensor_files(folder: Path | str) -> dict[str, Path]:
    """Name of each tensor in a folder -> the file that contains it.

    Raises ValueError for a folder without safetensors, a broken index, or a file that is not a safetensors file.
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


def state_of_tensors(folder: Path | str) -> str:
    """The number of a folder's tensors, and a digest of their names, dtypes, shapes and middle rows.

    The result tells models of one architecture apart, does not depend on the division into files, and needs few bytes
    of them. Raises ValueError as `FolderTensors` does.
    """
    digest = hashlib.sha256()
    with FolderTensors(folder) as files:
        for name in sorted(files.places):
            shape = files.shape_of(name)
            part = files.part(name, slice(shape[0] // 2, shape[0] // 2 + 1)) if shape else files.read(name)
            digest.update(f"{name} {part.dtype} {shape} ".encode())
            digest.update(part.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        return f"{len(files.places)} tensors, digest {digest.hexdigest()[:16]}"


class FolderTensors:
    """The tensors of a folder, by name, as a context manager. A file is opened when a tensor of it is first read.

    Raises ValueError as `tensor_files` does, and for a file that has other tensors than the index says.
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
        """Read a tensor to the CPU. Raises ValueError if its shape is not `shape`."""
        found = self.shape_of(name)
        if shape is not None and found != tuple(shape):
            raise ValueError(
                f"{name} in {self.places[name]} has shape {found}, and the model has {tuple(shape)}; give the folder "
                "and the configuration of one model"
            )
        return self._files[self.places[name]].get_tensor(name)

    def part(self, name: str, rows: slice) -> Tensor:
        """Read some rows of a tensor to the CPU. Precondition: `shape_of` has told that it has rows."""
        return self._files[self.places[name]].get_slice(name)[rows]

    def shape_of(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor."""
        path = self.places[name]
        if path not in self._files:
            file = self._stack.enter_context(_opened(path))
            other = set(file.keys()) ^ {each for each, place in self.places.items() if place == path}
            if other:
                raise ValueError(f"{path} and {_INDEX} do not agree about {min(other)}; download both again")
            self._files[path] = file
        return tuple(self._files[path].get_slice(name).get_shape())


@dataclass(frozen=True)
class Wanted:
    """A tensor to read: all its names in the model, its own name first, its shape and its dtype."""

    names: tuple[str, ...]
    shape: torch.Size
    dtype: torch.dtype


Read = Callable[[FolderTensors, Mapping[str, Wanted]], Iterator[tuple[str, Tensor]]]
"""(files, wanted tensors by own name) -> own name and value of each that the files have, in the wanted dtype."""


def read_by_name(files: FolderTensors, wanted: Mapping[str, Wanted]) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors of files that use the model's names: own name and value."""
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
        stage: the stage. Its fake parameters are replaced by real ones on `device`; real ones are written in place.
        folder: a folder as `tensor_files` takes it.
        device: the device of replaced parameters.
        read: finds the model's tensors in the files.
        initial: (name, shape, dtype) -> a parameter that the folder lacks, such as a new classifier. A buffer that the
            folder lacks then keeps its value. None: any missing tensor is an error.
        exact: a dict that receives the FP32 values of all floating-point tensors, exactly as in the files, on `device`,
            except of statistics, which forwards change.

    Returns the names of the tensors that the folder lacked. Raises ValueError for a tensor that is missing without
    `initial`, or has another shape.
    """
    kept = stage.state_dict(keep_vars=True)
    buffers = {name: buffer for name, buffer in stage.named_buffers() if name in kept}  # in checkpoints
    targets = {**dict(stage.named_parameters()), **buffers}

    wanted = {}
    for name, tensor in targets.items():
        dtype = torch.float32 if exact is not None and tensor.is_floating_point() else tensor.dtype
        wanted[name] = Wanted(tuple(stage.names.get(name, (name,))), tensor.shape, dtype)
    values: dict[str, Tensor] = {}
    counted = counted_in(stage.graph)

    def settle(name: str, value: Tensor) -> None:
        if exact is not None and value.is_floating_point() and name not in counted:
            exact[name] = value.to(device, torch.float32, copy=True)  # a copy, which the weight must not share
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


def _opened(path: Path):
    try:
        return safe_open(path, framework="pt")
    except (FileNotFoundError, SafetensorError) as error:
        raise ValueError(f"{path} is no safetensors file that can be read ({error}); download it again") from error


@contextlib.contextmanager
def fake_parameters(dtype: torch.dtype | None = None) -> Iterator[None]:
    """A block in which models are built with fake parameters and real buffers.

    `dtype`: the dtype of all floating-point parameters, such as bfloat16; None: the model's own dtype. (A model's
    ``to`` cannot convert fake parameters.)

    Raises ValueError for a model that reads the values of its parameters while it is built.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    register = nn.Module.register_parameter

    def register_fake(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not isinstance(parameter, FakeTensor):
            its = dtype if dtype is not None and parameter.is_floating_point() else parameter.dtype
            parameter = _without_values(parameter, mode, dtype=its, device=parameter.device)
            parameter._is_hf_initialized = True  # so that transformers does not initialise it
        register(module, name, parameter)

    nn.Module.register_parameter = register_fake
    try:
        yield
    except DataDependentOutputException as error:
        raise ValueError(
            f"the model reads values of its parameters while it is built ({error.func}); build it with real ones"
        ) from error
    finally:
        nn.Module.register_parameter = register


@contextlib.contextmanager
def parameters_on_meta(model: nn.Module) -> Iterator[None]:
    """A block in which a model's fake parameters lie on torch's ``meta`` device, where other packages expect
    parameters without values; at its end all parameters, also new ones, are fake again.
    """
    _replace_parameters(model, contextlib.nullcontext(), device="meta")
    yield
    _replace_parameters(model, FakeTensorMode(allow_non_fake_inputs=True), device="cpu")


def _replace_parameters(model: nn.Module, mode: contextlib.AbstractContextManager, *, device: str) -> None:
    made: dict[int, nn.Parameter] = {}  # a shared parameter stays shared
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                if id(parameter) not in made:
                    made[id(parameter)] = _without_values(parameter, mode, dtype=parameter.dtype, device=device)
                module._parameters[name] = made[id(parameter)]


def _without_values(
    parameter: nn.Parameter, mode: contextlib.AbstractContextManager, *, dtype: torch.dtype, device: torch.device | str
) -> nn.Parameter:
    with mode:
        empty = torch.empty(parameter.shape, dtype=dtype, device=device)
    return nn.Parameter(empty, requires_grad=parameter.requires_grad)


def is_fake(tensor: Tensor) -> bool:
    """Whether a tensor is fake: a shape without values."""
    return isinstance(tensor, FakeTensor)


def give_values(stage: CapturedStage, value_of: Callable[[str], Tensor]) -> None:
    """Replace a stage's fake parameters by real ones.

    `value_of`: name in the model -> tensor of the parameter's shape, which is converted to the parameter's dtype.
    """
    for name, parameter in list(stage.named_parameters()):
        if is_fake(parameter):
            path, _, last = name.rpartition(".")
            value = value_of(name).to(parameter.dtype)
            assert value.shape == parameter.shape, f"{name} has shape {tuple(value.shape)}"
            real = nn.Parameter(value, requires_grad=parameter.requires_grad)
            stage.get_submodule(path)._parameters[last] = real
