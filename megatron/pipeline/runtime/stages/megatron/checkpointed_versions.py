"""The older and the predicted weight versions of a run, in its checkpoints.

Where batches use weights that are k batches old, k versions beside the newest are alive between two batches, and the
next batches still use them. Each is an entry of its own, named by its age: 'previous_version' is one batch older than
the model, 'previous_version_2' two, and so on. A version that a checkpoint lacks equals the one after it: its step was
skipped, or the checkpoint comes from a policy that needs fewer versions.

Where batches are computed at predicted weights, those of the next batch are alive between two batches, beside the true
weights, which are the model's. They are an entry of their own, 'provisional_version', stored tensor by tensor like the
model. Replicas that predict from their own gradients have one entry each. A run that finds no such entry (a checkpoint
of another policy) starts from the true weights, and a run of another policy ignores the entry.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import replace
from typing import Protocol

import torch

from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedStateDict, ShardedTensor, ShardedTensorFactory
from megatron.pipeline.program.weight_policies import WeightPolicy
from megatron.pipeline.runtime.update.weight_prediction import PredictedVersions

OLDER_VERSIONS = "previous_version"  # prefix of all their keys


class SavedVersions(Protocol):
    """The interface of the pipeline's weight versions (see megatron.pipeline.runtime.update.versions)."""

    newest: int

    def show_newest(self) -> None: ...

    def newest_tensors(self) -> dict[str, torch.Tensor]: ...

    def slot_of(self, version: int) -> int: ...

    def reset(self, *versions: int) -> None: ...

    def live(self) -> list[int]: ...

    def tensors(self, version: int) -> dict[str, torch.Tensor]: ...

    def restore(self, mapping: dict[int, dict[str, torch.Tensor]]) -> None: ...


_Model = dict[str, ShardedStateDict]


def version_state(
    model: dict[str, ShardedStateDict], tensors: dict[int, torch.Tensor], *, prefix: str
) -> dict[str, ShardedStateDict]:
    """The model's checkpoint entries with the data of another weight version.

    Args:
        model: name of an entry -> sharded state of a chunk, whose data are the parameters themselves.
        tensors: id of a parameter -> its data in that version, of the parameter's shape.
        prefix: precedes every key.
    """
    result: dict[str, ShardedStateDict] = {}
    for entry, chunk_state in model.items():
        result[entry] = {
            name: replace(
                sharded,
                key=prefix + sharded.key,
                data=tensors[id(sharded.data)].detach().view(sharded.data.shape),
            )
            for name, sharded in chunk_state.items()
            if isinstance(sharded, (ShardedTensor, ShardedTensorFactory)) and id(sharded.data) in tensors
        }
    return result


class SavedUpdate(Protocol):
    """What is asked of the pipeline's weight update beyond its optimizer."""

    versions: SavedVersions
    weights: WeightPolicy
    replicas_predict_apart: bool

    def state_dict(self) -> dict: ...

    def load_state_dict(self, state: dict | None) -> None: ...


def older_versions(chunks: Sequence[torch.nn.Module], update: SavedUpdate, iteration: int) -> OlderVersions:
    """What a run that is drained after `iteration` batches needs besides the newest weights of `chunks`."""
    found = chunks, update.versions, update.weights, iteration
    if update.weights.predicts:
        return PredictedVersion(*found, apart=update.replicas_predict_apart)
    return OlderVersions(*found)


class OlderVersions:
    """The versions besides the newest that a drained run needs to continue after `iteration` batches, by its policy.

    Args:
        chunks: this rank's model chunks, which show the newest version.

    Attributes:
        name: what a run that continues computes with besides the newest.
        is_always_kept: a checkpoint has it even where no step made a version.
    """

    name = "the one before"
    is_always_kept = False

    def __init__(
        self, chunks: Sequence[torch.nn.Module], versions: SavedVersions, weights: WeightPolicy, iteration: int
    ) -> None:
        self._versions = versions
        self._weights = weights
        self._entry = weights.entry_versions(iteration)
        self._parameters = [parameter for chunk in chunks for parameter in chunk.parameters()]
        self._names = self._names_of_parameters() if self.is_always_kept or len(self._entry) > 1 else {}
        self._names_in_entries: dict[tuple[str, str], str] = {}

    def to_save(self, model: _Model) -> dict[str, _Model]:
        """The entries that a checkpoint of the newest version, `model`, needs besides."""
        entries = {}
        for age, version in self._by_age():
            if self._versions.slot_of(version) != self._versions.slot_of(version + 1):
                tensors = self._versions.tensors(version)
                data = {parameter: tensors[name] for parameter, name in self._names.items()}
                entries[_entry(age)] = version_state(model, data, prefix=_prefix(age))
        return entries

    def to_load(self, model: _Model, holds_prefix: Callable[[str], bool]) -> dict[str, _Model]:
        """The entries to ask of a checkpoint, before `model` is filled. `holds_prefix`: whether it has such keys."""
        self._names_in_entries = self._find_names(model)
        entries = {}
        for age, _ in self._by_age():
            if holds_prefix(_prefix(age)):
                empty = {id(each): torch.empty_like(each.data) for each in self._parameters if id(each) in self._names}
                entries[_entry(age)] = version_state(model, empty, prefix=_prefix(age))
        return entries

    def counted_from(self, iteration: int) -> OlderVersions:
        """These versions for a run that counts this many batches before it."""
        other = copy(self)
        other._entry = self._weights.entry_versions(iteration)
        return other

    def restore(self, loaded: dict) -> None:
        """The weights shown become the newest version; `loaded` has the older ones, as `to_load` named them."""
        if not any(_entry(age) in loaded for age, _ in self._by_age()):
            self._versions.reset(*self._entry)
            return
        names = self._names_in_entries
        newest = tensors = self._versions.tensors(self._versions.newest)
        restored = {self._entry[-1]: newest}
        for age, version in self._by_age():
            if _entry(age) in loaded:
                tensors = dict(newest)
                for part, chunk_state in loaded[_entry(age)].items():
                    tensors.update({names[part, name]: tensor for name, tensor in chunk_state.items()})
            restored[version] = tensors
        self._versions.restore(restored)

    def _by_age(self) -> Iterator[tuple[int, int]]:
        """(age, version) of each, the youngest first."""
        return enumerate(reversed(self._entry[:-1]), start=1)

    def _names_of_parameters(self) -> dict[int, str]:
        """id of a parameter -> its name in the version table."""
        names = {tensor.data_ptr(): name for name, tensor in self._versions.newest_tensors().items()}
        return {
            id(parameter): names[parameter.data_ptr()]
            for parameter in self._parameters
            if parameter.data_ptr() in names and parameter.numel()
        }

    def _find_names(self, model: _Model) -> dict[tuple[str, str], str]:
        """(entry, name in the chunk's state) -> name in the version table."""
        return {
            (entry, name): self._names[id(sharded.data)]
            for entry, chunk_state in model.items()
            for name, sharded in chunk_state.items()
            if id(sharded.data) in self._names
        }


