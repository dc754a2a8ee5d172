"""Older and predicted weight versions in checkpoints.

Problem: a run that continues from a checkpoint needs more weights than the newest. If batches use weights that are k
batches old, the next batches use k older versions. If batches are computed at predicted weights, the next batch uses a
prediction that differs from the true weights.

Solution: further entries in the checkpoint, stored tensor by tensor like the model.

Each older version is an entry with its age in its name: 'previous_version' is one batch older than the model,
'previous_version_2' two batches, and so on. If a checkpoint lacks a version, it equals the next newer version. Either
the step between them was skipped, or the checkpoint was written under a policy that needs fewer versions.

The prediction for the next batch is the entry 'provisional_version', while the model is the true weights. Replicas that
predict from their own gradients have one entry each. For experts that replicas share out, each copy of an expert has
one. If a checkpoint lacks the entry (another policy), the run starts from the true weights. Runs under other policies
ignore the entry.

If predictions take the last update again, a drained run already knows the prediction for the batch after the next. This
is the entry 'upcoming_version'. Without the entry, this prediction equals the true weights.
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
from megatron.pipeline.runtime.stages.megatron.optimizers import is_dense
from megatron.pipeline.runtime.update.weight_prediction import PredictedVersions

OLDER_VERSIONS = "previous_version"  # prefix of the keys of all older versions


class SavedVersions(Protocol):
    """The methods of the weight versions that checkpoints use (see megatron.pipeline.runtime.update.versions)."""

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
    """The checkpoint entries of the model with the data of another weight version.

    Args:
        model: name of an entry -> sharded state of a chunk, whose data are the parameters themselves.
        tensors: id of a parameter -> its data in the other version, of the parameter's shape. State without data in
            `tensors` is left out.
        prefix: put before every key.
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
    """The members of a weight update that checkpoints use, besides the optimizer."""

    versions: SavedVersions
    weights: WeightPolicy
    replicas_predict_apart: bool

    def show_newest(self) -> None: ...

    def restore_routers(self, state: dict | None) -> None: ...

    def state_dict(self) -> dict: ...

    def load_state_dict(self, state: dict | None) -> None: ...


def older_versions(chunks: Sequence[torch.nn.Module], update: SavedUpdate, iteration: int) -> OlderVersions:
    """The versions that a run drained after `iteration` batches needs besides the newest weights of `chunks`."""
    found = chunks, update.versions, update.weights, iteration
    if update.weights.predicts:
        return PredictedVersion(*found, apart=update.replicas_predict_apart)
    return OlderVersions(*found)


