"""The weights of a few stages on the device: FETCH copies them there, and FREE removes them.

Problem: while a stage computes, its parameters must show its weights, and otherwise they must take no memory. A use of
weights that are not there must be detected: if a slot is overwritten while a graph refers to it, the gradients are
wrong without an error.

Solution: an arena on the device, in which every stage has a fixed place. Any K successive stages of the rank have
places that do not overlap. For K = 2 the arena is filled from both ends and is as large as the largest pair of
neighbours. A FETCH copies the flat weights of the stage from the host to its place and points ``param.data`` there.
Between FREE and FETCH ``param.data`` is a single NaN, expanded to the shape of the parameter. The buffers of modules
stay on the device.

FREE takes effect twice. In the row it takes effect at once: later instructions of the row see NaN. In the lane it takes
effect when the computations before it are done, and only then may another FETCH write to the place.

Replicas on a node that share a store would all read the same bytes of host memory, and GPUs behind the same host link
would wait for each other. So each of d replicas may fetch 1/d of a stage, and an all-gather in place completes it over
the links between the devices (L2L's eager parallelism; Pudipeddi et al., 2020, section 3).
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
    """The weights of a `HostStore` on the device.

    All calls come from the main thread, except that the lane to the device calls the functions that `fetch` and `free`
    return. After construction the parameters show NaN. The constructor is collective over replicas that gather.

    Args:
        modules: stage -> module, in the order of the rank; their parameters are those of `store`, in the same order.
        store: the weights on the host.
        num_resident: K, the largest number of stages on the device at once.
        device: the device of the weights.

    Attributes:
        parameters: stage -> name in `store` -> parameter.
        num_fetched, num_bytes_fetched: the number of fetches, and the bytes that they have copied from the host.
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
        self.parameters = {
            stage: dict(zip(store.stages[stage].names, module.parameters(), strict=True))
            for stage, module in modules.items()
        }
        self._resident: dict[int, int] = {}  # stage -> version, at the present place in the row
        self._num_resident = num_resident
        self._shows_host = False
        stages = [store.stages[stage] for stage in modules]
        dtypes = {dtype for stage in stages for dtype in stage.device_layout.num_elements}
        self._nan = {dtype: torch.full((1,), torch.nan, dtype=dtype, device=device) for dtype in dtypes}
        self._arena: dict[torch.dtype, Tensor] = {}
        self._flat: dict[int, dict[torch.dtype, Tensor]] = {stage: {} for stage in modules}
        for dtype in dtypes:
            sizes = [stage.device_layout.num_elements.get(dtype, 0) for stage in stages]
            starts, length = places(sizes, num_resident)
            self._arena[dtype] = arena = torch.empty(length, dtype=dtype, device=device)
            for stage, start, size in zip(modules, starts, sizes, strict=True):
                if size:
                    self._flat[stage][dtype] = arena[start : start + size]
        self._views = {stage: store.stages[stage].device_layout.views(flat) for stage, flat in self._flat.items()}
        most: dict[torch.dtype, int] = {}
        for stage in stages:
            for dtype, count in stage.packed.layout.num_elements.items():
                most[dtype] = max(most.get(dtype, 0), count)
        self._arriving = {dtype: torch.empty(count, dtype=dtype, device=device) for dtype, count in most.items()}
        self._gather = _WeightGather(store.replicas, device=device) if store.gathers else None
        self._warm_up(device)
        for module in modules.values():
            for buffer in module.buffers():
                buffer.data = buffer.data.to(device)
        self._take_all_away()

    def _warm_up(self, device: torch.device) -> None:
        """Gather into the place of each stage once while nothing else runs.

        NCCL connects a group at its first use, and again if a size needs another algorithm.
        """
        if self._gather is not None:
            for flats in self._flat.values():
                for flat in flats.values():
                    self._gather.gather(flat)
            streams = streams_of(device)
            streams.finish(streams.record())

    @property
    def num_bytes(self) -> int:
        """The bytes of the arena, and of packed weights that arrive, whichever stages are on the device."""
        return sum(each.nbytes for each in (*self._arena.values(), *self._arriving.values()))

    def of_stage(self, stage: int) -> StageWeights:
        """The weights of a stage. The stage is built with this object in place of `WeightVersions`."""
        return StageWeights(self, stage)

    def fetch(self, stage: int, version: int) -> Callable[[], None]:
        """Mark `version` of a stage as on the device. Return the function that copies it there, for the lane.

        Raises:
            ValueError: the place of a stage that is on the device overlaps with the place of this stage.
        """
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
                span = slice(len(host)) if self._gather is None else self._gather.share(len(host))
                flat[dtype][span].copy_(host[span], non_blocking=True)
                self.num_bytes_fetched += host[span].nbytes
                if self._gather is not None:
                    self._gather.gather(flat[dtype])
            packed = self._store.stages[stage].packed
            for dtype, host in packed.flat.items():
                self._arriving[dtype][: len(host)].copy_(host, non_blocking=True)
                self.num_bytes_fetched += host.nbytes
            if packed.flat:
                packed.unpack(self._arriving, self._views[stage])
            for name, parameter in self.parameters[stage].items():
                parameter.data = self._views[stage][name]
            self.num_fetched += 1

        return copy

    def free(self, stage: int) -> Callable[[], None]:
        """Make the parameters of a stage show NaN. Return a function for the lane, which does nothing.

        The lane calls the function when the device has done the earlier work of the row, and later fetches of the lane
        wait for this call.
        """
        del self._resident[stage]
        self._take_away(stage)
        return lambda: None

    def close(self) -> None:
        """End the communicator of the gathers. Collective over the replicas that gather."""
        if self._gather is not None:
            self._gather.close()

    def load(self, stage: int, version: int) -> None:
        """Assert that `version` of a stage is on the device, before a computation with it."""
        found = self._resident.get(stage)
        assert found == version, f"version {version} of stage {stage} is not on the device: " + (
            f"version {found} is" if found is not None else "no FETCH stands before it, or a FREE is between"
        )

    def show_on_host(self) -> None:
        """Point all parameters at the weights on the host until the next FETCH. Called while drained."""
        assert not self._resident, f"stages {list(self._resident)} are on the device"
        for stage, parameters in self.parameters.items():
            place = self._store.stages[stage]
            for name, parameter in parameters.items():
                if name in place.packed:
                    parameter.data = self._nan[parameter.dtype].expand(parameter.shape)
                else:
                    parameter.data = place.weights[name]
        self._shows_host = True

    def _take_all_away(self) -> None:
        for stage in self.parameters:
            self._take_away(stage)
        self._shows_host = False

    def _take_away(self, stage: int) -> None:
        for parameter in self.parameters[stage].values():
            parameter.data = self._nan[parameter.dtype].expand(parameter.shape)

    def _require_room(self, stage: int) -> None:
        for dtype, flat in self._flat[stage].items():
            for other in self._resident:
                mine, theirs = flat, self._flat[other].get(dtype)
                if theirs is not None and _overlap(mine, theirs):
                    raise ValueError(
                        f"stages {other} and {stage} would share device memory, which is laid out for "
                        f"{self._num_resident} consecutive stages of a rank; use an order that relays"
                    )


