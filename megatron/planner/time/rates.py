"""What a GPU and its links reach of their rates, and the seconds that work takes at them."""

from dataclasses import dataclass

from megatron.planner.job.devices import Device
from megatron.planner.job.software import Software
from megatron.planner.time.constants import Constants
from megatron.planner.time.links import Links
from megatron.planner.time.work import Work

_GIGA = 1e9
_FP32 = 4
_WIDENING = 0.5
"""Part of the FP32 peak that products of 16-bit numbers reach without units for matrices: each number is widened."""


@dataclass(frozen=True)
class Rates:
    """Of one device under one software. All are in bytes or operations a second."""

    device: Device
    software: Software
    constants: Constants

    def seconds(self, work: Work, links: Links) -> float:
        """Seconds of work, which either the device takes, or the host that issues its kernels."""
        constants = self.constants
        tensor = self.of_link(links.tensor, links, within=constants.tensor_efficiency)
        products = self._products(work.operations, work.calls) + work.attended / self._attention
        if work.fp8_operations:
            products += work.fp8_operations / (self.device.product_rate(1) * constants.product_efficiency)
        if work.unaligned:
            products += work.unaligned / (self.device.peak(_FP32) * _WIDENING)
        hidden = work.overlapped / tensor
        seconds = max(products + constants.contention * hidden, hidden)
        seconds += work.traffic / self.memory + work.exchanged / tensor + self._grouped(work)
        seconds += self._shared(work, links, seconds)
        if self.software.cuda_graphs:
            return seconds
        launches = (work.kernels + work.calls + work.collectives) * constants.launch
        return seconds + launches if self.software.blocks_launches else max(seconds, launches)

    @property
    def memory(self) -> float:
        """Of the memory's bandwidth."""
        return self.device.memory_bandwidth * _GIGA * self.constants.memory_efficiency

    @property
    def to_host(self) -> float:
        """Of the link to the host's memory."""
        return self.device.host_bandwidth * _GIGA * self.constants.link_efficiency

    @property
    def to_neighbours(self) -> float:
        """Of the links to the other GPUs of a node, by bulk transfers."""
        return self.device.link_bandwidth * _GIGA * self.constants.link_efficiency

    def of_link(self, rate: float, links: Links, *, within: float | None = None) -> float:
        """Of a link's rate; `within` a node by default what bulk transfers reach. What crosses nodes also takes the
        links in them.
        """
        reached = links.within * (within or self.constants.link_efficiency)
        return min(reached, rate * self.constants.network_efficiency) if rate < links.within else reached

    @property
    def _product(self) -> float:
        return self.device.product_rate(self.software.element_bytes) * self.constants.product_efficiency

    @property
    def _attention(self) -> float:
        """Of the products of flash attention, by kernels that were written for this GPU, or for the one before it."""
        device = self.device
        return self._product * (
            device.older_attention_part if self.software.flash_attention_2 else device.attention_part
        )

    def _products(self, operations: float, calls: float) -> float:
        return operations / self._product + calls * self.constants.product_overhead

    def _grouped(self, work: Work) -> float:
        """Products of experts: of few tokens each takes as long as its matrix is read."""
        if not work.grouped_operations:
            return 0.0
        element_bytes = 1 if self.software.fp8 else self.software.element_bytes
        rate = self.device.product_rate(element_bytes) * self.constants.product_efficiency
        return max(work.grouped_operations / rate, work.grouped_bytes / self.memory)

    def _shared(self, work: Work, links: Links, beside: float) -> float:
        """Seconds that ranks wait for which share sequences or experts. `beside`: of all else in this direction.

        A ring's step takes as long as its transfer or its part of the attention's core, which loses `contention` of the
        transfer's time; in the last step nothing is passed on. Copies of tokens are waited for, or go beside the other
        direction of another microbatch, of which each has as much to compute as both have on average.
        """
        if not (work.ring or work.gathered or work.dispatched or work.spread):
            return 0.0
        constants, context = self.constants, self.of_link(links.context, links)
        core = work.ring_operations / self._attention + work.ring_calls * constants.product_overhead
        ring = work.ring / context
        waits = max(constants.contention * ring, ring - core)
        spread = self.of_link(links.expert_tensor, links, within=constants.tensor_efficiency)
        copies = work.dispatched / self.of_link(links.expert, links) + work.spread / spread
        if self.software.overlaps_experts:
            copies = max(constants.contention * copies, copies - beside)
        return waits + work.gathered / context + copies
