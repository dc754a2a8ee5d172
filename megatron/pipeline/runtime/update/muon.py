"""One optimizer that steps matrices by Muon, along their orthogonalised momentum, and other parameters by AdamW.

Muon (Jordan et al., 2024, https://kellerjordan.github.io/posts/muon/) keeps one moment of a matrix W with gradient G:

    M = momentum M + (1 - momentum) G
    U = momentum M + (1 - momentum) G with Nesterov, else U = M
    W = (1 - lr decay) W - lr scale O(U)

O(U) replaces the singular values of U by values near 1. The Newton-Schulz iteration computes O(U): X = U / |U| with the
Frobenius norm, then several times X = a X + (b A + c A A) X with A = X X^T. The operations and their order are those of
torch.optim.Muon, so the same settings give the same bits.

The iteration needs a whole matrix. If each tensor rank has a part of the matrix, there are two modes. `blockwise`: each
rank orthogonalises its part alone. This is a different algorithm, and its result depends on the number of tensor ranks.
`duplicated`: the ranks gather the matrix, and each rank orthogonalises all of it. The rows or columns of a gathered
matrix may be in another order than in one process. O commutes with a permutation, so the result differs only by
rounding.

The weight of queries, keys and values is one parameter with the rows of three matrices. Each of the three is
orthogonalised alone, over all heads, unless `qkv_rows` is None.

Both rules are in one optimizer because megatron.core builds masters, groups, checkpoints and learning rates over one
optimizer. The option `muon` of a group selects the rule.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

COEFFICIENTS: dict[str, tuple[tuple[float, float, float], ...]] = {
    "simple": ((3.4445, -4.7750, 2.0315),),
    "quintic": (
        (4.0848, -6.8946, 2.9270), (3.9505, -6.3029, 2.6377), (3.7418, -5.5913, 2.3037), (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
    "polar_express": (
        (8.2051, -22.9019, 16.4607), (4.0664, -2.8612, 0.5184), (3.9096, -2.8234, 0.5250), (3.2856, -2.4153, 0.4853),
        (2.2779, -1.6198, 0.3985), (1.8726, -1.2307, 0.3585), (1.8564, -1.2132, 0.3568), (1.8750, -1.2500, 0.3750),
    ),
    "aol": (
        (4.0098, -7.0585, 2.4635), (3.4585, -5.5479, 2.5959), (2.7573, -3.2939, 1.4254), (2.7215, -3.0494, 1.3169),
    ),
}  # fmt: skip
"""Name -> (a, b, c) of successive iterations. After the last iteration they start again from the first, except that
polar_express repeats its last.

