"""One stage of a cut model: a module with its own parameters, and named tensors that it receives and sends."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, replace

import sympy
import torch
from torch import Tensor, fx

from megatron.capture.randomness import Draw


@dataclass(frozen=True, slots=True)
class EdgeTensor:
    """A tensor that one stage sends to another.

    Attributes:
        name: the name of the operator that makes it, or of the parameter in the model.
        sizes: its dimensions, of which those that depend on the batch are expressions.
        dtype: the dtype of the tensor and of its gradient.
        has_gradient: whether a gradient is sent back.
        owner: for a shared parameter, which changes only with the version of the weights, the stage that steps it;
            None for a tensor that each microbatch makes.
        shape: its dimensions, of which those that depend on the batch are None.
    """

    name: str
    sizes: tuple[int | sympy.Expr, ...]
    dtype: torch.dtype
    has_gradient: bool
    owner: int | None = None

    @property
    def shape(self) -> tuple[int | None, ...]:
        return tuple(size if isinstance(size, int) else None for size in self.sizes)

    def shape_at(self, sizes: Mapping[sympy.Symbol, int]) -> tuple[int, ...]:
        """The tensor's shape for a batch. `sizes`: the result of `Captured.sizes_of` for that batch."""
        return tuple(size if isinstance(size, int) else int(size.subs(sizes)) for size in self.sizes)


@dataclass(frozen=True, slots=True)
class StageData:
    """The data of a microbatch that a stage does not receive from other stages.

    Attributes:
        tensors: the microbatch's tensors by name, of which the stage reads those that it needs.
        draw: the source of random numbers; None if nothing is random.
        weight: the weight of the microbatch's mean loss in the mean over its batch; weights are 1 on average.
    """

    tensors: Mapping[str, Tensor]
    draw: Draw | None = None
    weight: float = 1.0


class CapturedStage(torch.nn.Module):
    """Stage `index` of a cut model, with its parameters under the model's names for them.

    Args:
        graph: the stage's graph. Its inputs are `DRAW` if `draws`, then `inputs`, then the tensors of `sources`. It
            returns the tensors of `targets`, the loss if `has_loss`, then `results`, as one flat tuple.
        values: name -> a value that the graph reads: a parameter, a constant (a buffer of the stage), or a part of the
            graph.
        draws: whether the graph takes a `Draw`.
        inputs: names of the batch's tensors that the stage reads.
        sources: stage -> the tensors that it sends to this stage.
        targets: stage -> the tensors that this stage sends to it.
        has_loss: whether this stage makes the loss.
        results: names of the kept results that this stage makes.
        names: name of each of the stage's parameters -> all names of the parameter in the model.
        persistent: names of the constants that checkpoints contain.
    """

    def __init__(
        self,
        graph: fx.Graph,
        values: Mapping[str, object],
        *,
        index: int,
        draws: bool,
        inputs: tuple[str, ...],
        sources: dict[int, tuple[EdgeTensor, ...]],
        targets: dict[int, tuple[EdgeTensor, ...]],
        has_loss: bool,
        results: tuple[str, ...],
        names: dict[str, tuple[str, ...]],
        persistent: Set[str] = frozenset(),
    ) -> None:
        super().__init__()
        self.index = index
        self.inputs = inputs
        self.sources = sources
        self.targets = targets
        self.has_loss = has_loss
        self.results = results
        self.names = names
        self.graph = graph
        self._draws = draws
        for name, value in values.items():
            _place(self, name, value, persistent=name in persistent)
        code = graph.python_code("self")
        namespace = dict(code.globals)
        exec(compile(code.src, f"<stage {index}>", "exec"), namespace)
        self._compute = namespace["forward"]

    def forward(
        self, data: StageData, inputs: Mapping[int, tuple[Tensor, ...]]
    ) -> tuple[dict[int, tuple[Tensor, ...]], Tensor | None]:
        """Compute one microbatch. Returns the tensors for each of `targets`, and the scalar loss or None; see `run`."""
        outputs, loss, _ = self.run(data, inputs)
        return outputs, loss

    def run(
        self, data: StageData, inputs: Mapping[int, tuple[Tensor, ...]]
    ) -> tuple[dict[int, tuple[Tensor, ...]], Tensor | None, dict[str, Tensor]]:
        """Compute one microbatch.

        `inputs`: stage -> the tensors that it sent, in the order of `sources`. Returns the tensors for each of
        `targets`, contiguous and in the autograd graph; the scalar loss or None; and the kept results by name.
        """
        given: list[object] = []
        if self._draws:
            assert data.draw is not None, "a stage with dropout is told who draws"
            given.append(replace(data.draw, training=self.training))
        given += [data.tensors[name] for name in self.inputs]
        for source in self.sources:
            given += inputs[source]
        made = iter(self._compute(self, *given))
        outputs = {target: tuple(next(made) for _ in tensors) for target, tensors in self.targets.items()}
        loss = next(made) if self.has_loss else None
        return outputs, loss, {name: next(made) for name in self.results}


def _place(root: torch.nn.Module, name: str, value: object, *, persistent: bool) -> None:
    """Register a value under a dotted name in `root`."""
    *path, last = name.split(".")
    for part in path:
        if part not in root._modules:
            root.add_module(part, torch.nn.Module())
        root = root._modules[part]
    assert not hasattr(root, last), f"two values are called {name}"
    if isinstance(value, torch.nn.Parameter):
        root.register_parameter(last, value)
    elif isinstance(value, Tensor):
        root.register_buffer(last, value, persistent=persistent)
    else:
        root.add_module(last, value)
