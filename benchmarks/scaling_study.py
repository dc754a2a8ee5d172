"""The computations of `scaling.py`: models, clusters, and configurations with their time, memory and traffic.

Every model keeps the degrees t and p and the global batch of its paper, and grows by replicas: d pipelines share the
batch, so each pipeline gets fewer microbatches. Jobs grow in this way in practice, since a larger batch would change
the training.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace

from megatron.pipeline.placement.traffic import MessageCounts, count_transfers, ring_bytes
from megatron.pipeline.schedules import Schedule
from megatron.pipeline.simulate.costs import Costs
from megatron.planner import GIB, Architecture, Cluster, Configuration
from megatron.planner.job.estimate import Estimate
from megatron.planner.job.software import MEGATRON_CORE
from megatron.planner.memory.parameters import stage_parameters
from megatron.planner.memory.recompute import RecomputeScope
from megatron.planner.planner import Planner
from megatron.planner.search import Space, Training, search
from megatron.planner.time.first_principles import FirstPrinciples
from megatron.planner.time.iteration import simulated
from megatron.planner.time.microbatch_flow import StageTimes
from megatron.planner.time.traffic import CutModel

GPU, GPUS_PER_NODE, BETWEEN_NODES = "A100-80", 8, 200.0  # GB/s of a node: eight adapters of 200 Gb/s
SCHEDULES = ("flush", "interleaved", "bpipe", "2bw")
REMEMBERED = ("gpipe", "flush", "interleaved", "bpipe", "2bw", "2bw+balance", "pipedream")
SEARCHED = ("flush", "interleaved", "bpipe", "interleaved+balance", "2bw", "2bw+balance")
# Of each schedule this many configurations are simulated, if their closed form is within this part of the first.
_SIMULATED, _NEAR = 3, 0.1
_COUNTED = 20_000  # the greatest number of forwards in a program that is built to count its transfers


@dataclass(frozen=True, kw_only=True)
class Model:
    """A GPT, its degrees in papers, and the sizes of its jobs in this study.

    Attributes:
        virtual: number of stages on each rank under `interleaved`.
        data: numbers of replicas.
        remembered: number of replicas for which memory is compared.
        searched: numbers of GPUs for which all configurations are compared.
    """

    name: str
    architecture: Architecture
    tensor: int
    pipeline: int
    virtual: int
    global_batch_size: int
    data: tuple[int, ...]
    remembered: int
    searched: tuple[int, ...]

    def gpus(self, data: int) -> int:
        return self.tensor * self.pipeline * data

    def configuration(self, schedule: str, data: int) -> Configuration:
        """The configuration for a schedule and a number of replicas. Raises ValueError if the batch does not divide."""
        return Configuration(
            tensor=self.tensor, pipeline=self.pipeline, data=data,
            virtual=self.virtual if schedule == "interleaved" else 1, micro_batch_size=1,
            global_batch_size=self.global_batch_size, recompute=RecomputeScope.ATTENTION, schedule=schedule,
            sequence_parallel=True, distributed_optimizer=data > 1,
            rank_mapping="pair-adjacent" if schedule == "bpipe" else "standard",
        )  # fmt: skip


def _gpt(num_layers: int, hidden_size: int, num_attention_heads: int) -> Architecture:
    return Architecture.gpt3(
        num_layers=num_layers, hidden_size=hidden_size, num_attention_heads=num_attention_heads, sequence_length=2048,
        vocabulary_size=51_200,
    )  # fmt: skip


MODELS = (
    Model(name="13B", architecture=_gpt(40, 5120, 40), tensor=2, pipeline=4, virtual=5, global_batch_size=1024,
          data=(1, 2, 4, 8, 16, 32, 64, 128, 256), remembered=32, searched=(8, 32, 128, 512, 2048)),
    Model(name="175B", architecture=_gpt(96, 12_288, 96), tensor=8, pipeline=8, virtual=4, global_batch_size=1536,
          data=(1, 4, 8, 16, 32, 64, 96, 192, 256), remembered=16, searched=(64, 256, 1024, 4096, 16_384)),
    Model(name="530B", architecture=_gpt(105, 20_480, 128), tensor=8, pipeline=35, virtual=3, global_batch_size=2520,
          data=(1, 4, 8, 12, 24, 36, 56), remembered=8, searched=(280, 1120, 2240, 6720, 10_080)),
    Model(name="1T", architecture=_gpt(128, 25_600, 160), tensor=8, pipeline=64, virtual=2, global_batch_size=3072,
          data=(1, 4, 8, 16, 24, 32), remembered=4, searched=(512, 2048, 4096, 8192, 16_384)),
)  # fmt: skip


def cluster_of(num_gpus: int) -> Cluster:
    return Cluster(
        gpu=GPU, nodes=-(-num_gpus // GPUS_PER_NODE), gpus_per_node=min(GPUS_PER_NODE, num_gpus),
        bandwidth={"between_nodes": BETWEEN_NODES},
    )  # fmt: skip


def planner_of(model: Model, num_gpus: int, shape: Architecture | None = None) -> Planner:
    """Make the planner of a model on `num_gpus` GPUs. `shape`: an architecture in place of the model's."""
    cluster, shape = cluster_of(num_gpus), shape or model.architecture
    return Planner(shape, cluster, FirstPrinciples(shape, cluster))


