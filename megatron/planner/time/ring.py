"""How long a collective takes that goes round all its members: gathering shards, summing and scattering them.

Each of n members sends n - 1 parts of the buffer to the next one. So the time is that of (n - 1)/n of the buffer at the
slowest link, and n - 1 steps, each of which waits for the one before it: with thousands of members the steps take
longer than the bytes. What a step takes is what NCCL itself counts with when it chooses among its protocols
(src/graph/tuning.cc, `hwLatencies` of rings, and its sum over steps within nodes and between them).
"""

from dataclasses import dataclass

_MICRO = 1e-6


@dataclass(frozen=True, kw_only=True)
class _Protocol:
    """`bandwidth`: part of a link's. Microseconds of a collective, and of a step over NVLink, PCIe and the network."""

    bandwidth: float
    once: float
    nvlink: float
    pcie: float
    network: float


_PROTOCOLS = (
    _Protocol(bandwidth=1.0, once=8.4, nvlink=3.4, pcie=5.7, network=14.0),  # simple
    _Protocol(bandwidth=0.92, once=14.0, nvlink=1.9, pcie=2.5, network=4.0),  # LL128
)


@dataclass(frozen=True, kw_only=True)
class Ring:
    """Members of a collective.

    Attributes:
        size: n.
        num_nodes: on which they lie.
        rate: bytes per second from one to the next, as reached.
        has_nvlink: within a node; else they reach each other over PCIe.
    """

    size: int
    num_nodes: int
    rate: float
    has_nvlink: bool = True

    def seconds(self, num_bytes: float, *, collectives: int = 1) -> float:
        """To gather a buffer of so many bytes, whole, or to sum and scatter it; in so many collectives."""
        if self.size == 1 or not num_bytes:
            return 0.0
        parts = (self.size - 1) / self.size * num_bytes
        return min(parts / (self.rate * each.bandwidth) + collectives * self._steps(each) for each in _PROTOCOLS)

    def _steps(self, protocol: _Protocol) -> float:
        between = self.num_nodes - 1
        within = self.size - 1 - between
        step = protocol.nvlink if self.has_nvlink else protocol.pcie
        return _MICRO * (protocol.once + within * step + between * protocol.network)
