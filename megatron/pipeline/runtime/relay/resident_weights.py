"""The weights of a few stages on the device: FETCH brings them, FREE takes them away.

Problem: parameters have to show the weights of their stage while it computes, and to take no memory otherwise. A use of
absent weights must not go unseen: a slot that is overwritten while a graph still refers to it gives wrong gradients
without any error.

Solution: an arena on the device. Every stage has a fixed place in it, such that any K stages in a row, in the order of
the rank, lie apart; for K = 2 the arena is filled from both ends, and is as large as the largest pair of neighbours. A
FETCH copies the host's flat weights to the stage's place and points ``param.data`` there. Between FREE and FETCH
``param.data`` is a single NaN, expanded to the shape of the parameter. Buffers of the modules stay on the device.

FREE takes effect at two moments. In the row it does so at once: later instructions of the row find NaN. In the lane it
does so when the computations before it are done; only then may another FETCH write to the place.

Replicas on a node that share a store would all read the same bytes of the host's memory, and GPUs on one host link wait
for one another. So each replica may fetch 1/d of a stage, and an all-gather in place brings the rest over the link
between the devices (L2L's eager parallelism; Pudipeddi et al., 2020, section 3).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from megatron.backend.streams import shut_down, streams_of
from megatron.pipeline.communicators import COMMUNICATOR_CTAS
from megatron.pipeline.program.lane_order import places
from megatron.pipeline.runtime.relay.host_store import HostStore
from megatron.pipeline.runtime.relay.node_replicas import NodeReplicas, meeting_of


class ResidentWeights:
    """The device's side of a `HostStore`.

    `modules`: stage -> its module; the parameters are those that the store was made of, in its order, and away from now
    on.
    `num_resident`: K, the most stages that are there at once. All calls come from the thread that computes, but for
    what `fetch` and `free` return, which the lane to the device calls.

    Attributes:
        num_fetched, num_bytes_fetched: how many fetches there were, and what they have copied from the host.
    """

    def __init__(
        self,
        modules: Mapping[int, torch.nn.Module],
        store: HostStore,
        *,
        num_resident: int,
        device: torch.device | str = "cpu",
    ) -> None:
        device = torch.device(device)
        self.num_fetched = self.num_bytes_fetched = 0
        self._store = store
        self._parameters = {
            stage: dict(zip(store.stages[stage].weights, module.parameters(), strict=True))
            for stage, module in modules.items()
        }
        self._resident: dict[int, int] = {}  # stage -> version, as far as the row has come
        self._num_resident = num_resident
        self._shows_host = False
        stages = [store.stages[stage] for stage in modules]
        dtypes = {dtype for stage in stages for dtype in stage.flat}
        self._nan = {dtype: torch.full((1,), torch.nan, dtype=dtype, device=device) for dtype in dtypes}
        self._arena: dict[torch.dtype, Tensor] = {}
        self._flat: dict[int, dict[torch.dtype, Tensor]] = {stage: {} for stage in modules}
        for dtype in dtypes:
            sizes = [stage.layout.num_elements.get(dtype, 0) for stage in stages]
            starts, length = places(sizes, num_resident)
            self._arena[dtype] = arena = torch.empty(length, dtype=dtype, device=device)
            for stage, start, size in zip(modules, starts, sizes, strict=True):
                if size:
                    self._flat[stage][dtype] = arena[start : start + size]
        self._views = {stage: store.stages[stage].layout.views(flat) for stage, flat in self._flat.items()}
        self._gather = _WeightGather(store.replicas, device=device) if store.gathers else None
        self._warm_up(device)
        for module in modules.values():
            for buffer in module.buffers():
                buffer.data = buffer.data.to(device)
        self._take_all_away()

    def _warm_up(self, device: torch.device) -> None:
        """Gather each stage's place once while nothing else runs: NCCL connects a group where it is first used, and
        again where a size takes another algorithm.
        """
        if self._gather is not None:
            for flats in self._flat.values():
                for flat in flats.values():
                    self._gather.gather(flat)
            streams = streams_of(device)
            streams.finish(streams.record())

    @property
    def num_bytes(self) -> int:
        """The bytes of the arena: what weights take on the device, whichever stages are there."""
        return sum(arena.nbytes for arena in self._arena.values())

    def of_stage(self, stage: int) -> StageWeights:
        """What a stage is built with in the place of weight versions."""
        return StageWeights(self, stage)

    def fetch(self, stage: int, version: int) -> Callable[[], None]:
        """`version` of the stage shall be on the device. Returns what copies it."""
        if self._shows_host:
            self._take_all_away()
        assert stage not in self._resident, f"stage {stage} is on the device already"
        assert len(self._resident) < self._num_resident, f"stages {list(self._resident)} fill the device"
        flat = self._flat[stage]
        self._require_room(stage)
        self._resident[stage] = version

        def copy() -> None:
            found = self._store.versions[stage]
            assert found == version, f"the host has version {found} of stage {stage}, and {version} is fetched"
            for dtype, host in self._store.stages[stage].flat.items():
                span = slice(None) if self._gather is None else self._gather.share(len(host))
                flat[dtype][span].copy_(host[span], non_blocking=True)
                self.num_bytes_fetched += host[span].nbytes
                if self._gather is not None:
                    self._gather.gather(flat[dtype])
            for name, parameter in self._parameters[stage].items():
                parameter.data = self._views[stage][name]
            self.num_fetched += 1

        return copy

    def free(self, stage: int) -> Callable[[], None]:
        """Nothing in the row uses the stage's weights from here on. Returns what the lane does: nothing, when the
        device has done what the row gave it.
        """
        del self._resident[stage]
        self._take_away(stage)
        return lambda: None

    def close(self) -> None:
        """End what fetches gather with. Collective over the replicas that do."""
        if self._gather is not None:
            self._gather.close()

    def load(self, stage: int, version: int) -> None:
        """A computation with `version` of the stage follows, whose FETCH is complete."""
        found = self._resident.get(stage)
        assert found == version, f"version {version} of stage {stage} is not on the device: " + (
            f"version {found} is" if found is not None else "no FETCH stands before it without a FREE behind"
        )

    def show_on_host(self) -> None:
        """Drained: show the newest weights in all parameters, those of the host itself, until the next FETCH."""
        assert not self._resident, f"stages {list(self._resident)} are on the device"
        for stage, parameters in self._parameters.items():
            weights = self._store.stages[stage].weights
            for name, parameter in parameters.items():
                parameter.data = weights[name]
        self._shows_host = True

    def _take_all_away(self) -> None:
        for stage in self._parameters:
            self._take_away(stage)
        self._shows_host = False

    def _take_away(self, stage: int) -> None:
        for parameter in self._parameters[stage].values():
            parameter.data = self._nan[parameter.dtype].expand(parameter.shape)

    def _require_room(self, stage: int) -> None:
        for dtype, flat in self._flat[stage].items():
            for other in self._resident:
                mine, theirs = flat, self._flat[other].get(dtype)
                if theirs is not None and _overlap(mine, theirs):
                    raise ValueError(
                        f"stages {other} and {stage} lie at one place of the device's memory, which is laid out for "
                        f"{self._num_resident} stages that follow one another on their rank; use an order that relays"
                    )


class StageWeights:
    """The interface of a stage to its weights, in the place of weight versions."""

    def __init__(self, weights: ResidentWeights, stage: int) -> None:
        self._weights = weights
        self._stage = stage

    def load(self, version: int) -> None:
        """A computation with this version follows."""
        self._weights.load(self._stage, version)


def _overlap(one: Tensor, other: Tensor) -> bool:
    first, second = sorted((each.data_ptr(), each.data_ptr() + each.nbytes) for each in (one, other))
    return first[1] > second[0]


# --- weights that replicas fetch in shares


class _WeightGather:
    """Gathers flat tensors over `replicas`, which are more than one, on the lane that fetches. Collective, `gather` and
    `close` too. Replicas run one program, so they come to their gathers in one order.
    """

    def __init__(self, replicas: NodeReplicas, *, device: torch.device) -> None:
        self._replicas = replicas.again()  # of this lane's own: updates and reductions join theirs meanwhile
        self._streams = streams_of(device)
        self._communicator = None
        if self._streams.runs_ahead:
            self._communicator = self._streams.communicator(
                meeting_of("fetch", replicas.ranks), replicas.index, replicas.size,
                max_ctas=COMMUNICATOR_CTAS["fetch"], timeout=2 * replicas.timeout,
            )  # fmt: skip

    def share(self, length: int) -> slice:
        """What this replica fetches of a flat tensor of so many elements, a multiple of the number of replicas."""
        part = length // self._replicas.size
        return slice(self._replicas.index * part, (self._replicas.index + 1) * part)

    def gather(self, flat: Tensor) -> None:
        """Complete `flat`, on the device, of which this replica has its share. On CUDA, when the current stream has.

        Raises:
            RuntimeError: a replica is gone, or has not come in time; says which.
        """
        whole = flat.view(torch.uint8)  # any dtype is bytes here
        own = whole[self.share(len(whole))]
        group = self._communicator or self._replicas.group
        self._replicas.together(lambda: group._allgather_base(whole, own).wait())

    def close(self) -> None:
        """End the communicator, when nothing is left for it."""
        if self._communicator is not None:
            shut_down(self._communicator)


class HostVersions:
    """The one version of weights on the host, with the interface of weight versions for evaluations and checkpoints."""

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
