"""PipeDream-2BW's planner in closed form, as the paper states it, beside this project's planner.

    python -m papers.pipedream_2bw.planner --cluster V100-16 --model-script FILE --max-safe-batch 1024

The options are those of `tools/grid_search.py search` for clusters, models and batches. The block times are those of
this project's cost model, in place of the paper's profile.

Narayanan et al. 2021, "Memory-Efficient Pipeline-Parallel DNN Training", sections 4.2 and 4.3. Names are the paper's:

    w    width: replicas of the pipeline            b    sequences in a microbatch of one pipeline
    d    depth: stages of the pipeline              r    whether activations are recomputed
    N    workers                                    g    microbatches are accumulated d * g at a time
    M    memory of a worker, bytes                  B    maximum safe batch size, sequences

The paper's planner leaves out gradients and optimizer state, logits and embeddings, the bubble of schedules that flush,
and tensor parallelism; `megatron.planner.search` counts them. If the paper's text leaves a choice, a docstring states
the one made here.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from megatron.commands.grid_search.search import planners_for, space_of
from megatron.commands.grid_search.search_inputs import add_search_arguments, read_cluster, read_model
from megatron.documents import command_line
from megatron.pipeline.placement.traffic import ring_bytes
from megatron.planner.job.configuration import Configuration
from megatron.planner.job.estimate import Estimate
from megatron.planner.memory.activations import Activations
from megatron.planner.memory.parameters import layer_parameters
from megatron.planner.memory.recompute import RecomputeScope
from megatron.planner.planner import Planner

_GIGA, _GIB = 1e9, 2**30
RECOMPUTE_FACTOR = 4 / 3
"""c^extra of section 4.2.1: a backward takes twice as long as a forward, and with recompute the forward runs twice."""


@dataclass(frozen=True, kw_only=True)
class BlockProfile:
    """A model of equal blocks, from a profile of one of them (4.2.1, "Estimating T^comp" and "Estimating T^comm").

    Attributes:
        num_blocks: number of blocks of the whole model.
        block_seconds: sequences in a microbatch -> seconds of forward and backward of one block.
        weight_bytes: |W|, bytes of the parameters of all blocks.
        activation_bytes: |A^total(1)|, bytes that all blocks save for one sequence.
        boundary_bytes: |A^inp.+out.(1)|, bytes of a block's input and output for one sequence.
    """

    num_blocks: int
    block_seconds: Callable[[int], float]
    weight_bytes: float
    activation_bytes: float
    boundary_bytes: float


@dataclass(frozen=True, kw_only=True)
class Servers:
    """The workers and their servers. Bandwidths are bytes per second: `bandwidth_high` within a server, and
    `bandwidth_low` between servers."""

    num_workers: int
    workers_per_server: int
    memory_bytes: float
    bandwidth_high: float
    bandwidth_low: float

    def bandwidth(self, degree: int) -> float:
        """bwth_width(w) of section 4.2.1: the high bandwidth for w below the number of GPUs in a server, else the low.

        The text gives it only for the width; the depth's bandwidth is computed in the same way.
        """
        return self.bandwidth_high if degree < self.workers_per_server else self.bandwidth_low


@dataclass(frozen=True, kw_only=True)
class TwoBWChoice:
    """A candidate of Algorithm 1: w, d, b and r, with THROUGHPUT in sequences per second and MEMORY in bytes."""

    width: int
    depth: int
    microbatch: int
    recompute: bool
    throughput: float
    memory_bytes: float


@dataclass(frozen=True, kw_only=True)
class TwoBWPlan:
    """The result of Algorithm 1. `accumulation`: g, which may be a fraction, as in the paper's formula."""

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

        The paper refers to a closed form for the bytes of an all-reduce; a ring's is used here, 2 (w-1)/w of the data.
        """
        return ring_bytes(self.model.weight_bytes / d, w) / self.servers.bandwidth(w)

    def microbatch_seconds(self, w: int, d: int, b: int, *, recompute: bool) -> float:
        """t, the seconds in which a pipeline processes a microbatch (second and third expression for t):

            t = max_i max(c^extra T_i^comp, sum_j T_{j->i}^comm, T_i^comm)

        All stages are equal. j is the stage before i; the factor 2 of a transfer counts gradients.
        """
        compute = self.compute_seconds(b, d) * (RECOMPUTE_FACTOR if recompute else 1.0)
        return max(compute, self.transfer_seconds(b, d), self.reduction_seconds(w, d))

    def microbatch_seconds_without_pipelining(self, w: int, d: int, b: int) -> float:
        """t, the seconds of a microbatch if its stages run one after another without overlap (first expression):

            t = sum_i max(T_i^comp + sum_j T_{j->i}^comm, T_i^comm)

        The first stage has no stage before it.
        """
        compute, transfer = self.compute_seconds(b, d), self.transfer_seconds(b, d)
        reduction = self.reduction_seconds(w, d)
        return max(compute, reduction) + (d - 1) * max(compute + transfer, reduction)

    def throughput(self, w: int, d: int, b: int, *, recompute: bool) -> float:
        """THROUGHPUT(w, d, b, r) in sequences per second: b / t of each of the w pipelines, which work in parallel."""
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
        If nothing fits, the choice that needs least memory is returned, which Algorithm 1 then drops. Of equal choices
        the one without recomputation and with the smaller microbatch is returned.
        """
        safe = [b for b in sorted(microbatches) if b * w * d <= safe_batch]
        every = [self._choice(w, d, b, recompute=r) for r in (False, True) for b in safe or [min(microbatches)]]
        fitting = [each for each in every if each.memory_bytes <= self.servers.memory_bytes]
        if not fitting or not safe:
            return min(every, key=lambda choice: choice.memory_bytes)
        return max(fitting, key=lambda choice: choice.throughput)

    def sweep(self, *, safe_batch: int, microbatches: Sequence[int]) -> Iterator[TwoBWChoice]:
        """Yield the choices in the loops of Algorithm 1, w from 1 to N and d from 1 to N/w, whose memory is at most M.

        Depths that do not divide the blocks are left out, and so are widths and depths whose smallest batch is above B.
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
        """Algorithm 1: the choice with the highest throughput, the first of equal ones, and g = B / (N b).

        Returns None if nothing fits.

        Args:
            safe_batch: B, in sequences.
            microbatches: the sizes b to try.
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


