"""A Hugging Face model from its folder: its configuration, the model without memory for its weights, and its tensors.

Problem: the tensors in the files of a folder differ from the tensors of the model. For example, a file has one tensor
for each expert while the model has one tensor for all experts, or a file uses old names of modules.

Solution: apply transformers' own renamings and converters, as `from_pretrained` does, but to the names first. So every
rank knows which tensors are missing and which are superfluous, reads only the tensors from which its stages' tensors
are made, and writes the tensors that `save_pretrained` would write.

transformers is imported inside functions, since only fine-tuning needs it.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import Tensor

from megatron.capture.export import Captured, capture
from megatron.capture.tensors import FolderTensors, Wanted, fake_parameters, tensor_files
from megatron.finetuning.data.lengths import Lengths

OPTIONAL = "pooler", "add_pooling_layer"
"""A module of the inner model that counts as part of the head, and the argument that leaves it out of the model."""

_NEW = "missing, so they are initialized at random"


def require_transformers():
    """Import and return the package transformers. Raises ValueError if it is not installed."""
    try:
        import transformers
    except ImportError as error:
        raise ValueError("fine-tuning needs the package transformers, 5 or later; pip install .[tokenizers]") from error
    return transformers


def check_folder(folder: str) -> Path:
    """The path of a model's folder. Raises ValueError if it is not a folder, or has no config.json."""
    path = Path(folder)
    if not path.is_dir():
        raise ValueError(
            f"--model_name_or_path {folder} is no folder; download the model first (nothing is downloaded here)"
        )
    if not (path / "config.json").is_file():
        raise ValueError(f"{folder} has no config.json, so it is no model of transformers; give a model's folder")
    return path


def read_config(folder: str, changes: Mapping[str, object] | None = None):
    """The configuration in a model's folder, with `changes` applied. Raises ValueError if it cannot be read."""
    transformers = require_transformers()
    check_folder(folder)
    try:
        return transformers.AutoConfig.from_pretrained(folder, local_files_only=True, **dict(changes or {}))
    except Exception as error:  # a field of the wrong type can raise an error of any class
        raise ValueError(f"{folder}/config.json cannot be read: {first_line(error)}; save the model anew") from error


def open_model(
    folder: str,
    auto_model: str,
    *,
    dtype: torch.dtype = torch.float32,
    changes: Mapping[str, object] | None = None,
    attention: str | None = None,
) -> torch.nn.Module:
    """The model that a folder's configuration describes, without memory for its weights.

    Args:
        auto_model: the class of transformers that knows the architecture for the task, such as
            ``AutoModelForCausalLM``.
        changes: changes to the configuration, such as of ``num_labels``.
        attention: transformers' word for an implementation of attention; None: the one that transformers chooses.

    Raises ValueError if `read_config` does, and for an architecture that has no model for the task.
    """
    config = read_config(folder, changes)
    config.use_cache = False
    given = {} if attention is None else {"attn_implementation": attention}
    try:
        with fake_parameters(dtype):
            return getattr(require_transformers(), auto_model).from_config(config, **given)
    except (ValueError, KeyError) as error:
        if "attention" in str(error) and given:
            raise ValueError(
                f"{config.model_type} of {folder} has no --attn_implementation {attention}: "
                f"{first_line(error).partition('. ')[0]}; leave it out"
            ) from error
        raise ValueError(
            f"{config.model_type} of {folder} has no {auto_model}: {first_line(error)}; choose another --task"
        ) from error


def capture_model(
    model: torch.nn.Module,
    batch: Mapping[str, Tensor],
    keep: Sequence[str],
    forward: Callable[[torch.nn.Module, Mapping[str, Tensor]], object] | None = None,
    *,
    lengths: Sequence[Lengths] = (),
) -> Captured:
    """The graph of a model, captured with a microbatch; a single sample is doubled, so that the batch size is symbolic.

    Args:
        keep: fields of the model's output that evaluations need besides the loss.
        forward: computes the output with its loss, as `capture` takes it.
        lengths: the lengths of all rows if microbatches are padded to several widths; `batch` is padded to the longest.

    Raises ValueError if `capture` does, and if the graph is not the same for all widths.
    """
    if next(iter(batch.values())).shape[0] == 1:
        batch = {name: torch.cat([tensor, tensor]) for name, tensor in batch.items()}
    if not lengths:
        return capture(model, batch, keep=keep, forward=forward)
    kind = type(model).__name__
    try:
        captured = capture(model, batch, keep=keep, forward=forward, dynamic_sequence=True)
    except ValueError as error:
        raise ValueError(
            f"the graph of {kind} cannot take sequences of several lengths; leave out --pad_to_multiple_of ({error})"
        ) from error
    for widths in sorted({widths for each in lengths for widths in each.all_widths()}):
        broken = captured.refused_shapes(lengths[0].cut(batch, widths))
        if broken is not None:
            raise ValueError(
                f"the graph of {kind} is another for {' and '.join(map(str, widths))} tokens than for "
                f"{' and '.join(map(str, lengths[0].longest))} (it needs {broken[:100]}); give another "
                "--pad_to_multiple_of, or leave it out"
            )
    return captured


