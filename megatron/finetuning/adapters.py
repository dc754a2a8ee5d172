"""LoRA adapters in a captured model: PEFT's own modules, configuration and files.

PEFT replaces modules of the model without memory before the capture, so the graph has PEFT's operators, and the
parameters of the adapted model have PEFT's names. Three tables connect the names in the adapted model, the names of the
frozen weights in the model's folder, and the names in PEFT's files. PEFT itself makes the third table.

A rank has only a part of a layer's tensors. An adapter begins with PEFT's initialisation of that layer, run with a
generator that depends on the seed and the layer's name alone. So every partition begins alike.
"""

from __future__ import annotations

import copy
import warnings
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from megatron.capture.randomness import mixed
from megatron.capture.tensors import FolderTensors, Wanted, parameters_on_meta
from megatron.finetuning.adapter_config import refuse_variants, require_peft
from megatron.finetuning.pretrained import Pretrained, first_line

TENSORS = "adapter_model.safetensors"

_NAME = "default"  # PEFT's name of a model's only adapter


class Adapter:
    """PEFT's adapter in a model without memory, which is changed in place.

    Attributes:
        model: the adapted model, whose forward takes the same tensors as before.
        config: PEFT's configuration, in which PEFT has filled in the fields that depend on the architecture.
        layers: paths of the adapted layers.
        base_names: name in the adapted model -> name in the model before; a module that is trained whole has the name
            of its original.
        written: name in the adapted model -> name in PEFT's file.
        notes: PEFT's warnings.

    Raises ValueError for a configuration that does not fit the model, or that is not supported.
    """

    def __init__(self, model: nn.Module, config) -> None:
        peft = require_peft()
        refuse_variants(config)
        self.model, self.config = model, config
        plain = {_without_peft(name): name for name in model.state_dict()}
        try:
            with warnings.catch_warnings(record=True) as said, parameters_on_meta(model):
                warnings.simplefilter("always")
                wrapped = peft.get_peft_model(model, config, low_cpu_mem_usage=True)
                # PEFT chooses and renames what a file has; marks stand in place of the tensors.
                marks = {name: torch.empty(0) for name in model.state_dict()}
                given = {f"base_model.model.{name}": mark for name, mark in marks.items()}
                found = peft.get_peft_model_state_dict(wrapped, given)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"PEFT cannot adapt {type(model).__name__}: {first_line(error)}; give other --target_modules"
            ) from error
        remarks = (each.message for each in said if issubclass(each.category, UserWarning))
        self.notes = [f"PEFT: {text}" for text in dict.fromkeys(map(first_line, remarks))]
        own = {id(mark): name for name, mark in marks.items()}
        self.written = {own[id(mark)]: name for name, mark in found.items()}
        self.base_names = {name: plain[each] for name in marks if (each := _without_peft(name)) in plain}
        self.layers = tuple(
            path for path, each in model.named_modules() if isinstance(each, peft.tuners.lora.LoraLayer)
        )

    @property
    def trained(self) -> frozenset[str]:
        """The names of all trained parameters in the adapted model."""
        return frozenset(name for name, each in self.model.named_parameters() if each.requires_grad)

    def layer_of(self, name: str) -> str | None:
        """The path of the adapted layer that has a tensor; None for a tensor of no such layer."""
        return next((path for path in self.layers if name.startswith(f"{path}.")), None)

    def layer_with(self, path: str, values: Mapping[str, Tensor]) -> nn.Module:
        """A copy of an adapted layer with real parameters: `values` by their names in the adapted model, others 0."""
        layer = self.model.get_submodule(path)
        memo = {}
        for name, parameter in layer.named_parameters():
            value = values.get(f"{path}.{name}")
            value = torch.zeros(parameter.shape, dtype=parameter.dtype) if value is None else value
            memo[id(parameter)] = nn.Parameter(value, requires_grad=parameter.requires_grad)
        return copy.deepcopy(layer, memo)

    def read(self, folder: Path) -> dict[str, Tensor]:
        """Name in the adapted model -> tensor of the adapter in a folder.

        Raises ValueError if the file cannot be read, or has other tensors than the adapter.
        """
        path = folder / TENSORS
        try:
            found = load_file(path)
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{path} cannot be read ({first_line(error)}); give the folder of an adapter") from error
        written, shapes = self.written, self.model.state_dict()
        for name in sorted(found.keys() ^ set(written.values())):
            what = f"lacks {name}, which the adapter needs"
            if name in found:
                what = f"has {name}, of which the adapter of its configuration has no use"
            raise ValueError(f"{path} {what}; give one model's adapter")
        for own, name in written.items():
            if found[name].shape != shapes[own].shape:
                raise ValueError(
                    f"{name} in {path} has shape {tuple(found[name].shape)}, and the model needs "
                    f"{tuple(shapes[own].shape)}; give the adapter of this model"
                )
        return {own: found[name] for own, name in written.items()}

    def save_config(self, folder: Path) -> None:
        """Write PEFT's configuration, as `PeftModel.save_pretrained` does."""
        config = copy.deepcopy(self.config)
        config.inference_mode = True
        config.save_pretrained(str(folder))


def _without_peft(name: str) -> str:
    for part in (".base_layer.", ".original_module.", f".modules_to_save.{_NAME}."):
        name = name.replace(part, ".")
    return name


