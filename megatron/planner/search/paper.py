"""PipeDream-2BW's Algorithm 1 on a model and a cluster, and what this planner says of its choice."""

from dataclasses import dataclass, replace

from megatron.placement.bandwidth import RecomputeScope
from megatron.planner.activations import Activations
from megatron.planner.configuration import Configuration
from megatron.planner.estimate import Estimate
from megatron.planner.parameters import layer_parameters
from megatron.planner.planner import Planner
from megatron.planner.two_bw import Blocks, PaperPlanner, Plan, Servers

_GIGA, _GIB = 1e9, 2**30


@dataclass(frozen=True, kw_only=True)
class PaperResult:
    """`plan`: None where nothing fits. `estimate`: of its configuration; None where `reason` says why there is none."""

    plan: Plan | None
    estimate: Estimate | None
    reason: str | None


def run_paper_algorithm(planner: Planner, *, safe_batch: int) -> PaperResult:
    """Algorithm 1 with B = `safe_batch`, on the blocks of the planner's own cost model.

    Raises:
        ValueError: fewer than 3 layers, of which no block can be told apart from the model's ends.
    """
    microbatches = [2**power for power in range(safe_batch.bit_length())]
    plan = paper_planner(planner).partition(safe_batch=safe_batch, microbatches=microbatches)
    if plan is None:
        return PaperResult(plan=None, estimate=None, reason="by its memory function nothing fits")
    choice = plan.choice
    per_round = choice.microbatch * choice.width
    configuration = Configuration(
        pipeline=choice.depth, data=choice.width, micro_batch_size=choice.microbatch,
        global_batch_size=safe_batch // per_round * per_round, schedule="2bw",
        recompute=RecomputeScope.LAYER if choice.recompute else RecomputeScope.NONE,
    )  # fmt: skip
    try:
        return PaperResult(plan=plan, estimate=planner.estimate(configuration), reason=None)
    except ValueError as error:
        return PaperResult(plan=plan, estimate=None, reason=str(error))


def paper_planner(planner: Planner) -> PaperPlanner:
    """The paper's cost functions with |W|, |A| and times of this model, in place of a profile.

    B_low is what a GPU has of its server's network while all use it.
    """
    model, cluster, software = planner.model, planner.cluster, planner.software
    if model.num_layers < 3:
        raise ValueError(f"{model.num_layers} layers are too few to tell a block from the ends; give 3 or more")
    single = Configuration(micro_batch_size=1, global_batch_size=1)
    activations = Activations(model, software.activation_setting(single))

    def block_seconds(size: int) -> float:
        """Of one layer in the middle."""
        configuration = replace(single, pipeline=3, micro_batch_size=size, global_batch_size=size)
        costs = planner.cost_model.costs(configuration, (1, model.num_layers - 2, 1))
        return (costs.forward[1] + costs.backward[1]) / (model.num_layers - 2)

    blocks = Blocks(
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
        return [result.reason or ""]
    choice = result.plan.choice
    lines = [
        f"w={choice.width}, d={choice.depth}, b={choice.microbatch}, "
        f"r={'T' if choice.recompute else 'F'}, g={result.plan.accumulation:.3g}; "
        f"THROUGHPUT {choice.throughput:.3g} sequences/s, MEMORY {choice.memory_bytes / _GIB:.1f} GiB"
    ]
    if result.estimate is None:
        lines.append(f"this planner: {result.reason}")
    else:
        verdict = result.estimate.verdict
        rate = result.estimate.configuration.global_batch_size / result.estimate.seconds
        memory = max(rank.total for rank in result.estimate.memory) / _GIB
        lines.append(f"this planner on the same: {rate:.3g} sequences/s, {memory:.1f} GiB, {verdict.word}")
    return lines
