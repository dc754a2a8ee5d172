"""Robust nonlinear least squares, for a handful of parameters and a few hundred residuals.

Levenberg's and Marquardt's method on the soft-L1 loss, rho(z) = 2 (sqrt(1 + z) - 1) of z = (residual / scale)^2: a
residual far beyond `scale` counts by its size and no longer by its square, so that a few runs which something else held
up do not bend the constants (Triggs et al. 2000, section 4.3). Derivatives are differences.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

_STEP = 1e-5
_MOST_STEPS = 60


class Fit(NamedTuple):
    """`converged`: no further step would lower the loss noticeably."""

    parameters: np.ndarray
    residuals: np.ndarray
    converged: bool


def robust_least_squares(
    residuals: Callable[[np.ndarray], np.ndarray], start: np.ndarray, *, scale: float, tolerance: float = 1e-9
) -> Fit:
    """The parameters, from `start` on, that make the loss of `residuals(parameters)` least.

    Args:
        residuals: of parameters of order 1 (logarithms, for instance).
        scale: a residual of usual size.
        tolerance: the relative improvement of the loss below which the search ends.
    """
    parameters = np.asarray(start, dtype=float)
    found = np.asarray(residuals(parameters))
    loss, damping = _loss(found, scale), 1e-3
    for _ in range(_MOST_STEPS):
        jacobian = _jacobian(residuals, parameters, found)
        weights = 1 / np.sqrt(1 + (found / scale) ** 2)
        gradient = jacobian.T @ (weights * found)
        curvature = jacobian.T @ (weights[:, None] * jacobian)
        while True:
            damped = curvature + damping * np.diag(np.maximum(np.diag(curvature), 1e-12))
            candidate = parameters - np.linalg.solve(damped, gradient)
            values = np.asarray(residuals(candidate))
            candidate_loss = _loss(values, scale)
            if np.isfinite(candidate_loss) and candidate_loss <= loss:
                break
            damping *= 10
            if damping > 1e12:
                return Fit(parameters, found, True)
        gain = loss - candidate_loss
        parameters, found, loss, damping = candidate, values, candidate_loss, damping / 10
        if gain <= tolerance * loss:
            return Fit(parameters, found, True)
    return Fit(parameters, found, False)


def _loss(residuals: np.ndarray, scale: float) -> float:
    return float(np.sum(np.sqrt(1 + (residuals / scale) ** 2) - 1))


def _jacobian(residuals: Callable[[np.ndarray], np.ndarray], parameters: np.ndarray, found: np.ndarray) -> np.ndarray:
    columns = []
    for index in range(len(parameters)):
        moved = parameters.copy()
        moved[index] += _STEP
        columns.append((np.asarray(residuals(moved)) - found) / _STEP)
    return np.stack(columns, axis=1)
