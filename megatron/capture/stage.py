"""One stage of a cut model: a module with its own parameters, and tensors that come in and go out by name."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, replace

import sympy
import torch
from torch import Tensor, fx

from megatron.capture.randomness import Draw


@dataclass(frozen=True, slots=True)
class EdgeTensor:
    """A tensor that goes from one stage to another.

    `name`: of the operator that makes it, or of the parameter in the model. `dtype`: of it and of its gradient.
    `shape`: dimensions that the batch decides are None. `sizes`: the same with what they are made of. `has_gradient`:
    one comes back. `owner`: of a shared parameter, which changes with the version of the weights only, the stage that
    steps it; None of what each microbatch makes anew.
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
        """The tensor's shape for a batch whose `sizes_of` are given."""
        return tuple(size if isinstance(size, int) else int(size.subs(sizes)) for size in self.sizes)


@dataclass(frozen=True, slots=True)
class StageData:
    """What a stage takes of a microbatch beside what other stages send: the batch's tensors by name, of which it reads
    those that it needs, and who draws its random numbers (None where nothing is random). `weight`: of the microbatch's
    mean loss in the mean over its batch's microbatches; they are 1 on average.
    """

    tensors: Mapping[str, Tensor]
    draw: Draw | None = None
    weight: float = 1.0


class CapturedStage(torch.nn.Module):
    """Stage `index` of a cut model. It owns its parameters, under the names that the model has for them.

    Args:
        graph: what it computes. Its inputs are `DRAW` if `draws`, then `inputs`, then those of `sources`; it returns
            the tensors of `targets`, the loss if `has_loss`, then `results`, one after another.
        values: name -> what the graph reads: parameters, constants (buffers here), parts of the graph.
        inputs: names of the batch's tensors that it reads.
        sources: stage -> what it sends here.
        targets: stage -> what goes there.
        has_loss: it makes the loss.
        results: names of what it makes that was to be kept.
        names: of each parameter here, every name in the model.
        persistent: names of the constants that checkpoints have, too.
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
        """The tensors for each of `targets`, and the scalar loss or None; see `run`."""
        outputs, loss, _ = self.run(data, inputs)
        return outputs, loss

    def run(
        self, data: StageData, inputs: Mapping[int, tuple[Tensor, ...]]
    ) -> tuple[dict[int, tuple[Tensor, ...]], Tensor | None, dict[str, Tensor]]:
        """Compute one microbatch.

        `inputs`: stage -> its tensors, in the order of `sources`. Returns the tensors for each of `targets`, contiguous
        and part of the autograd graph, the scalar loss or None, and name -> what was to be kept.
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
    """Set the value of a name with dots in `root`."""
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
