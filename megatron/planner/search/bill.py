"""What a training takes on so many GPUs: days and money for a number of tokens, and money for a million of them.

Iterations follow one another without a pause: checkpoints, evaluations and restarts come on top.
"""

import math
from dataclasses import dataclass

_DAY, _HOUR, _MILLION = 86_400, 3_600, 1_000_000


@dataclass(frozen=True, kw_only=True)
class Bill:
    """What one configuration takes. None: without a budget of tokens, or without a price, it is not known.

    Attributes:
        gpu_hours_per_iteration: of all GPUs together, whether they compute or wait.
        num_iterations, days, gpu_hours, cost: of the whole training.
        cost_per_iteration, cost_per_million_tokens: of any.
        currency: of these.
    """

    gpu_hours_per_iteration: float
    num_iterations: int | None = None
    days: float | None = None
    gpu_hours: float | None = None
    cost: float | None = None
    cost_per_iteration: float | None = None
    cost_per_million_tokens: float | None = None
    currency: str | None = None


@dataclass(frozen=True, kw_only=True)
class Budget:
    """What bills are made from.

    Attributes:
        tokens: of the whole training.
        price_per_gpu_hour: in `currency`.
    """

    num_gpus: int
    sequence_length: int
    tokens: float | None = None
    price_per_gpu_hour: float | None = None
    currency: str = "USD"

    def bill(self, *, seconds: float, sequences: int) -> Bill:
        """Of iterations of so many seconds and sequences."""
        price, hours = self.price_per_gpu_hour, seconds * self.num_gpus / _HOUR
        tokens = sequences * self.sequence_length
        iterations = None if self.tokens is None else math.ceil(self.tokens / tokens)
        return Bill(
            gpu_hours_per_iteration=hours,
            num_iterations=iterations,
            days=None if iterations is None else iterations * seconds / _DAY,
            gpu_hours=None if iterations is None else iterations * hours,
            cost=None if iterations is None or price is None else iterations * hours * price,
            cost_per_iteration=None if price is None else hours * price,
            cost_per_million_tokens=None if price is None else hours * price * _MILLION / tokens,
            currency=None if price is None else self.currency,
        )


def amount(value: float) -> str:
    """Three digits of a small one, and whole units of a large one."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def money(value: float, currency: str) -> str:
    return f"{amount(value)} {currency}"