@dataclass(frozen=True, kw_only=True)
class PaperResult:
    """The result of Algorithm 1, with this project's estimate of it.

    Attributes:
        plan: the result; None if nothing fits by the paper's memory function.
        whole: the best choice with w d = N, since the loops of Algorithm 1 may leave GPUs idle.
        estimate: the estimate of `whole` by this project's planner, or None.
        reason: the reason why there is no estimate.
    """

    plan: TwoBWPlan | None
    whole: TwoBWChoice | None = None
    estimate: Estimate | None = None
    reason: str = ""


def run_paper_algorithm(planner: Planner, *, safe_batch: int) -> PaperResult:
    """Run Algorithm 1 with B = `safe_batch`, with the block times of the planner's cost model.

    Raises:
        ValueError: the model has one layer, whose costs cannot be separated from those of the model's ends.
    """
    sizes = [2**power for power in range(safe_batch.bit_length())]
    paper, num_gpus = paper_planner(planner), planner.cluster.num_gpus
    plan = paper.partition(safe_batch=safe_batch, microbatches=sizes)
    if plan is None:
        return PaperResult(plan=None, reason="by its memory function nothing fits")
    swept = paper.sweep(safe_batch=safe_batch, microbatches=sizes)
    whole = [each for each in swept if each.width * each.depth == num_gpus]
    if not whole:
        return PaperResult(plan=plan, reason=f"no width and depth that fit make {num_gpus}")
    best = max(whole, key=lambda choice: choice.throughput)
    try:
        return PaperResult(plan=plan, whole=best, estimate=planner.estimate(_configuration(best, safe_batch)))
    except ValueError as error:
        return PaperResult(plan=plan, whole=best, reason=str(error))


