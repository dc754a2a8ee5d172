"""How long a batch of the relay takes by closed forms, the one of docs/schedules.md and the paper's.

All of one rank with equal stages of which two are resident. Seconds throughout, with the page's letters: N stages,
u microbatches, C of a microbatch's forward (a backward takes 2C, a recompute C), and of a stage X to fetch its weights,
G to store its gradients, R to reduce them, U to update it.
"""

from dataclasses import dataclass

from megatron.pipeline.program.lane_order import EAGER


@dataclass(frozen=True, kw_only=True)
class Relay:
    """One rank's relay. `update`: eager or deferred."""

    N: int
    u: int
    update: str
    C: float
    X: float = 0.0
    G: float = 0.0
    R: float = 0.0
    U: float = 0.0

    @property
    def computation(self) -> float:
        """Forwards, recomputes and backwards; the last stage recomputes nothing."""
        return (self.N - 1) * 4 * self.u * self.C + 3 * self.u * self.C

    @property
    def batch(self) -> float:
        """Seconds of a batch in a run of many, as of a batch alone: nothing passes a border but deferred updates,
        which hold up the next batch's forwards; eager ones pass beside the backwards.

        Exact where `is_exact`, otherwise an upper bound. Where fetches alone are long, they pass one after
        another, but for the two stages that stay where the relay turns.
        """
        N, u, C, X, G, R, U = self.N, self.u, self.C, self.X, self.G, self.R, self.U
        up = max(u * C, X, 0.0 if self.update == EAGER else U)
        if self._fetches_are_longest:
            return X + (N - 1) * up + 6 * u * C + (N - 2) * X + R + G + U
        down = max(self._lanes, X, (3 * u * C + R + G) / 2)
        return X + (N - 1) * up + max(3 * u * C, X) + (N - 1) * down + R + G + U

    @property
    def is_exact(self) -> bool:
        """Two gradient buffers are enough, and fetches alone are long or fit beside backwards."""
        if self._fetches_are_longest:
            return True
        return 3 * self.u * self.C >= self.X and self._lanes >= (3 * self.u * self.C + self.R + self.G) / 2

    @property
    def _lanes(self) -> float:
        """The longest that passes on the way down, fetches aside."""
        return max(3 * self.u * self.C, self.G, self.R, self.U if self.update == EAGER else 0.0)

    @property
    def _fetches_are_longest(self) -> bool:
        """And all the rest fits beside backwards."""
        backwards = 3 * self.u * self.C
        return self.X > backwards >= max(self._lanes, self.R + self.G)

    @property
    def paper(self) -> float:
        """Equation 4, N(4uC + 2X): transfers and computation one after the other, updates hidden."""
        return self.N * (4 * self.u * self.C + 2 * self.X)
