"""The needs of Muon: the matrices of a layer, the operations of their iterations, and the bytes of a step.

Muon keeps one moment of a matrix, where Adam keeps two. A step takes for each matrix of r x c elements, r <= c,
`num_steps` iterations of three products: r r c, r r r and r r c multiplications and as many additions.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from megatron.planner.memory.architecture import Architecture, ExpertDegrees

_PRODUCTS = 3  # of an iteration


@dataclass(frozen=True, kw_only=True)
class MuonSetting:
    """The settings of Muon's orthogonalisation.

    Attributes:
        num_steps: number of iterations.
        splits_qkv: queries, keys and values are matrices of their own.
        gathers: tensor ranks gather the matrices that are split over them; else each rank orthogonalises its part.
        element_bytes: bytes of an element in the iteration, 2 or 4.
    """

    num_steps: int = 5
    splits_qkv: bool = True
    gathers: bool = False
    element_bytes: int = 2

    def layer(self, shape: Architecture, tensor: int, degrees: ExpertDegrees | None, *, experts: bool) -> "MuonWork":
        """The work of one layer on one of `tensor` ranks; `experts`: the layer has experts."""
        work = MuonWork()
        for rows, columns in self._matrices(shape, 1 if self.gathers else tensor, degrees, experts=experts):
            small, large = sorted((rows, columns))
            work = MuonWork(
                operations=work.operations + self.num_steps * (4 * small**2 * large + 2 * small**3),
                calls=work.calls + _PRODUCTS * self.num_steps,
                longest=max(work.longest, self.num_steps * (4 * small**2 * large + 2 * small**3)),
                gathered=work.gathered + (rows * columns * self.element_bytes if self.gathers else 0),
                held=max(work.held, self._held(rows, columns)),
            )
        return work

    def _matrices(
        self, shape: Architecture, tensor: int, degrees: ExpertDegrees | None, *, experts: bool
    ) -> Iterator[tuple[int, int]]:
        """Rows and columns of each matrix that an iteration works on."""
        h = shape.hidden_size
        if self.splits_qkv and shape.latents is None:
            for width in (shape.query_width, shape.key_width, shape.key_width):
                yield width // tensor, h
        else:
            yield from ((rows // tensor, columns) for rows, columns in shape.attention_matrices[:-1])
        yield h, shape.result_width // tensor
        if not experts:
            yield from self._mlp(shape, shape.ffn_hidden_size, tensor)
            return
        own = degrees or ExpertDegrees(tensor=tensor)
        if shape.experts.shared_ffn_hidden_size:
            yield from self._mlp(shape, shape.experts.shared_ffn_hidden_size, tensor)
        for _ in range(shape.experts.count // own.parallel):
            yield from self._mlp(shape, shape.experts.ffn_hidden_size, own.tensor)

    @staticmethod
    def _mlp(shape: Architecture, width: int, tensor: int) -> Iterator[tuple[int, int]]:
        yield width * (2 if shape.gated else 1) // tensor, shape.hidden_size
        yield shape.hidden_size, width // tensor

    def _held(self, rows: int, columns: int) -> int:
        """Bytes that a step of a matrix holds.

        That is the mean of Nesterov in FP32; the cast matrix, the normalised one and its successor; three products of
        the smaller size; and if tensor ranks gather, their parts and the whole.
        """
        casts = self.element_bytes < 4
        copies = 2 + casts + 2 * self.gathers
        return 4 * rows * columns + self.element_bytes * (copies * rows * columns + 3 * min(rows, columns) ** 2)

    def bytes_of_step(self, shape: Architecture, tensor: int, degrees: ExpertDegrees | None = None) -> float:
        """The most bytes that a step holds beside parameters, gradients and moments.

        Queries, keys and values that are matrices of their own need more: while the last of the three is stepped, the
        FP32 directions of all three are held twice, apart and joined.
        """
        kinds = {False, shape.experts is not None}
        held = max(self.layer(shape, tensor, degrees, experts=each).held for each in kinds)
        if self.splits_qkv and shape.latents is None:
            whole = (shape.query_width + 2 * shape.key_width) // (1 if self.gathers else tensor)
            kept = self._held(whole, shape.hidden_size) - self.element_bytes * 3 * min(whole, shape.hidden_size) ** 2
            held = max(held, kept + 2 * 4 * whole * shape.hidden_size)
        return float(held)


@dataclass(frozen=True)
class MuonWork:
    """The work of a step on the matrices of one layer.

    Attributes:
        operations: floating-point operations of products.
        longest: operations on the matrix that needs most.
        calls: number of products.
        gathered: bytes of the whole matrices that tensor ranks gather.
        held: the most bytes that a step of one matrix holds.
    """

    operations: float = 0.0
    longest: float = 0.0
    calls: int = 0
    gathered: float = 0.0
    held: int = 0
