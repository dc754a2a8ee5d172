"""The planner: estimates each rank's memory and the time of an iteration for a model, a cluster and a configuration.

Two effects of scarce memory are priced here: a rank whose allocator frees cached blocks in every backward computes more
slowly, and 2bw with a single gradient buffer waits for its gradient reductions.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace

from megatron.pipeline.program.weight_policies import FLUSH
from megatron.pipeline.schedules import Schedule
from megatron.pipeline.simulate.costs import Costs, spread
from megatron.planner.job.cluster import Cluster
from megatron.planner.job.configuration import Configuration, even_layers
from megatron.planner.job.estimate import Estimate, Verdict, judge
from megatron.planner.job.refusals import refuse_fp8, refuse_shares
from megatron.planner.job.software import MEGATRON_CORE, Software
from megatron.planner.memory.architecture import Architecture
from megatron.planner.memory.demand import Demand
from megatron.planner.memory.memory import RankMemory, estimate_memory
from megatron.planner.memory.node_memory import HostVerdict, crowds_by_name, judge_host
from megatron.planner.memory.schedule_demand import closed_form_demand, schedule_demand
from megatron.planner.sharded import sharded_memory, sharded_time
from megatron.planner.time.iteration import CostModel, IterationTime, priced, simulated
from megatron.planner.time.microbatch_flow import StageTimes, round_trips


def slowed(costs: Costs, stages: Collection[int], efficiency: float) -> Costs:
    """Return `costs`, whose times are lists by stage, with `stages` slowed to the fraction `efficiency` of their
    speed."""
    if not stages:
        return costs
    factor = [1 / efficiency if stage in stages else 1.0 for stage in range(len(costs.forward))]
    names = [name for name in ("forward", "backward", "backward_input", "backward_weight") if getattr(costs, name)]
    return replace(
        costs, **{name: [each * by for each, by in zip(getattr(costs, name), factor, strict=True)] for name in names}
    )


def in_one_gradient_buffer(costs: Costs, schedule: Schedule) -> Costs:
    """Return the costs of 2bw without a second gradient buffer.

    Between the backwards of two batches a stage computes one forward and then idles, since it runs at the rate of the
    pipeline. The gradients of the first batch are reduced during the forward and the idle time. A longer reduction
    delays the next backward: the excess is counted in the step instead of the reduction. The gradients of tied
    embeddings are summed after the reduction, so the last stage also waits for the last backward of the first stage.
    The result is an upper bound, since some backwards of the reduced batch come after the step.
    """
    num_stages = len(costs.forward)
    step, reduce = spread("step", costs.step, num_stages), list(spread("reduce_grad", costs.reduce_grad, num_stages))
    alone = list(reduce)
    if costs.reduce_embed:
        until_first = sum(costs.backward[:-1]) + reduce[0]
        reduce[-1] = max(reduce[-1], until_first) + costs.reduce_embed
        reduce[0] += costs.reduce_embed
    rate = round_trips(StageTimes(costs, schedule))
    waits = [max(0.0, each - (rate - own)) for each, own in zip(reduce, costs.backward, strict=True)]
    left = [max(0.0, each - wait) for each, wait in zip(alone, waits, strict=True)]
    return replace(costs, step=list(map(sum, zip(step, waits, strict=True))), reduce_grad=left, reduce_embed=0.0)


class Planner:
    """Estimates the memory and time of configurations of one model on one cluster.

    Args:
        model: the architecture of the model.
        cluster: the devices and links.
        cost_model: predicts times; None: only memory is estimated.
        software: the training software.
    """

    def __init__(
        self,
        model: Architecture,
        cluster: Cluster,
        cost_model: CostModel | None = None,
        software: Software = MEGATRON_CORE,
    ) -> None:
        self.model, self.cluster, self.cost_model, self.software = model, cluster, cost_model, software

    def layers(self, configuration: Configuration) -> tuple[int, ...]:
        """The number of layers of each stage: as configured, or split as evenly as possible.

        Raises:
            ValueError: layers are too few, heads or columns do not divide, or FP8 is impossible.
        """
        model, t, num_stages = self.model, configuration.tensor, configuration.num_stages
        if self.software.fp8:
            refuse_fp8(self.cluster.gpu, self.cluster.device, model, configuration)
        if configuration.layers is not None and sum(configuration.layers) != model.num_layers:
            raise ValueError(
                f"layers {configuration.layers} are {sum(configuration.layers)}, not the model's {model.num_layers}"
            )
        if configuration.layers is None and model.num_layers < num_stages:
            raise ValueError(
                f"{model.num_layers} layers are fewer than {num_stages} stages; change pipeline or virtual"
            )
        if undivided := model.undivided(t):
            raise ValueError(f"{undivided} do not divide by tensor {t}; change tensor")
        if configuration.sequence_parallel and model.sequence_length % t:
            raise ValueError(
                f"sequences of {model.sequence_length} do not divide by tensor {t}; change it, or do without sequence "
                "parallelism"
            )
        refuse_shares(model, configuration, self.software)
        return configuration.layers or even_layers(model.num_layers, num_stages)

    def memory(
        self, configuration: Configuration, layers: Sequence[int] | None = None, *, proved: bool = True
    ) -> tuple[RankMemory, ...]:
        """The memory of each rank of the pipeline.

        Args:
            proved: take the demand that the checker finds in programs. False: use the closed form, which is faster, if
                the schedule has one.

        Raises:
            ValueError: for the reasons of `layers`, or the schedule cannot run.
        """
        if configuration.sharding is not None:
            self.layers(configuration)
            return sharded_memory(self.model, self.software.of(configuration), configuration)
        schedule = configuration.pipeline_schedule(tied_embeddings=self.model.shares_embedding)
        demand = schedule_demand(schedule, configuration.num_microbatches, proved=proved)
        return self.memory_of(configuration, demand, self.layers(configuration) if layers is None else layers)

    def least_memory(self, configuration: Configuration) -> tuple[RankMemory, ...]:
        """A lower bound on the memory of each rank under any schedule: one microbatch, one weight version, equal
        stages.

        A stage has `num_layers // pipeline` layers.
        """
        least = Schedule(order="1f1b", weights=FLUSH, num_stages=configuration.pipeline)
        layers = (self.model.num_layers // configuration.pipeline,) * configuration.pipeline
        return self.memory_of(configuration, closed_form_demand(least, 1), layers)

    def memory_of(
        self, configuration: Configuration, demand: Demand, layers: Sequence[int], *, recomputes: bool = False
    ) -> tuple[RankMemory, ...]:
        """The memory of each rank for the demand of a program. `recomputes`: the program recomputes whole stages."""
        software = self.software.of(configuration)
        setting = software.activation_setting(configuration)
        return estimate_memory(
            self.model,
            replace(setting, recompute=replace(setting.recompute, whole_stage=True)) if recomputes else setting,
            software.training_state(configuration),
            demand.in_one_buffer if configuration.single_gradient_buffer else demand,
            layers=layers,
            counts_communicators=self.software.own_communicators and not self.cluster.is_cpu,
            hosting=configuration.hosting,
        )

    def estimate(
        self, configuration: Configuration, simulate: bool = False, *, memory: tuple[RankMemory, ...] | None = None
    ) -> Estimate:
        """The time and memory of a configuration.

        Args:
            simulate: prove and simulate the program that would run. False: use closed forms if the schedule has them.
            memory: the result of `memory` for this configuration; None: compute it.

        Raises:
            ValueError: the configuration cannot run, with the reason; see `layers`.
        """
        layers = self.layers(configuration)
        memory = memory or self.memory(configuration, layers, proved=simulate)
        verdict = self.judge(configuration, memory)
        time = self._time(configuration, layers, verdict, simulate)
        operations = self.model.operations(configuration.global_batch_size)
        peak = configuration.num_gpus * self.cluster.device.peak(self.software.element_bytes)
        return Estimate(
            configuration=configuration,
            seconds=time.seconds,
            mfu=operations / (time.seconds * peak),
            bubble=time.bubble,
            memory=memory,
            verdict=verdict,
            host=self.judge_host(configuration, memory),
        )

    def _time(
        self, configuration: Configuration, layers: Sequence[int], verdict: Verdict, simulate: bool
    ) -> IterationTime:
        if configuration.sharding is not None:
            assert self.cost_model is not None
            return sharded_time(self.cost_model, configuration, is_slowed=bool(verdict.slowed))
        schedule = configuration.pipeline_schedule(tied_embeddings=self.model.shares_embedding)
        costs = self.costs(configuration, schedule, layers, verdict)
        return (simulated if simulate else priced)(costs, configuration, schedule)

    def costs(self, configuration: Configuration, schedule: Schedule, layers: Sequence[int], verdict: Verdict) -> Costs:
        """The costs of instructions, including the slowdown of ranks in `verdict.slowed` by their allocators."""
        assert self.cost_model is not None
        costs = self.cost_model.costs(configuration, layers)
        if configuration.single_gradient_buffer:
            costs = in_one_gradient_buffer(costs, schedule)
        stages = [stage for stage, rank in enumerate(schedule.rank_of_stage) if rank in verdict.slowed]
        return slowed(costs, stages, self.cost_model.pressed_efficiency)

    def judge(self, configuration: Configuration, memory: Sequence[RankMemory]) -> Verdict:
        """The verdict whether the memory fits the GPUs, and which ranks are slowed by a shortage of memory."""
        software = self.software.of(configuration)
        setting = software.activation_setting(configuration) if software.operands_wait else None
        return judge(memory, self.cluster.device.memory_gib, self.model, setting)

    def judge_host(self, configuration: Configuration, memory: Sequence[RankMemory]) -> HostVerdict | None:
        """The verdict whether the memory fits the hosts; None: weights are on devices, or host memory is unknown."""
        if not configuration.is_hosted or self.cluster.host_memory_gib is None:
            return None
        host_of_slot = self.cluster.host_of_slot
        nodes = crowds_by_name(configuration.degrees, configuration.rank_mapping, host_of_slot)
        return judge_host(memory, nodes, self.cluster.host_memory_gib)