# --- fixed degrees t and p, growing numbers of replicas


def grown(model: Model) -> Iterator[dict]:
    """Yield a row for each number of replicas and schedule."""
    for data in model.data:
        for schedule in SCHEDULES:
            yield cell(model, schedule, data)


def cell(model: Model, schedule: str, data: int) -> dict:
    """The row of one configuration: its time with its parts, and its traffic; or the reason why it cannot run."""
    num_gpus = model.gpus(data)
    row = {"model": model.name, "gpus": num_gpus, "replicas": data, "schedule": schedule}
    planner = planner_of(model, num_gpus)
    try:
        configuration = model.configuration(schedule, data)
        built = configuration.pipeline_schedule(tied_embeddings=True)
        built.validate(configuration.num_microbatches)
    except ValueError as error:
        return {**row, "refused": str(error)}
    layers = planner.layers(configuration)
    costs = planner.cost_model.costs(configuration, layers)
    row["microbatches"] = configuration.num_microbatches
    row |= times(costs, configuration, built)
    peak = num_gpus * planner.cluster.device.peak(planner.software.element_bytes)
    row["mfu"] = model.architecture.operations(configuration.global_batch_size) / (row["seconds"] * peak)
    row["sent_gb"] = {name: value / 1e9 for name, value in sent(model, configuration, built).items()}
    return row


def times(costs: Costs, configuration: Configuration, schedule: Schedule) -> dict:
    """The seconds of an iteration, and its parts.

    The seconds of `reductions` (over replicas and of tied embeddings), `transfers` (between stages) and `moves` (of
    saved activations) are those by which the iteration is shorter without them. The rest is divided into compute and
    step of the busiest rank, and fill and drain of the pipeline.
    """

    total = last = simulated(costs, configuration, schedule)
    parts = {}
    for name, without in (
        ("reductions", {"reduce_grad": 0.0, "reduce_embed": 0.0}),
        ("transfers", {"forward_bytes": 0.0}),
        ("moves", {"evict": 0.0}),
    ):
        parts[name] = 0.0
        if any(_given(getattr(costs, field)) for field in without):
            costs = replace(costs, **without)
            left = simulated(costs, configuration, schedule)
            parts[name], last = max(0.0, last.seconds - left.seconds), left
    busy = min(last.busy, last.seconds)
    step = max(StageTimes(costs, schedule).by_rank(costs.step))
    parts |= {"fill and drain": last.seconds - busy, "step": step, "compute": busy - step}
    return {"seconds": total.seconds, "parts": parts}


def _given(value: object) -> bool:
    return any(value) if isinstance(value, list | tuple) else bool(value)