def _entry(age: int) -> str:
    return OLDER_VERSIONS if age == 1 else f"{OLDER_VERSIONS}_{age}"


def _prefix(age: int) -> str:
    """The prefix of the keys of an entry's tensors."""
    return f"{_entry(age)}."


PREDICTED_VERSION = "provisional_version"
"""Prefix of the keys of all predictions."""


class PredictedVersion(OlderVersions):
    """The predicted version of a drained run after `iteration` batches.

    Args:
        apart: whether each replica has a prediction of its own.
    """

    name = "the predicted one"
    is_always_kept = True

    def __init__(
        self,
        chunks: Sequence[torch.nn.Module],
        versions: PredictedVersions,
        weights: WeightPolicy,
        iteration: int,
        *,
        apart: bool,
    ) -> None:
        super().__init__(chunks, versions, weights, iteration)
        self._iteration = iteration
        self._replica = parallel_state.get_data_parallel_rank() if apart else 0

    def to_save(self, model: dict) -> dict:
        """The entry that a checkpoint of the true weights, `model`, needs besides."""
        if self._versions.live() == [0]:
            return {}  # before the first batch they are the true ones
        tensors = self._versions.tensors(self._iteration)
        data = {parameter: tensors[name] for parameter, name in self._names.items()}
        return {PREDICTED_VERSION: self._state(model, data, self._replica)}

    def to_load(self, model: dict, holds_prefix: Callable[[str], bool]) -> dict:
        """The entry to ask of a checkpoint; if that has fewer replicas, the entry of its first one.

        Empty for a new run: its first batch is computed at the true weights.
        """
        self._names_in_entries = self._find_names(model)
        if self._iteration == 0:
            return {}
        for replica in (self._replica, 0):
            if holds_prefix(_predicted_prefix(replica)):
                empty = {id(each): torch.empty_like(each.data) for each in self._parameters if id(each) in self._names}
                return {PREDICTED_VERSION: self._state(model, empty, replica)}
        return {}

    def counted_from(self, iteration: int) -> PredictedVersion:
        other = super().counted_from(iteration)
        other._iteration = iteration
        return other

    def restore(self, loaded: dict) -> None:
        """The weights shown become the true ones; `loaded` has the prediction, as `to_load` named it."""
        predicted = None
        if PREDICTED_VERSION in loaded:
            predicted = self._versions.newest_tensors()
            for part, chunk_state in loaded[PREDICTED_VERSION].items():
                predicted.update({self._names_in_entries[part, name]: tensor for name, tensor in chunk_state.items()})
        self._versions.restart(self._iteration, predicted)

    def _state(self, model: dict, data: dict[int, torch.Tensor], replica: int) -> dict:
        state = version_state(model, data, prefix=_predicted_prefix(replica))
        if replica == 0:  # the first replica writes it for all that read it
            return state
        return {
            entry: {name: _of_own_replica(sharded) for name, sharded in chunk_state.items()}
            for entry, chunk_state in state.items()
        }


def _predicted_prefix(replica: int) -> str:
    """The prefix of the keys of a replica's tensors."""
    return f"{PREDICTED_VERSION}.{replica}."


def _of_own_replica(sharded):
    """The tensor, marked as held by this replica alone, so that this replica writes it."""
    assert isinstance(sharded.replica_id, tuple), "megatron.core numbers replicas by (pipeline, tensor, data)"
    return replace(sharded, replica_id=(*sharded.replica_id[:-1], 0))
