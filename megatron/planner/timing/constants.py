"""The constants that are fitted: what part of the data sheet's numbers a program gets."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Constants:
    """Of one kind of processor and software.

    Attributes:
        product_efficiency: of the peak arithmetic, in large matrix products.
        product_overhead: seconds that a matrix product takes beside them, as it fills and empties the processor.
        memory_efficiency: of the memory's bandwidth, in kernels that read and write tensors.
        tensor_efficiency: of the link to the GPUs of the node, in collectives of tensor ranks.
        network_efficiency: of the network between nodes.
        launch: seconds in which the host launches one kernel; device and host work at the same time.
    """

    product_efficiency: float = 0.75
    product_overhead: float = 10e-6
    memory_efficiency: float = 0.8
    tensor_efficiency: float = 0.75
    network_efficiency: float = 0.8
    launch: float = 10e-6
    contention: float = 0.2


DEFAULT = Constants()
