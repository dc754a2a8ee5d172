"""The predicted weights of a run, in its checkpoints.

Where batches are computed at predicted weights, the next batch's are alive between two batches, beside the true ones,
which are the model's. They are an entry of their own, 'provisional_version', stored tensor by tensor like the model.
Replicas that predict from their own gradients have each its own. A checkpoint without them (of another policy) goes on
with the true weights in their place, and so does a run of another policy with a checkpoint that has them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from megatron.core import parallel_state
from megatron.pipeline.program.weight_policies import WeightPolicy
from megatron.pipeline.runtime.stages.megatron.older_versions import OlderVersions, version_state
from megatron.pipeline.runtime.update.predicted_versions import PredictedVersions

PREDICTED_VERSION = "provisional_version"
"""How the keys of all of them begin."""


class PredictedVersion(OlderVersions):
    """The predicted version of a drained run after `iteration` batches.

    Args:
        apart: whether each replica has its own.
    """

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
        """The entry to ask of a checkpoint; one that was saved with fewer replicas has the first one's.

        None for a run that starts anew: its first batch is computed at the weights themselves.
        """
        self._names_in_entries = self._find_names(model)
        if self._iteration == 0:
            return {}
        for replica in (self._replica, 0):
            if holds_prefix(_prefix(replica)):
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
        state = version_state(model, data, prefix=_prefix(replica))
        if replica == 0:  # the first one's, for all that read it
            return state
        return {
            entry: {name: _of_own_replica(sharded) for name, sharded in chunk_state.items()}
            for entry, chunk_state in state.items()
        }


def _prefix(replica: int) -> str:
    """What the keys of a replica's tensors begin with."""
    return f"{PREDICTED_VERSION}.{replica}."


def _of_own_replica(sharded):
    """The same tensor, which no other replica has, so this one writes it."""
    assert isinstance(sharded.replica_id, tuple), "megatron.core numbers replicas by (pipeline, tensor, data)"
    return replace(sharded, replica_id=(*sharded.replica_id[:-1], 0))