class AdapterTensors:
    """The tensors of an adapted model: frozen weights of the model's folder, and an adapter, which is new or continued.

    Takes the place of `Pretrained` for a model with an adapter.

    Args:
        pretrained: the tensors of the model before it was adapted.
        used: the names of the adapted model's tensors that the run uses.
        seed: the seed of a new adapter.
        begun: the folder of an adapter to continue; None: the adapter is new.
        counted: the names of the statistics that training changes.
        rounded: (name, frozen weight) -> the weight with which the run computes.

    Raises ValueError for an adapter that lacks a tensor or belongs to another model, and for a head that would begin at
    random and stay frozen.
    """

    file_name = TENSORS

    def __init__(
        self,
        adapter: Adapter,
        pretrained: Pretrained,
        *,
        used: Collection[str],
        seed: int,
        begun: str | None = None,
        counted: Collection[str] = (),
        rounded: Callable[[str, Tensor], Tensor] = lambda name, weight: weight,
    ) -> None:
        self._adapter, self._pretrained, self._seed, self._rounded = adapter, pretrained, seed, rounded
        self.folder = pretrained.folder
        self.notes = [*adapter.notes, *pretrained.notes]
        self._begun = {} if begun is None else adapter.read(Path(begun))
        learned = {adapter.base_names[name] for name in adapter.written if name in adapter.base_names}
        base_used = {adapter.base_names[name] for name in used if name in adapter.base_names}
        lost = sorted((pretrained.new_names & base_used) - learned)
        if lost:
            module = lost[0].rpartition(".")[0].rpartition(".")[2]
            raise ValueError(
                f"{lost[0]} is not in {self.folder}; it would begin at random, stay frozen and not be written; give "
                f"--modules_to_save {module}"
            )
        if moved := sorted(set(counted) - adapter.written.keys()):
            module = moved[0].rpartition(".")[0].rpartition(".")[2]
            raise ValueError(
                f"{moved[0]} is a statistic that training changes, and the adapter's file would not have it; give "
                f"--modules_to_save {module}"
            )
        self._layer = lru_cache(maxsize=1)(self._initial_layer)

    def read(self, files: FolderTensors, wanted: Mapping[str, Wanted]) -> Iterator[tuple[str, Tensor]]:
        """Read tensors of the adapted model, as `Pretrained.read` does: the adapter's only if it is continued."""
        sharing: dict[tuple[tuple[str, ...], torch.dtype], list[str]] = {}
        for name, each in wanted.items():
            if name in self._begun:
                yield name, self._begun[name].to(each.dtype)
            elif name in self._adapter.base_names:
                names = self._pretrained.names_of(self._adapter.base_names[name])
                sharing.setdefault((names, each.dtype), []).append(name)
        base = {owns[0]: Wanted(names, wanted[owns[0]].shape, dtype) for (names, dtype), owns in sharing.items()}
        all_of = {owns[0]: owns for owns in sharing.values()}
        for first, value in self._pretrained.read(files, base):
            for name in all_of[first]:
                yield name, value if name == first else value.clone()

    def initial(self, other: Callable[..., Tensor]) -> Callable[[str, torch.Size, torch.dtype], Tensor]:
        """A function that makes a tensor that `read` lacks. `other`: makes a tensor of a new head, by its own name."""

        def make(name: str, shape: torch.Size, dtype: torch.dtype) -> Tensor:
            path = self._adapter.layer_of(name)
            if path is None:
                return other(self._adapter.base_names[name], shape, dtype)
            return self._layer(path)[name].to(dtype, copy=True)

        return make

    def _initial_layer(self, path: str) -> dict[str, Tensor]:
        """The tensors with which an adapted layer begins, by their names in the adapted model."""
        adapter, values = self._adapter, {}
        if adapter.config.use_dora:  # its magnitudes begin as the norms of the frozen weight
            frozen = [name for name in adapter.model.state_dict() if name.startswith(f"{path}.base_layer.")]
            values = {name: self._rounded(name, value) for name, value in self._read_all(frozen).items()}
        layer = adapter.layer_with(path, values)
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(mixed(self._seed, zlib.crc32(path.encode())))
            layer.reset_lora_parameters(_NAME, adapter.config.init_lora_weights)
            if adapter.config.use_dora:
                if _NAME in layer.lora_embedding_A:
                    first, second = layer.lora_embedding_A[_NAME], layer.lora_embedding_B[_NAME]
                else:
                    first, second = layer.lora_A[_NAME].weight, layer.lora_B[_NAME].weight
                layer.lora_magnitude_vector[_NAME].update_layer(
                    base_layer=layer.get_base_layer(), lora_A=first, lora_B=second, scaling=layer.scaling[_NAME]
                )
        return {f"{path}.{name}": each.detach() for name, each in layer.named_parameters()}

    def _read_all(self, names: Iterable[str]) -> dict[str, Tensor]:
        """The tensors with the given names in the adapted model, as far as `read` has them."""
        state = self._adapter.model.state_dict()
        wanted = {name: Wanted((name,), state[name].shape, state[name].dtype) for name in names}
        with FolderTensors(self.folder) as files:
            return dict(self.read(files, wanted))

    # --- what a run writes

    def writes(self, name: str) -> bool:
        """Whether a tensor of the adapted model is part of the adapter."""
        return name in self._adapter.written

    def unused(self, used: Collection[str]) -> dict[str, Tensor]:
        """The initial values of the adapter's tensors that `used` lacks: those of layers that the task leaves out."""
        names = [name for name in self._adapter.written if name not in used]
        found = self._read_all(names)
        for name in names:
            if name not in found and (path := self._adapter.layer_of(name)):
                found[name] = self._layer(path)[name]
        return found

    def reverted(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The adapter's tensors with the names that PEFT writes."""
        return {self._adapter.written[name]: tensor.contiguous() for name, tensor in tensors.items()}

    def written_with(self, name: str) -> str:
        """The name of the group of all tensors, since PEFT reads one file."""
        return TENSORS
