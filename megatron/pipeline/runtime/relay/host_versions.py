"""The one version of weights that live on the host, to those who ask for versions: evaluations and checkpoints."""

from __future__ import annotations

from torch import Tensor

from megatron.pipeline.runtime.relay.host_store import HostStore
from megatron.pipeline.runtime.relay.resident_weights import ResidentWeights


class HostVersions:
    """What a drained run asks of its weight versions, over a `HostStore` and what is resident of it."""

    def __init__(self, store: HostStore, weights: ResidentWeights) -> None:
        self._store = store
        self._weights = weights

    @property
    def newest(self) -> int:
        """The version of all stages."""
        (version,) = set(self._store.versions.values())
        return version

    def show_newest(self) -> None:
        """Point the parameters at the host's weights, until the next FETCH."""
        self._weights.show_on_host()

    def newest_tensors(self) -> dict[str, Tensor]:
        """name -> weight: the host's own, not a copy."""
        return self._store.newest_tensors()

    def reset(self, version: int) -> None:
        """The host's weights, which were written meanwhile, are this version."""
        self._store.versions = dict.fromkeys(self._store.versions, version)
