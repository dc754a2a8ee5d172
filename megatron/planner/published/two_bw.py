"""PipeDream-2BW's planner in closed form, as the paper states it, for comparison and teaching.

Narayanan et al. 2021, "Memory-Efficient Pipeline-Parallel DNN Training", sections 4.2 and 4.3. Names are the paper's:

    w    width: replicas of the pipeline            b    sequences in a microbatch of one pipeline
    d    depth: stages of the pipeline              r    whether activations are recomputed
    N    workers                                    g    microbatches are accumulated d * g at a time
    M    memory of a worker, bytes                  B    maximum safe batch size, sequences

What it leaves out, `megatron.planner.search` counts: gradients and optimizer state, logits and embeddings, the bubble
of schedules that flush, tensor parallelism. Where the text leaves a choice, a docstring says which one is made here.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from megatron.placement.traffic import ring_bytes

RECOMPUTE_FACTOR = 4 / 3
"""c^extra of section 4.2.1: a backward takes twice as long as a forward, and the forward is run once more."""


@dataclass(frozen=True, kw_only=True)
class BlockProfile:
    """A model of equal blocks, from a profile of one of them (4.2.1, "Estimating T^comp" and "Estimating T^comm").

    Attributes:
        num_blocks: of the whole model.
        block_seconds: forward and backward of one block for a microbatch of so many sequences.
        weight_bytes: |W|, the parameters of all blocks.
        activation_bytes: |A^total(1)|, what all blocks save of one sequence.
        boundary_bytes: |A^inp.+out.(1)|, input and output of a block for one sequence.
    """

    num_blocks: int
    block_seconds: Callable[[int], float]
    weight_bytes: float
    activation_bytes: float
    boundary_bytes: float


@dataclass(frozen=True, kw_only=True)
class Servers:
    """Workers in servers. Bandwidths are bytes per second: within a server, and between servers."""

    num_workers: int
    workers_per_server: int
    memory_bytes: float
    bandwidth_high: float
    bandwidth_low: float

    def bandwidth(self, degree: int) -> float:
        """bwth_width(w) of section 4.2.1: the high one for w below the number of GPUs in a server, else the low one.

        The text prints it for the width; the depth's is taken alike.
        """
        return self.bandwidth_high if degree < self.workers_per_server else self.bandwidth_low


@dataclass(frozen=True, kw_only=True)
class TwoBWChoice:
    """What Algorithm 1 weighs: w, d, b and r, with THROUGHPUT in sequences per second and MEMORY in bytes."""

    width: int
    depth: int
    microbatch: int
    recompute: bool
    throughput: float
    memory_bytes: float


@dataclass(frozen=True, kw_only=True)
class TwoBWPlan:
    """What Algorithm 1 returns. `accumulation`: g, which may be a fraction as the paper's formula has it."""

    choice: TwoBWChoice
    accumulation: float


