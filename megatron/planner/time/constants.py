"""The constants of the time model: what a program gets of the data sheet's numbers."""

from dataclasses import dataclass, fields


@dataclass(frozen=True, kw_only=True)
class Constants:
    """The constants of one kind of processor. Some are fitted (`FITTED`), the others are stated here.

    Attributes:
        product_efficiency: part of the rate of the GPU's fastest matrix product that large ones reach.
        product_overhead: seconds of a matrix product beside them: filling and emptying the processor, waves of tiles
            that do not fill it, gaps between kernels. Small products are slower by it.
        memory_efficiency: part of the memory's bandwidth that kernels reach which read and write tensors.
        tensor_efficiency: part of the bandwidth to the GPUs of the node that collectives of tensor ranks reach.
        link_efficiency: the same of bulk transfers: between stages, of pairs, of gradients. BPipe's Tables 3 and 4 have
            181 to 266 of 300 GB/s.
        network_efficiency: of the bandwidth between nodes, for all.
        contention: how much of a collective's time the products lose that run at the same time: the collective takes a
            quarter of the processor.
        launch: seconds in which the host issues one kernel, Python included. Host and device work side by side, so the
            slower one decides; this matters for small layers only.
        pressed_efficiency: part of its speed that a rank keeps whose allocator gives blocks back and asks for them anew
            in every backward (planner/job/estimate.py).
    """

    product_efficiency: float
    product_overhead: float
    memory_efficiency: float
    tensor_efficiency: float
    link_efficiency: float = 0.75
    network_efficiency: float = 0.8
    contention: float = 0.25
    launch: float = 30e-6
    pressed_efficiency: float = 0.8

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not value >= 0 or (field.name.endswith("efficiency") and not 0 < value <= 1):
                raise ValueError(f"{field.name} is {value}; give a part of 1, or seconds of 0 and more")


FITTED = ("product_efficiency", "product_overhead", "memory_efficiency", "tensor_efficiency", "pressed_efficiency")
"""The names of the constants that `calibrate` fits."""

START = Constants(product_efficiency=0.92, product_overhead=10e-6, memory_efficiency=0.65, tensor_efficiency=0.6)
"""Where a fit begins, from what is commonly seen on GPUs."""
