"""What a model's folder has for the model: which tensors of the files make which of the model's, and which have no use.

Problem: files have other tensors than the model. They have experts one by one where the model has all in one, and names
that modules had once. Solution: transformers' own renamings and converters, as `from_pretrained` applies them, but
first to names alone. So every rank knows what is missing and what is left over, reads only what its stages' tensors are
made of, and writes what `save_pretrained` would.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import Tensor

from megatron.capture.tensors import FolderTensors, Wanted, tensor_files

OPTIONAL = "pooler", "add_pooling_layer"
"""A module of the model inside that counts as a head, where the class can be built without it by this argument."""


@dataclass
class _Recipe:
    """How transformers makes tensors of the model. `sources`: names in the files, with the converter's pattern of each.
    `converter`: None where it is one tensor as it is.
    """

    targets: tuple[str, ...]
    converter: object | None
    sources: list[tuple[str, str]] = field(default_factory=list)


class Pretrained:
    """A folder's tensors as those of `model`, which may be without memory for its parameters.

    `new_head`: the task puts a head of its own where the files have none, or another.

    Raises ValueError for a folder that is none, and where the model lacks a tensor or has no use for one, by its name.
    """

    def __init__(self, model: torch.nn.Module, folder: Path | str, *, new_head: bool) -> None:
        self._model, self.folder, self._new_head = model, Path(folder), new_head
        self._state = model.state_dict(keep_vars=True)
        base = getattr(model, "base_model_prefix", "")
        self._base = base if base and hasattr(model, base) else None
        self._aliases = _aliases(self._state)
        names = tensor_files(folder)
        unused = self._plan(sorted(names, key=_natural))
        self._check_sources(names.keys())
        tied = self._tied_copies()
        missing = {name for name in self._state if name not in self._recipes} - tied.keys()
        kept = SimpleNamespace(missing_keys=set(missing), unexpected_keys=set(unused))
        model._adjust_missing_and_unexpected_keys(kept)  # but for those of transformers' own lists
        found = {
            "tied, so one copy is read": {f"{name} to {other}" for name, other in tied.items()},
            "not used, as transformers ignores them": unused - kept.unexpected_keys,
            "not there, and begin as transformers makes them": missing - kept.missing_keys,
            "of a head that the task does not have": {name for name in unused if self._is_other_head(name, names)},
            "not there, and begin at random": {name for name in missing if self._is_new_head(name)},
        }
        spared = set().union(*found.values())
        self._refuse(sorted(missing - spared), f"has no tensor for {{}} of {type(model).__name__}")
        self._refuse(sorted(unused - spared), f"has {{}}, of which {type(model).__name__} has no use")
        self.notes = [f"{folder}: {', '.join(sorted(names))}: {what}" for what, names in found.items() if names]

    def _plan(self, names: Iterable[str]) -> set[str]:
        """Find what each tensor of the files is for. Returns those that the model has no place for."""
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, rename_source_key

        mapping = get_model_conversion_mapping(self._model)
        converters = [each for each in mapping if isinstance(each, WeightConverter)]
        renamings = [each for each in mapping if not isinstance(each, WeightConverter)]
        of_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
        prefix = getattr(self._model, "base_model_prefix", "")
        self._recipes: dict[str, _Recipe] = {}
        self._target_of = lambda name: rename_source_key(name, renamings, converters, prefix, self._state)
        unused = set()
        for name in names:
            target, pattern = self._target_of(name)
            if target not in self._state and name in self._state:
                target, pattern = rename_source_key(name, [], [], prefix, self._state)
            if target not in self._state:
                unused.add(name)
                continue
            converter = None if pattern is None else of_pattern[pattern]
            of = [target] if pattern is None else converter.target_patterns
            targets = tuple(target.replace(of[0], each) for each in of)
            recipe = self._recipes.get(target)
            if recipe is None:
                recipe = _Recipe(targets, converter)
                self._recipes.update(dict.fromkeys(targets, recipe))
            elif converter is None or recipe.converter is not converter:
                self._refuse([recipe.sources[0][0]], f"has {{}} and {name}, which both make {target}")
            recipe.sources.append((name, pattern or name))
        # What `from_pretrained` leaves for `save_pretrained`: those that the files did not need are not reverted.
        self._model._weight_conversions = [each for each in mapping if each.was_used()]
        return unused

    def _check_sources(self, names: Collection[str]) -> None:
        """Refuse what a converter would not notice, such as another expert in the place of a missing one."""
        empty = {
            name: torch.empty(self._state[self._aliases[name][0]].shape, device="meta")
            for name in self._recipes
            if name in self._state
        }
        try:
            expected = self.reverted(empty).keys()
        except NotImplementedError as error:
            raise ValueError(
                f"{self.folder} has tensors that transformers converts and cannot convert back, so the model could "
                "not be saved; load and save it with save_original_format=False"
            ) from error
        for name in sorted(expected - names, key=_natural):
            recipe = self._recipes.get(self._target_of(name)[0])
            if recipe is not None and recipe.converter and any(source in expected for source, _ in recipe.sources):
                self._refuse([name], f"has no tensor {{}}, of which {recipe.targets[0]} is made")
        for recipe in self._recipes.values():
            known = [name for name, _ in recipe.sources if name in expected]
            if recipe.converter and known and len(known) < len(recipe.sources):
                extra = [name for name, _ in recipe.sources if name not in expected]
                self._refuse(extra, f"has {{}}, which {recipe.targets[0]} has no place for")

    def _tied_copies(self) -> dict[str, str]:
        """Names of tied tensors but for the one that is read -> that one."""
        found = {}
        for name in self._state:
            first = self._first_there(name)
            if first is not None and first != name:
                found[name] = first
        return found

    def _first_there(self, name: str) -> str | None:
        return next((each for each in self._aliases[name] if each in self._recipes), None)

    def _head_of(self, name: str) -> str | None:
        """The module outside the model inside, or its pooler, to which a tensor belongs."""
        if self._base is None:
            return None
        if not name.startswith(f"{self._base}."):
            return name.partition(".")[0]
        module, argument = OPTIONAL
        path = f"{self._base}.{module}"
        takes = inspect.signature(type(getattr(self._model, self._base)).__init__).parameters
        return path if name.startswith(f"{path}.") and argument in takes else None

    def _is_new_head(self, name: str) -> bool:
        return self._new_head and self._head_of(name) is not None and not self._has_some(self._head_of(name))

    def _is_other_head(self, name: str, names: Collection[str]) -> bool:
        is_whole = self._base is not None and any(each.startswith(f"{self._base}.") for each in names)
        full = name if is_whole or self._base is None else f"{self._base}.{name}"
        head = self._head_of(full)
        if head is None:
            return False
        modules = {each for each, _ in self._model.named_modules()}
        return name.rpartition(".")[0] not in modules or (self._new_head and not self._has_some(head))

    def _has_some(self, module: str) -> bool:
        return any(name == module or name.startswith(f"{module}.") for name in self._recipes)

    def _refuse(self, names: list[str], what: str) -> None:
        if names:
            more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
            raise ValueError(
                f"{self.folder} {what.format(names[0] + more)}; give the folder of such a model, or save what "
                "from_pretrained makes of it, if that is what you want"
            )

    def read(self, files: FolderTensors, wanted: Mapping[str, Wanted]) -> Iterator[tuple[str, Tensor]]:
        """For `load_stage`. Raises ValueError where a tensor has another shape, or tied copies have other values."""
        of_recipe: dict[int, dict[str, str]] = {}
        for own, each in wanted.items():
            for name in (name for name in each.names if name in self._recipes):
                of_recipe.setdefault(id(self._recipes[name]), {})[name] = own
        done: dict[str, Tensor] = {}
        for names in of_recipe.values():
            recipe = self._recipes[next(iter(names))]
            made = self._made(files, recipe, {name: wanted[own] for name, own in names.items()})
            for name, own in names.items():
                if own not in done:
                    if len([each for each in wanted[own].names if each in self._recipes]) > 1:
                        done[own] = made[name]
                    yield own, made[name]
                elif not torch.equal(done[own], made[name]):
                    raise ValueError(
                        f"{files.folder} has other values for {name} than for {own}, and its config.json ties them; "
                        "set tie_word_embeddings to false there"
                    )

    def _made(self, files: FolderTensors, recipe: _Recipe, wanted: Mapping[str, Wanted]) -> dict[str, Tensor]:
        first, dtype = recipe.targets[0], next(iter(wanted.values())).dtype
        if recipe.converter is None:
            return {first: files.read(recipe.sources[0][0], wanted[first].shape).to(dtype)}
        converter = copy.deepcopy(recipe.converter)
        for name, pattern in recipe.sources:
            converter.add_tensor(first, name, pattern, lambda name=name: files.read(name).to(dtype))
        try:
            found = converter.convert(first, model=self._model, config=self._model.config)
            made = {name: each[0] if isinstance(each, list) else each for name, each in found.items()}
        except (RuntimeError, TypeError, IndexError) as error:
            self._refuse([recipe.sources[0][0]], f"has tensors of which {first} cannot be made, such as {{}} ({error})")
        for name, each in wanted.items():
            if name not in made or made[name].shape != each.shape:
                shape = tuple(made[name].shape) if name in made else None
                what = f"makes {name} of {{}} in shape {shape}, and the model has {tuple(each.shape)}"
                self._refuse([source for source, _ in recipe.sources], what)
        return made

    def unused(self, used: Collection[str]) -> dict[str, Tensor]:
        """Tensors of the model in the files that have none of the names `used`, as they are."""
        rest: dict[str, Wanted] = {}
        for name, tensor in self._state.items():
            if self._aliases[name][0] == name and self._first_there(name) and used.isdisjoint(self._aliases[name]):
                rest[name] = Wanted(self._aliases[name], tensor.shape, None)
        with FolderTensors(self.folder) as files:
            return dict(self.read(files, rest))

    def reverted(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Tensors of the model, all that one of a file is made of among them, as `save_pretrained` writes them."""
        from transformers.core_model_loading import revert_weight_conversion

        left_out = set(getattr(self._model, "_keys_to_ignore_on_save", None) or ())
        of = getattr(self._model, "all_tied_weights_keys", {})
        named = {of.get(name, name): each for name, each in tensors.items() if name not in left_out}
        return {name: each.contiguous() for name, each in revert_weight_conversion(self._model, named).items()}

    def written_with(self, name: str) -> str:
        """A name that all tensors of the model have in common of which `reverted` makes tensors together."""
        from transformers.core_model_loading import apply_converters

        found, pattern = apply_converters(name, self._reverse_converters)
        return name if pattern is None else found

    @cached_property
    def _reverse_converters(self) -> list:
        from transformers.core_model_loading import WeightConverter

        reverse = [each.reverse_transform() for each in self._model._weight_conversions[::-1]]
        return [each for each in reverse if isinstance(each, WeightConverter)]


def _aliases(state: Mapping[str, Tensor]) -> dict[str, tuple[str, ...]]:
    names: dict[int, list[str]] = {}
    for name, tensor in state.items():
        names.setdefault(id(tensor), []).append(name)
    return {name: tuple(each) for each in names.values() for name in each}


def _natural(name: str) -> list:
    """transformers' order, in which experts 2 and 10 are where they belong."""
    from transformers.core_model_loading import dot_natural_key

    return dot_natural_key(name)