def sent(model: Model, configuration: Configuration, schedule: Schedule) -> dict[str, float]:
    """The bytes that a GPU sends in an iteration, by kind, each for the GPU that sends most of that kind."""
    t, p, d = configuration.tensor, configuration.pipeline, configuration.data
    shape = model.architecture
    setting, layers = MEGATRON_CORE.activation_setting(configuration), shape.num_layers // schedule.num_stages
    cut = CutModel(model=shape, setting=setting, schedule=schedule, layers=(layers,) * schedule.num_stages)
    traffic = cut.traffic(counted(schedule, configuration.num_microbatches))
    down, state = traffic.pipeline, MEGATRON_CORE.training_state(configuration)
    parameters = max(stage_parameters(shape, t, (shape.num_layers // p,) * p))
    once = parameters * (state.gradient_bytes + (state.weight_bytes if d > 1 else 0))
    return {
        "tensor": ring_bytes(max(traffic.tensor), t),
        "pipeline": max(down[rank] + down[rank - 1] for rank in range(p)),
        "moves": max(traffic.pair),
        "replicas": (d - 1) / d * once,
    }


def counted(schedule: Schedule, num_microbatches: int) -> MessageCounts:
    """Count the transfers of a batch. A long batch is extrapolated by the transfers of p more microbatches in a full
    pipeline."""
    p = schedule.num_ranks
    most = max(6 * p, _COUNTED // schedule.num_stages // p * p) + num_microbatches % p
    if num_microbatches <= most:
        return count_transfers(schedule, num_microbatches)
    fewer, more = (count_transfers(schedule, count) for count in (most - p, most))
    groups = (num_microbatches - most) // p

    def grow(name: str) -> tuple[int, ...]:
        pairs = zip(getattr(fewer, name), getattr(more, name), strict=True)
        return tuple(second + groups * (second - first) for first, second in pairs)

    return replace(
        more, num_microbatches=num_microbatches, activations=grow("activations"), evictions=grow("evictions")
    )  # fmt: skip


# --- memory


def memory(model: Model) -> Iterator[dict]:
    """Yield the memory of the fullest GPU under each schedule, with its parts. pipedream has batches of one microbatch
    and untied embeddings."""
    num_gpus = model.gpus(model.remembered)
    for schedule in REMEMBERED:
        preset, _, balance = schedule.partition("+")
        configuration = replace(model.configuration(preset, model.remembered), balance=bool(balance))
        shape = model.architecture
        if preset == "pipedream":
            configuration = replace(configuration, global_batch_size=configuration.data)
            shape = replace(shape, tied_embeddings=False)
        row = {"model": model.name, "gpus": num_gpus, "schedule": schedule}
        try:
            fullest = max(planner_of(model, num_gpus, shape).memory(configuration), key=lambda rank: rank.total)
        except ValueError as error:
            yield {**row, "refused": str(error)}
            continue
        parts = {name: value / GIB for name, value in asdict(fullest.parts).items()}
        del parts["communicators"]  # 0, since this study leaves communicators out (see the end of the page)
        yield {**row, "rank": fullest.rank, "gib": fullest.total / GIB, "parts": parts}


# --- the best split for each schedule


def best(model: Model, num_gpus: int) -> list[dict]:
    """The fastest configuration of each schedule, over all degrees, microbatches and recompute scopes that fit in
    memory.

    The configurations with the best closed forms are simulated, and the fastest of them is chosen.
    """
    planner = planner_of(model, num_gpus)
    space = Space(
        num_gpus=num_gpus, gpus_per_node=GPUS_PER_NODE, global_batch_size=model.global_batch_size, schedules=SEARCHED,
        micro_batch_sizes=(1, 2, 4, 8), distributed_optimizer=(True,), avoids_pressure=True, early_stopping=False,
    )  # fmt: skip
    outcome = search(space, lambda _: planner, Training(), num_simulated=0)
    rows = []
    for schedule in SEARCHED:
        kept = [each.estimate for each in outcome.kept if each.choice.schedule == schedule]
        near = [each for each in kept[:_SIMULATED] if each.seconds <= (1 + _NEAR) * kept[0].seconds]
        if near:
            simulated = (planner.estimate(each.configuration, simulate=True) for each in near)
            rows.append(_best_row(model, schedule, min(simulated, key=lambda each: each.seconds)))
    return rows


def _best_row(model: Model, schedule: str, estimate: Estimate) -> dict:
    configuration = estimate.configuration
    return {
        "model": model.name,
        "gpus": configuration.num_gpus,
        "schedule": schedule,
        "t": configuration.tensor,
        "p": configuration.pipeline,
        "d": configuration.data,
        "v": configuration.virtual,
        "microbatch": configuration.micro_batch_size,
        "microbatches": configuration.num_microbatches,
        "recompute": configuration.recompute.value,
        "seconds": estimate.seconds,
        "mfu": estimate.mfu,
        "memory_gib": estimate.memory_gib,
    }


def rows_of(data: dict, model: str) -> dict[tuple[int, str], dict]:
    """The grown rows of a model by number of replicas and schedule."""
    return {(row["replicas"], row["schedule"]): row for row in data["grown"] if row["model"] == model}


def lost(row: dict) -> float:
    """The part of an iteration in which the busiest rank neither computes nor steps."""
    parts = row["parts"]
    return max(0.0, 1 - (parts["compute"] + parts["step"]) / row["seconds"])
