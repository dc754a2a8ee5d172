"""PipeDream-2BW's Algorithm 1 on a model and a cluster, and what this planner says of its choice."""

from dataclasses import dataclass, replace

from megatron.planner.job.configuration import Configuration
from megatron.planner.job.estimate import Estimate
from megatron.planner.memory.activations import Activations, RecomputeScope
from megatron.planner.memory.parameters import layer_parameters
from megatron.planner.planner import Planner
from megatron.planner.published.two_bw import BlockProfile, PaperPlanner, Servers, TwoBWChoice, TwoBWPlan

_GIGA, _GIB = 1e9, 2**30


@dataclass(frozen=True, kw_only=True)
class PaperResult:
    """What Algorithm 1 returns, and this planner beside it.

    Attributes:
        plan: None where nothing fits by the paper's memory function.
        whole: the best of its choices with w d = N; the loops of Algorithm 1 may leave GPUs idle.
        estimate: this planner's, of `whole`; None where `reason` says why there is none.
    """

    plan: TwoBWPlan | None
    whole: TwoBWChoice | None = None
    estimate: Estimate | None = None
    reason: str = ""


def run_paper_algorithm(planner: Planner, *, safe_batch: int) -> PaperResult:
    """Algorithm 1 with B = `safe_batch`, on the blocks of the planner's own cost model.

    Raises:
        ValueError: one layer, of which no block can be told apart from the model's ends.
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
    """The paper's cost functions with |W|, |A| and times of this model, in place of a profile.

    B_low is what a GPU has of its server's network while all use it.
    """
    model, cluster, software = planner.model, planner.cluster, planner.software
    if model.num_layers < 2:
        raise ValueError("a model of one layer has no block apart from its ends; give 2 layers or more")
    replicas = cluster.num_gpus
    single = Configuration(data=replicas, micro_batch_size=1, global_batch_size=replicas)
    activations = Activations(model, software.activation_setting(single))

    def block_seconds(size: int) -> float:
        """What one layer more takes, forward and backward."""
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
    """Lines for people."""
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