class OlderVersions:
    """The versions besides the newest that a run drained after `iteration` batches needs to continue.

    Args:
        chunks: this rank's model chunks, which show the newest version.
        versions: the weight versions of the rank.
        weights: the weight policy; it says how many versions are needed.
        iteration: the number of batches that are done.

    Attributes:
        name: the version in words, for messages.
        is_always_kept: a checkpoint under the policy has the entry even if the last step was skipped.
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
        """The entries that a checkpoint needs besides `model`, the entries of the newest version."""
        entries = {}
        for age, version in self._by_age():
            if self._versions.slot_of(version) != self._versions.slot_of(version + 1):
                tensors = self._versions.tensors(version)
                data = {parameter: tensors[name] for parameter, name in self._names.items()}
                entries[_entry(age)] = version_state(model, data, prefix=_prefix(age))
        return entries

    def to_load(self, model: _Model, holds_prefix: Callable[[str], bool]) -> dict[str, _Model]:
        """The entries to load from a checkpoint besides `model`. To be called before `model` is loaded.

        `holds_prefix` tells whether the checkpoint has keys with a prefix.
        """
        self._names_in_entries = self._find_names(model)
        entries = {}
        for age, _ in self._by_age():
            if holds_prefix(_prefix(age)):
                empty = {id(each): torch.empty_like(each.data) for each in self._parameters if id(each) in self._names}
                entries[_entry(age)] = version_state(model, empty, prefix=_prefix(age))
        return entries

    def counted_from(self, iteration: int) -> OlderVersions:
        """The same versions for a run that continues after `iteration` batches."""
        other = copy(self)
        other._entry = self._weights.entry_versions(iteration)
        return other

    def restore(self, loaded: dict) -> None:
        """Restore the weight versions: the newest from the weights that the parameters show, older ones from `loaded`.

        `loaded` holds the entries of `to_load`, read from the checkpoint.
        """
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
        """(age, number) of each older version, the newest of them first."""
        return enumerate(reversed(self._entry[:-1]), start=1)

    def _names_of_parameters(self) -> dict[int, str]:
        """id of a parameter -> its name in the weight versions."""
        names = {tensor.data_ptr(): name for name, tensor in self._versions.newest_tensors().items()}
        return {
            id(parameter): names[parameter.data_ptr()]
            for parameter in self._parameters
            if parameter.data_ptr() in names and parameter.numel()
        }

    def _find_names(self, model: _Model) -> dict[tuple[str, str], str]:
        """(entry, name in the chunk's state) -> name in the weight versions."""
        return {
            (entry, name): self._names[id(sharded.data)]
            for entry, chunk_state in model.items()
            for name, sharded in chunk_state.items()
            if id(sharded.data) in self._names
        }


def _entry(age: int) -> str:
    return OLDER_VERSIONS if age == 1 else f"{OLDER_VERSIONS}_{age}"


def _prefix(age: int) -> str:
    """The prefix of the keys of the version of this age."""
    return f"{_entry(age)}."


PREDICTED_VERSION = "provisional_version"
"""The name of the entry of a prediction, and the prefix of the keys of all predictions."""

UPCOMING_VERSION = "upcoming_version"
"""The name of the entry of the prediction after `PREDICTED_VERSION`, and the prefix of its keys."""


class PredictedVersion(OlderVersions):
    """The predicted weights of a run drained after `iteration` batches.

    Args:
        chunks, versions, weights, iteration: as for `OlderVersions`.
        apart: each replica has its own prediction.
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
        own, of_experts = 0, 0
        if apart:
            own = parallel_state.get_data_parallel_rank(with_context_parallel=True)
            of_experts = parallel_state.get_expert_data_parallel_rank()
        self._replica_of = {id(each): own if is_dense(each) else of_experts for each in self._parameters}

    def to_save(self, model: dict) -> dict:
        """The entries that a checkpoint needs besides `model`, the entries of the true weights."""
        if self._versions.live() == [0]:
            return {}  # before the first batch the prediction equals the true weights
        entries = {}
        for entry, tensors in ((PREDICTED_VERSION, self._versions.tensors(self._iteration)), self._upcoming()):
            if tensors is not None:
                data = {parameter: tensors[name] for parameter, name in self._names.items()}
                entries[entry] = _predicted_state(model, data, entry, self._replica_of)
        return entries

    def _upcoming(self) -> tuple[str, dict[str, torch.Tensor] | None]:
        return UPCOMING_VERSION, self._versions.upcoming and self._versions.upcoming()

    def to_load(self, model: dict, holds_prefix: Callable[[str], bool]) -> dict:
        """The entries to load from a checkpoint besides `model`.

        Weights of this replica that the checkpoint lacks are loaded from the first replica. Empty for a new run, whose
        first batch is computed at the true weights.
        """
        self._names_in_entries = self._find_names(model)
        if self._iteration == 0:
            return {}
        keys = {
            id(sharded.data): sharded.key
            for chunk_state in model.values()
            for sharded in chunk_state.values()
            if id(sharded.data) in self._names
        }
        entries = {}
        for entry in (PREDICTED_VERSION, UPCOMING_VERSION) if self._versions.upcoming else (PREDICTED_VERSION,):
            found = {
                parameter: replica
                for parameter, key in keys.items()
                for replica in (0, self._replica_of[parameter])  # the later one is kept
                if holds_prefix(_prefix_of(entry, replica) + key)
            }
            if found:
                empty = {id(each): torch.empty_like(each.data) for each in self._parameters if id(each) in found}
                entries[entry] = _predicted_state(model, empty, entry, found)
        return entries

    def counted_from(self, iteration: int) -> PredictedVersion:
        other = super().counted_from(iteration)
        other._iteration = iteration
        return other

    def restore(self, loaded: dict) -> None:
        """Take the weights that the parameters show as the true weights, and the prediction from `loaded`.

        `loaded` holds the entry of `to_load`, read from the checkpoint.
        """
        self._versions.restart(
            self._iteration, self._loaded(loaded, PREDICTED_VERSION), upcoming=self._loaded(loaded, UPCOMING_VERSION)
        )

    def _loaded(self, loaded: dict, entry: str) -> dict[str, torch.Tensor] | None:
        """name -> tensor of an entry; parameters that the entry lacks have their true weights."""
        if entry not in loaded:
            return None
        tensors = self._versions.newest_tensors()
        for part, chunk_state in loaded[entry].items():
            tensors.update({self._names_in_entries[part, name]: tensor for name, tensor in chunk_state.items()})
        return tensors


def _predicted_state(model: _Model, data: dict[int, torch.Tensor], entry: str, replica_of: dict[int, int]) -> _Model:
    """The entries of a prediction. `replica_of`: id of a parameter -> the replica whose prediction it is."""
    result: _Model = {part: {} for part in model}
    for replica in sorted(set(replica_of.values())):
        own = {parameter: tensor for parameter, tensor in data.items() if replica_of[parameter] == replica}
        for part, state in version_state(model, own, prefix=_prefix_of(entry, replica)).items():
            if replica > 0:  # else the first replica writes, as for the model
                state = {name: of_own_replica(sharded) for name, sharded in state.items()}
            result[part] |= state
    return result


def _prefix_of(entry: str, replica: int) -> str:
    """The prefix of the keys of a replica's prediction."""
    return f"{entry}.{replica}."


def of_own_replica(sharded: object) -> object:
    """A copy of a sharded tensor that is marked as held by this replica alone, so that this replica writes it.

    Returns values of other types as they are.
    """
    if not isinstance(sharded, (ShardedTensor, ShardedTensorFactory)):
        return sharded
    assert isinstance(sharded.replica_id, tuple), "megatron.core numbers replicas by (pipeline, tensor, data)"
    return replace(sharded, replica_id=(*sharded.replica_id[:-1], 0))