@dataclass(frozen=True, kw_only=True)
class PaperPlanner:
    """The cost functions of section 4.2 and the algorithm of section 4.3 for a model on servers."""

    model: BlockProfile
    servers: Servers

    # --- 4.2.1

    def compute_seconds(self, b: int, d: int) -> float:
        """T_i^comp(b, w, d): forward and backward of the B/d blocks of a stage."""
        return self.model.num_blocks / d * self.model.block_seconds(b)

    def transfer_seconds(self, b: int, d: int) -> float:
        """T_{i->j}^comm(b, w, d) = 2 |A^inp.+out.(b)| [d > 1] / bwth_depth(d); the 2 is for gradients."""
        return 2 * b * self.model.boundary_bytes * (d > 1) / self.servers.bandwidth(d)

    def reduction_seconds(self, w: int, d: int) -> float:
        """T_i^comm(b, w, d): the weight gradients of a stage, |W|/d, over its w replicas.

        The paper refers to a closed form for the bytes of an all-reduce; taken is a ring's, 2 (w-1)/w of the data.
        """
        return ring_bytes(self.model.weight_bytes / d, w) / self.servers.bandwidth(w)

    def microbatch_seconds(self, w: int, d: int, b: int, *, recompute: bool) -> float:
        """t, in which a pipeline processes a microbatch (second and third expression for t):

            t = max_i max(c^extra T_i^comp, sum_j T_{j->i}^comm, T_i^comm)

        All stages are alike. j is the stage before i, since the way back is counted by the factor 2 of a transfer.
        """
        compute = self.compute_seconds(b, d) * (RECOMPUTE_FACTOR if recompute else 1.0)
        return max(compute, self.transfer_seconds(b, d), self.reduction_seconds(w, d))

    def microbatch_seconds_without_pipelining(self, w: int, d: int, b: int) -> float:
        """t where the stages of a microbatch run one after another, and do not overlap (first expression):

            t = sum_i max(T_i^comp + sum_j T_{j->i}^comm, T_i^comm)

        The first stage has none before it.
        """
        compute, transfer = self.compute_seconds(b, d), self.transfer_seconds(b, d)
        reduction = self.reduction_seconds(w, d)
        return max(compute, reduction) + (d - 1) * max(compute + transfer, reduction)

    def throughput(self, w: int, d: int, b: int, *, recompute: bool) -> float:
        """THROUGHPUT(w, d, b, r), sequences per second: b / t of each of the w pipelines, which work side by side."""
        return w * b / self.microbatch_seconds(w, d, b, recompute=recompute)

    # --- 4.2.2

    def memory_bytes(self, d: int, b: int, *, recompute: bool) -> float:
        """MEMORY(w, d, b, r): 2|W|/d + d|A^total(b)|/d, and with recomputation 2|W|/d + |A^total(b)|/d."""
        activations = b * self.model.activation_bytes
        return 2 * self.model.weight_bytes / d + (1 if recompute else d) * activations / d

    # --- 4.3

    def search(self, w: int, d: int, *, safe_batch: int, microbatches: Sequence[int]) -> TwoBWChoice:
        """SEARCH(w, d, B): the b and r with the highest throughput among those that fit.

        A batch is at least one round of the pipeline, b w d sequences (section 5.2 with g = 1), and may not exceed B.
        Where nothing fits, the choice that needs least memory is returned, which Algorithm 1 then drops. Of equals the
        one without recomputation and with the smaller microbatch is taken.
        """
        safe = [b for b in sorted(microbatches) if b * w * d <= safe_batch]
        every = [self._choice(w, d, b, recompute=r) for r in (False, True) for b in safe or [min(microbatches)]]
        fitting = [each for each in every if each.memory_bytes <= self.servers.memory_bytes]
        if not fitting or not safe:
            return min(every, key=lambda choice: choice.memory_bytes)
        return max(fitting, key=lambda choice: choice.throughput)

    def sweep(self, *, safe_batch: int, microbatches: Sequence[int]) -> Iterator[TwoBWChoice]:
        """The loops of Algorithm 1: w from 1 to N, d from 1 to N/w; those whose memory is above M are left out.

        Left out are also depths that do not divide the blocks, and widths and depths whose smallest batch is above B.
        """
        num_workers, smallest = self.servers.num_workers, min(microbatches)
        for w in range(1, num_workers + 1):
            for d in range(1, num_workers // w + 1):
                if self.model.num_blocks % d or smallest * w * d > safe_batch:
                    continue
                choice = self.search(w, d, safe_batch=safe_batch, microbatches=microbatches)
                if choice.memory_bytes <= self.servers.memory_bytes:
                    yield choice

    def partition(self, *, safe_batch: int, microbatches: Sequence[int]) -> TwoBWPlan | None:
        """Algorithm 1: the choice with the highest throughput, the first of equals, and g = B / (N b).

        None: nothing fits.

        Args:
            safe_batch: B, sequences.
            microbatches: the sizes b that are tried.
        """
        best = None
        for choice in self.sweep(safe_batch=safe_batch, microbatches=microbatches):
            if best is None or choice.throughput > best.throughput:
                best = choice
        if best is None:
            return None
        return TwoBWPlan(choice=best, accumulation=safe_batch / (self.servers.num_workers * best.microbatch))

    def _choice(self, w: int, d: int, b: int, *, recompute: bool) -> TwoBWChoice:
        return TwoBWChoice(
            width=w, depth=d, microbatch=b, recompute=recompute,
            throughput=self.throughput(w, d, b, recompute=recompute),
            memory_bytes=self.memory_bytes(d, b, recompute=recompute),
        )  # fmt: skip