def _configuration(choice: TwoBWChoice, safe_batch: int) -> Configuration:
    per_round = choice.microbatch * choice.width
    return Configuration(
        pipeline=choice.depth, data=choice.width, micro_batch_size=choice.microbatch,
        global_batch_size=safe_batch // per_round * per_round, schedule="2bw",
        recompute=RecomputeScope.LAYER if choice.recompute else RecomputeScope.NONE,
    )  # fmt: skip


def paper_planner(planner: Planner) -> PaperPlanner:
    """The paper's cost functions with |W|, |A| and times of the planner's model, in place of a profile.

    B_low is a GPU's share of its server's network bandwidth while all GPUs of the server use it.
    """
    model, cluster, software = planner.model, planner.cluster, planner.software
    if model.num_layers < 2:
        raise ValueError("a model of one layer has no block apart from its ends; give 2 layers or more")
    replicas = cluster.num_gpus
    single = Configuration(data=replicas, micro_batch_size=1, global_batch_size=replicas)
    activations = Activations(model, software.activation_setting(single))

    def block_seconds(size: int) -> float:
        """The seconds of forward and backward of one additional layer."""
        configuration = replace(single, micro_batch_size=size, global_batch_size=size * replicas)
        more, fewer = (
            planner.cost_model.costs(configuration, (count,)) for count in (model.num_layers, model.num_layers - 1)
        )
        return more.forward[0] + more.backward[0] - fewer.forward[0] - fewer.backward[0]

    blocks = BlockProfile(
        num_blocks=model.num_layers,
        block_seconds=block_seconds,
        weight_bytes=float(model.num_layers * layer_parameters(model, 1) * software.element_bytes),
        activation_bytes=activations.saved(model.num_layers, is_first=False, is_last=False),
        boundary_bytes=2 * activations.boundary,
    )
    servers = Servers(
        num_workers=cluster.num_gpus,
        workers_per_server=min(node.gpus for node in cluster.topology.nodes),
        memory_bytes=cluster.device.memory_gib * _GIB,
        bandwidth_high=cluster.device.link_bandwidth * _GIGA,
        bandwidth_low=cluster.topology.network_share(0) * _GIGA,
    )
    return PaperPlanner(model=blocks, servers=servers)


def describe_paper(result: PaperResult) -> list[str]:
    """The result as lines of text."""
    if result.plan is None:
        return [result.reason]
    lines = [f"{_words(result.plan.choice)}, g={result.plan.accumulation:.3g}"]
    if result.whole is not None and result.whole != result.plan.choice:
        lines.append(f"of those that use all GPUs: {_words(result.whole)}")
    if result.estimate is None:
        lines.append(f"this planner: {result.reason}")
    else:
        rate = result.estimate.configuration.global_batch_size / result.estimate.seconds
        memory = max(rank.total for rank in result.estimate.memory) / _GIB
        lines.append(f"this planner on it: {rate:.3g} sequences/s, {memory:.1f} GiB, {result.estimate.verdict.word}")
    return lines


def _words(choice: TwoBWChoice) -> str:
    return (
        f"THROUGHPUT {choice.throughput:.3g} sequences/s, MEMORY {choice.memory_bytes / _GIB:.1f} GiB with "
        f"w={choice.width}, d={choice.depth}, b={choice.microbatch}, r={'T' if choice.recompute else 'F'}"
    )


def run(options: argparse.Namespace) -> int:
    machines = read_cluster(options)
    model = read_model(options, machines.cluster)
    for note in model.notes:
        print(f"note: {note}", file=sys.stderr)
    space = space_of(options, model, machines.cluster)
    if space.context != (1,) or model.job.has_experts:
        raise ValueError("Algorithm 1 knows neither context parallelism nor experts; leave these out")
    planner = planners_for(options, model, machines.cluster)(1)
    lines = describe_paper(run_paper_algorithm(planner, safe_batch=space.largest_batch_size))
    if options.json:
        print(json.dumps({"paper_algorithm": lines}))
    else:
        print("Algorithm 1 of PipeDream-2BW, as it stands", *lines, sep="\n")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command_line.parser_of(__doc__)
    add_search_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options, options.flags = parser.parse_known_args(arguments)
    return command_line.run(run, options)


if __name__ == "__main__":
    sys.exit(main())