class StageWeights:
    """The weights of one stage, with the method of `WeightVersions` that stages call."""

    def __init__(self, weights: ResidentWeights, stage: int) -> None:
        self._weights = weights
        self._stage = stage

    def load(self, version: int) -> None:
        """Assert that `version` is on the device."""
        self._weights.load(self._stage, version)


def _overlap(one: Tensor, other: Tensor) -> bool:
    first, second = sorted((each.data_ptr(), each.data_ptr() + each.nbytes) for each in (one, other))
    return first[1] > second[0]


# --- weights that replicas fetch in shares


class _WeightGather:
    """Gathers flat tensors over `replicas`, which are at least two, on the lane that fetches.

    The constructor, `gather` and `close` are collective. Replicas run the same program, so they gather in the same
    order.
    """

    def __init__(self, replicas: NodeReplicas, *, device: torch.device) -> None:
        self._replicas = replicas.again()  # a connection for this lane: updates and reductions run at the same time
        self._streams = streams_of(device)
        self._communicator = None
        if self._streams.runs_ahead:
            self._communicator = self._streams.communicator(
                meeting_of("fetch", replicas.ranks), replicas.index, replicas.size,
                max_ctas=COMMUNICATOR_CTAS["fetch"], timeout=2 * replicas.timeout,
            )  # fmt: skip

    def share(self, length: int) -> slice:
        """This replica's slice of a flat tensor whose `length` is a multiple of the number of replicas."""
        part = length // self._replicas.size
        return slice(self._replicas.index * part, (self._replicas.index + 1) * part)

    def gather(self, flat: Tensor) -> None:
        """Gather the shares of all replicas into `flat`, which has this replica's share.

        On CUDA `flat` is complete when the current stream has done the gather.

        Raises:
            RuntimeError: a replica has ended or has not joined in time. The message has its rank.
        """
        whole = flat.view(torch.uint8)  # bytes, for any dtype
        own = whole[self.share(len(whole))]
        group = self._communicator or self._replicas.group
        self._replicas.together(lambda: group._allgather_base(whole, own).wait())

    def close(self) -> None:
        """End the communicator after all its work."""
        if self._communicator is not None:
            shut_down(self._communicator)


class HostVersions:
    """The weights on the host, with the methods of `WeightVersions` that evaluations and checkpoints use."""

    def __init__(self, store: HostStore, weights: ResidentWeights) -> None:
        self._store = store
        self._weights = weights

    @property
    def newest(self) -> int:
        """The version, which is the same for all stages while drained."""
        (version,) = set(self._store.versions.values())
        return version

    def show_newest(self) -> None:
        """Point the parameters at the weights on the host until the next FETCH."""
        self._weights.show_on_host()

    def newest_tensors(self) -> dict[str, Tensor]:
        """Name -> weight on the host, not copied."""
        return self._store.newest_tensors()

    def live(self) -> list[int]:
        """The only version."""
        return [self.newest]

    def tensors(self, version: int) -> dict[str, Tensor]:
        """Name -> the tensor that the optimizer steps, not copied: the FP32 master if there is one, else the weight."""
        assert version == self.newest, f"the host has version {self.newest}, and not {version}"
        return {name: self._store.parameters[name] for stage in self._store.stages.values() for name in stage.gradients}

    @torch.no_grad()
    def restore(self, mapping: Mapping[int, Mapping[str, Tensor]]) -> None:
        """Restore the only version of a checkpoint, in the form that `tensors` returns.

        Each of the replicas that share the store writes only its share of the weights that have masters. So all of
        them have to return before any of them fetches a stage.
        """
        [(version, tensors)] = mapping.items()
        for name, tensor in self.tensors(self.newest).items():
            tensor.copy_(tensors[name])
        for stage in self._store.stages:
            self._store.write_weights(stage)
        self.reset(version)

    def reset(self, version: int) -> None:
        """Declare that the weights on the host, which were written from a checkpoint, are this version."""
        self._store.versions = dict.fromkeys(self._store.versions, version)
