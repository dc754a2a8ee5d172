"""Both weight versions of 2bw in Megatron-LM's checkpoints.

Between two batches two versions are alive, and the next batch uses the older one, or the predicted one. Megatron-LM's
state of a checkpoint gets two entries more, in this project's own format (`older_versions`, `predicted_version`): that
version, tensor by tensor like the model, and 'pipeline', what the update keeps beside the optimizer. So a resumed run
goes on exactly, here and under this project's own programs; and Megatron-LM, which asks for neither, loads the
checkpoint as any other.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from megatron.core import dist_checkpointing
from megatron.core.utils import unwrap_model
from megatron.pipeline.dropin.sentences import say
from megatron.pipeline.runtime.stages.megatron.older_versions import OLDER_VERSIONS, OlderVersions
from megatron.pipeline.runtime.stages.megatron.predicted_version import PREDICTED_VERSION, PredictedVersion
from megatron.pipeline.runtime.stages.megatron.update import MegatronWeightUpdate

PIPELINE = "pipeline"
_VERSIONS = (OLDER_VERSIONS, PREDICTED_VERSION)


@dataclass
class _Found:
    """What is known of the checkpoint that is being loaded. `common`: what it has beside tensors. `loaded`: our
    tensors, for which `versions` asked."""

    folder: str = ""
    common: dict[str, Any] = field(default_factory=dict)
    loaded: dict[str, Any] = field(default_factory=dict)
    versions: OlderVersions | None = None


class VersionsInCheckpoints:
    """Those of one rank.

    Args:
        chunks: as Megatron-LM wraps them.
        update: which holds the versions.
        name: what the run calls its schedule.
    """

    def __init__(self, chunks: Sequence[torch.nn.Module], update: MegatronWeightUpdate, *, name: str) -> None:
        self._chunks = [unwrap_model(chunk) for chunk in chunks]
        self._update = update
        self._name = name
        self._found = _Found()

    # Saving.

    def add_to(self, state: dict[str, Any], *, num_batches: int) -> None:
        """Add the entries to the state that Megatron-LM saves. Drained, after so many batches of the whole run."""
        state[PIPELINE] = {"update": self._update.state_dict()}
        older = self._older(num_batches)
        state.update(older.to_save(self._models(state)))

    # Loading: the common state, then the tensors, then what follows from both.

    def note_common(self, folder: str, state: dict[str, Any] | None) -> None:
        """What the checkpoint in `folder` has beside its tensors, as Megatron-LM reads it first."""
        self._found = _Found(str(folder), dict(state or {}))

    def ask_for(self, state: dict[str, Any], *, starts_anew: bool) -> None:
        """Add the versions that the checkpoint has to the state that Megatron-LM asks of it.

        `starts_anew`: weights are taken alone, and batches are counted from 0.
        """
        keys = dist_checkpointing.load_tensors_metadata(self._found.folder)
        self._found.versions = self._older(0 if starts_anew else int(self._found.common.get("iteration", 0)))
        entries = self._found.versions.to_load(
            self._models(state), lambda prefix: any(key.startswith(prefix) for key in keys)
        )
        state.update(entries)

    def note_loaded(self, state: dict[str, Any]) -> None:
        """Take our entries out of what was loaded."""
        self._found.loaded = {key: state.pop(key) for key in list(state) if key.startswith(_VERSIONS)}
        if PIPELINE in state:
            self._found.common[PIPELINE] = state.pop(PIPELINE)

    def complete(self, iteration: int, *, takes_state: bool) -> None:
        """Megatron-LM has loaded weights, of so many batches: the older version and the rest follow.

        Args:
            iteration: 0 also where it found no checkpoint, or took its weights alone.
            takes_state: it has loaded the optimizer, too.
        """
        found, self._found = self._found, _Found()
        older = found.versions.counted_from(iteration) if found.versions else self._older(iteration)
        older.restore(found.loaded if iteration else {})
        state = found.common.get(PIPELINE) or {}
        self._update.load_state_dict(state.get("update") if takes_state else None)
        saved = found.common.get("args")
        saved_under = getattr(saved, "pipeline_program", None) or getattr(saved, "pipeline_schedule", None)
        is_due = self._update.weights.predicts or saved_under != self._name  # a skipped step leaves one version, too
        if iteration and not found.loaded and is_due:
            other = "the predicted one" if self._update.weights.predicts else "the one before"
            say(
                f"warning: the checkpoint of iteration {iteration} was saved under "
                f"{saved_under or 'a schedule of Megatron-LM'} and has one weight version: iteration {iteration + 1} "
                f"computes with it, and not with {other} as in a run that had used {self._update.weights.name} "
                "all along"
            )

    def _older(self, num_batches: int) -> OlderVersions:
        if self._update.weights.predicts:
            return PredictedVersion(
                self._chunks, self._update.versions, self._update.weights, num_batches,
                apart=self._update.replicas_predict_apart,
            )  # fmt: skip
        return OlderVersions(self._chunks, self._update.versions, self._update.weights, num_batches)

    def _models(self, state: dict[str, Any]) -> dict[str, Any]:
        """The chunks' entries of a state."""
        names = ["model"] if len(self._chunks) == 1 else [f"model{index}" for index in range(len(self._chunks))]
        return {name: state[name] for name in names}