The names and values are those of NVIDIA's emerging_optimizers, which megatron.core uses. simple: Jordan et al., and
torch.optim.Muon. quintic: https://leloykun.github.io/ponder/muon-opt-coeffs. polar_express: arXiv 2505.16932. aol:
https://github.com/thib-s/flash-newton-schulz.
"""

SCALES: dict[str, Callable[[int, int], float]] = {
    "spectral": lambda rows, columns: math.sqrt(max(rows, columns)),
    "unit_rms_norm": lambda rows, columns: math.sqrt(rows / columns),
    "shape_scaling": lambda rows, columns: math.sqrt(max(1, rows / columns)),
}
"""Name -> function (rows, columns) -> factor of a step. shape_scaling is `original` in torch.optim.Muon, and spectral
with an extra factor of 0.2 is `match_rms_adamw`."""

WHOLE, ROWS, COLUMNS, QKV = "whole", "rows", "columns", "qkv"
"""Values of the option `muon` of a group: how its matrices are divided among tensor ranks. QKV: the weights of queries,
keys and values, divided by rows."""

_DIMENSION = {ROWS: 0, QKV: 0, COLUMNS: 1}
_SMALLEST_NORM = 1e-7  # torch.optim.Muon's


@dataclass(frozen=True)
class Orthogonalization:
    """The settings of the orthogonalisation.

    Attributes:
        coefficients: a key of `COEFFICIENTS`.
        num_steps: the number of iterations.
        in_bfloat16: iterate in bfloat16, else in FP32.
        scale: a key of `SCALES`.
        extra_scale: multiplies the factor from `SCALES`.
        qkv_rows: the numbers of rows of queries, of keys and of values in each query group; None: orthogonalise them as
            one matrix.
        group: the tensor ranks, which gather each divided matrix; None: each rank orthogonalises its part alone.
    """

    coefficients: str = "quintic"
    num_steps: int = 5
    in_bfloat16: bool = True
    scale: str = "spectral"
    extra_scale: float = 1.0
    qkv_rows: tuple[int, ...] | None = None
    group: dist.ProcessGroup | None = None

    def direction(self, update: Tensor, layout: str) -> tuple[Tensor, float]:
        """Orthogonalise the update of a matrix. Collective over `group`, if given and the matrix is divided.

        Args:
            update: this rank's part of the update, [rows, columns]; not changed.
            layout: `WHOLE`, `ROWS`, `COLUMNS` or `QKV`.

        Returns:
            This rank's part of the direction, in the dtype of the iteration, or in FP32 if QKV is split; and the factor
            by which a step multiplies the direction.
        """
        matrix = update.bfloat16() if self.in_bfloat16 else update.float()
        shares = 1 if self.group is None or layout == WHOLE else self.group.size()
        if shares > 1:
            matrix = self._gathered(matrix, _DIMENSION[layout])
        if layout == QKV and self.qkv_rows is not None:
            direction, factor = self._of_parts(matrix, self.qkv_rows), 1.0
        else:
            direction, factor = newton_schulz(matrix, self._coefficients()), self._factor(*matrix.shape)
        if shares > 1:
            direction = direction.chunk(shares, dim=_DIMENSION[layout])[self.group.rank()]
        return direction, factor

    def warm_up(self, sizes: Iterable[int], device: torch.device) -> None:
        """Gather once for each of these sizes in bytes, before a transfer is posted for which NCCL could wait."""
        for num_bytes in sizes if self.group is not None else ():
            self._gathered(torch.zeros(num_bytes // 4, 1, device=device), 0)

    def _gathered(self, part: Tensor, dimension: int) -> Tensor:
        parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(self.group.size())]
        dist.all_gather(parts, part.contiguous(), group=self.group)
        return torch.cat(parts, dim=dimension)

    def _of_parts(self, matrix: Tensor, rows: tuple[int, ...]) -> Tensor:
        """The matrix of queries, keys and values, each orthogonalised and scaled alone."""
        by_group = matrix.view(-1, sum(rows), matrix.shape[1])
        parts = []
        for each in by_group.split(rows, dim=1):
            one = each.reshape(-1, matrix.shape[1])
            direction = newton_schulz(one, self._coefficients()).float()
            parts.append((direction * self._factor(*one.shape)).view_as(each))
        return torch.cat(parts, dim=1).view_as(matrix)

    def _factor(self, rows: int, columns: int) -> float:
        return SCALES[self.scale](rows, columns) * self.extra_scale

    def _coefficients(self) -> Iterable[tuple[float, float, float]]:
        values = COEFFICIENTS[self.coefficients]
        after = itertools.repeat(values[-1]) if self.coefficients == "polar_express" else itertools.cycle(values)
        return itertools.islice(itertools.chain(values, after), self.num_steps)


def newton_schulz(matrix: Tensor, coefficients: Iterable[tuple[float, float, float]]) -> Tensor:
    """The matrix with its singular values replaced by values near 1, in the same dtype.

    A matrix with more rows than columns is transposed first, so that X X^T has the smaller size.
    """
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if is_tall else matrix
    x = x / x.norm().clamp(min=_SMALLEST_NORM)
    for a, b, c in coefficients:
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if is_tall else x


class Muon(torch.optim.AdamW):
    """Steps groups with the option `muon` by Muon, and the others by AdamW.

    The state of a parameter that Muon steps is `step` and `momentum_buffer`. Other parameters have AdamW's state.

    Args:
        params: as for any torch optimizer. The parameters of a group with the option `muon` have two dimensions.
        lr, betas, eps, weight_decay: as for AdamW; Muon uses `lr` and `weight_decay`, too.
        momentum, nesterov: Muon's. They are not options of groups, because a checkpoint would restore such options.
        orthogonalization: the settings of the orthogonalisation; None: the defaults.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        *,
        momentum: float = 0.95,
        nesterov: bool = False,
        orthogonalization: Orthogonalization | None = None,
    ) -> None:
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
        self.orthogonalization = orthogonalization or Orthogonalization()
        self.momentum, self.nesterov = momentum, nesterov
        self.defaults["muon"] = None
        for group in self.param_groups:
            group.setdefault("muon", None)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Step every parameter that has a gradient.

        `closure`, if given, computes the gradients first and returns the loss, which this method returns.
        """
        loss = _STEP_OF_ADAMW(self, closure)
        for group in self.param_groups:
            if group["muon"] is not None:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        self._step_matrix(parameter, group)
        return loss

    def _init_group(self, group: dict[str, Any], *lists: list[Tensor]) -> bool:
        """Hide the parameters of Muon's groups from AdamW's step."""
        return False if group["muon"] is not None else super()._init_group(group, *lists)

    def _step_matrix(self, parameter: Tensor, group: dict[str, Any]) -> None:
        self.make_state(parameter, group)
        state, gradient, lr = self.state[parameter], parameter.grad, group["lr"]
        state["step"] += 1
        mean = state["momentum_buffer"].lerp_(gradient, 1 - self.momentum)
        update = gradient.lerp(mean, self.momentum) if self.nesterov else mean
        direction, factor = self.orthogonalization.direction(update, group["muon"])
        parameter.mul_(1 - lr * group["weight_decay"])
        parameter.add_(direction, alpha=-lr * factor)

    def make_state(self, parameter: Tensor, group: dict[str, Any]) -> None:
        """Make the state of a parameter before its first step, if it has none."""
        state = self.state[parameter]
        names = ("exp_avg", "exp_avg_sq") if group["muon"] is None else ("momentum_buffer",)
        state.setdefault("step", torch.tensor(0.0))
        for name in names:
            if name not in state:
                state[name] = torch.zeros_like(parameter)


def _unwrapped(step: Callable) -> Callable:
    """A `step` without torch's wrapper that calls hooks, since the wrapper of `Muon.step` calls them already."""
    while hasattr(step, "__wrapped__"):
        step = step.__wrapped__
    return step


_STEP_OF_ADAMW = _unwrapped(torch.optim.AdamW.step)