def first_line(error: Exception) -> str:
    """The first line of an error's text without its full stop, or the name of its class if it has no text."""
    first, *others = str(error).splitlines() or [type(error).__name__]
    return f"{first} {others[0].strip()}" if first.endswith(":") and others else first.rstrip(".")


@dataclass
class _Recipe:
    """A rule of transformers that makes the model's tensors `targets` from tensors of the files.

    Attributes:
        converter: transformers' converter; None if the tensor is taken unchanged.
        sources: pairs of a name in the files and its pattern in the converter.
    """

    targets: tuple[str, ...]
    converter: object | None
    sources: list[tuple[str, str]] = field(default_factory=list)


class Pretrained:
    """The tensors of a folder, converted to the tensors of `model`, which needs no memory for its parameters.

    Args:
        new_head: initialise a head that the files lack at random, and ignore the head of another task.
        other_sizes: also initialise at random the tensors of a head that have another shape in the files.

    Attributes:
        notes: a sentence for each kind of accepted exception, with the names of its tensors.
        new_names: the names of the tensors that begin at random.
        file_name: None, since each rank writes a file of its own.

    Raises ValueError if the folder has no tensors, lacks a tensor of the model, or has a tensor that the model does not
    use; the message names the tensor.
    """

    file_name = None

    def __init__(
        self, model: torch.nn.Module, folder: Path | str, *, new_head: bool, other_sizes: bool = False
    ) -> None:
        self._model, self.folder, self._new_head = model, Path(folder), new_head
        self._state = model.state_dict(keep_vars=True)
        base = getattr(model, "base_model_prefix", "")
        self._base = base if base and hasattr(model, base) else None
        self._aliases = _aliases(self._state)
        names = tensor_files(folder)
        unused = self._plan(sorted(names, key=_natural))
        self._check_sources(names.keys())
        resized = self._of_other_sizes(other_sizes) if new_head else set()
        tied = self._tied_copies()
        missing = {name for name in self._state if name not in self._recipes} - tied.keys()
        kept = SimpleNamespace(missing_keys=set(missing), unexpected_keys=set(unused))
        model._adjust_missing_and_unexpected_keys(kept)  # removes the names that transformers' own lists excuse
        found = {
            "tied, so only one copy is read": {f"{name} to {other}" for name, other in tied.items()},
            "not used, as transformers ignores them": unused - kept.unexpected_keys,
            "missing, so transformers initializes them": missing - kept.missing_keys,
            "not used: the task does not have their head": {
                name for name in unused if self._is_other_head(name, names)
            },
            _NEW: {name for name in missing if self._is_new_head(name)} - resized,
            "of another shape, so they are initialized at random": resized,
        }
        spared = set().union(*found.values())
        self.new_names = frozenset(found[_NEW] | resized)
        self._refuse(sorted(missing - spared), f"has no tensor for {{}} of {type(model).__name__}")
        self._refuse(sorted(unused - spared), f"has {{}}, of which {type(model).__name__} has no use")
        self.notes = [f"{folder}: {', '.join(sorted(names))}: {what}" for what, names in found.items() if names]

    def _plan(self, names: Iterable[str]) -> set[str]:
        """Find the recipe for each tensor of the files. Returns the names of the tensors that the model lacks."""
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, rename_source_key

        mapping = get_model_conversion_mapping(self._model)
        converters = [conversion for conversion in mapping if isinstance(conversion, WeightConverter)]
        renamings = [conversion for conversion in mapping if not isinstance(conversion, WeightConverter)]
        of_pattern = {pattern: conversion for conversion in converters for pattern in conversion.source_patterns}
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
            targets = tuple(target.replace(of[0], other) for other in of)
            recipe = self._recipes.get(target)
            if recipe is None:
                recipe = _Recipe(targets, converter)
                self._recipes.update(dict.fromkeys(targets, recipe))
            elif converter is None or recipe.converter is not converter:
                self._refuse([recipe.sources[0][0]], f"has {{}} and {name}, which both make {target}")
            recipe.sources.append((name, pattern or name))
        # `save_pretrained` reverts only these conversions; `from_pretrained` records the same.
        self._model._weight_conversions = [conversion for conversion in mapping if conversion.was_used()]
        return unused

    def _check_sources(self, names: Collection[str]) -> None:
        """Check the sources of each converted tensor, since the converters do not.

        Raises ValueError for a missing or superfluous source, such as a wrong expert in place of a missing one.
        """
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

    def _of_other_sizes(self, allowed: bool) -> set[str]:
        """The tensors of the head that the files have in another shape, such as for other classes; their recipes are
        dropped. Raises ValueError if there are any and `allowed` is false."""
        of_head = {name: each.sources[0][0] for name, each in self._recipes.items()
                   if each.converter is None and self._head_of(name)}  # fmt: skip
        with FolderTensors(self.folder) as files:
            found = {name for name, source in of_head.items() if files.shape_of(source) != self._state[name].shape}
        if found and not allowed:
            first = min(found, key=_natural)
            raise ValueError(
                f"{self.folder} has a head for a different number of classes or outputs than the data ({first} has "
                "another shape); give --ignore_mismatched_sizes to begin with a new head, or data that fits the head"
            )
        for name in found:
            del self._recipes[name]
        return found

    def _tied_copies(self) -> dict[str, str]:
        """Name of a tied tensor that is not read -> name of the tensor that is read in its place."""
        there = {name: [alias for alias in self._aliases[name] if alias in self._recipes] for name in self._state}
        return {name: aliases[0] for name, aliases in there.items() if aliases and aliases[0] != name}

    def _head_of(self, name: str) -> str | None:
        """The module of the head to which a tensor belongs, or None; the inner model's pooler is part of the head."""
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
        is_whole = self._base is not None and any(module.startswith(f"{self._base}.") for module in names)
        full = name if is_whole or self._base is None else f"{self._base}.{name}"
        head = self._head_of(full)
        if head is None:
            return False
        modules = {module for module, _ in self._model.named_modules()}
        return name.rpartition(".")[0] not in modules or (self._new_head and not self._has_some(head))

    def _has_some(self, module: str) -> bool:
        return any(name == module or name.startswith(f"{module}.") for name in self._recipes)

    def _refuse(self, names: list[str], what: str) -> None:
        if names:
            more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
            raise ValueError(
                f"{self.folder} {what.format(names[0] + more)}; give a folder of this model's weights, or load it "
                "with from_pretrained and save it, if you want the weights that this makes"
            )

    def read(self, files: FolderTensors, wanted: Mapping[str, Wanted]) -> Iterator[tuple[str, Tensor]]:
        """Read the wanted tensors and yield them with their names, in the form that `load_stage` takes.

        Raises ValueError if a tensor has another shape, or tied copies have different values.
        """
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
                        "set tie_word_embeddings to false in config.json"
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
            self._refuse([recipe.sources[0][0]], f"has {{}}, from which {first} cannot be made ({error})")
        for name, each in wanted.items():
            if name not in made or made[name].shape != each.shape:
                shape = tuple(made[name].shape) if name in made else None
                what = f"makes {name} of {{}} in shape {shape}, and the model has {tuple(each.shape)}"
                self._refuse([source for source, _ in recipe.sources], what)
        return made

    def names_of(self, name: str) -> tuple[str, ...]:
        """All names of one of the model's tensors."""
        return self._aliases[name]

    @property
    def own_names(self) -> tuple[str, ...]:
        """A name of each of the model's tensors, in the model's order."""
        return tuple(name for name in self._state if self._aliases[name][0] == name)

    def num_bytes(self, names: Iterable[str]) -> int:
        """The bytes of some of the model's tensors, in the model's dtype."""
        return sum(self._state[name].nbytes for name in names)

    def tensors(self, names: Iterable[str], dtype: torch.dtype | None) -> dict[str, Tensor]:
        """Some of the model's tensors, as far as the folder has them. `dtype`: None: the dtype in the files."""
        wanted = {name: Wanted(self._aliases[name], self._state[name].shape, dtype) for name in names}
        with FolderTensors(self.folder) as files:
            return dict(self.read(files, wanted))

    def writes(self, name: str) -> bool:
        """Whether a tensor of the model is written: all are."""
        return True

    def unused(self, used: Collection[str]) -> dict[str, Tensor]:
        """The model's tensors whose names are not in `used`, read from the files in the files' dtype."""
        return self.tensors((name for name in self.own_names if used.isdisjoint(self._aliases[name])), None)

    def reverted(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The model's tensors with the names and in the form that `save_pretrained` writes.

        A tensor of a file that is made from several of the model's tensors needs all of these in `tensors`.
        """
        from transformers.core_model_loading import revert_weight_conversion

        left_out = set(getattr(self._model, "_keys_to_ignore_on_save", None) or ())
        of = getattr(self._model, "all_tied_weights_keys", {})
        named = {of.get(name, name): tensor for name, tensor in tensors.items() if name not in left_out}
        return {name: tensor.contiguous() for name, tensor in revert_weight_conversion(self._model, named).items()}

    def written_with(self, name: str) -> str:
        """The name of the group of tensors that `reverted` needs together; the tensor's own name if it has no group."""
        from transformers.core_model_loading import apply_converters

        found, pattern = apply_converters(name, self._reverse_converters)
        return name if pattern is None else found

    @cached_property
    def _reverse_converters(self) -> list:
        from transformers.core_model_loading import WeightConverter

        reverse = [conversion.reverse_transform() for conversion in self._model._weight_conversions[::-1]]
        return [conversion for conversion in reverse if isinstance(conversion, WeightConverter)]


def _aliases(state: Mapping[str, Tensor]) -> dict[str, tuple[str, ...]]:
    names: dict[int, list[str]] = {}
    for name, tensor in state.items():
        names.setdefault(id(tensor), []).append(name)
    return {name: tuple(each) for each in names.values() for name in each}


def _natural(name: str) -> list:
    """The sort key of transformers' order of names, which is numeric: expert 10 comes after expert 2."""
    from transformers.core_model_loading import dot_natural_key

    return dot_natural_key(name)
