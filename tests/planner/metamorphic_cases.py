"""Configurations of all kinds, drawn once and for all, for relations that hold of every one of them."""

import random
from dataclasses import dataclass, field, replace
from functools import lru_cache

from megatron.planner import Architecture, Cluster, Configuration
from megatron.planner.job.estimate import Estimate
from megatron.planner.job.software import MEGATRON_2021, MEGATRON_CORE, MEGATRON_V3, PIPEDREAM_2BW, Software
from megatron.planner.planner import Planner
from megatron.planner.time.calibration import Constants, default_constants
from megatron.planner.time.first_principles import FirstPrinciples

SEED = 20261125
NUM_CASES = 220
NETWORK = "between_nodes"

SIZES = (  # hidden size, heads, and the most layers: models of 1B to 1T
    (2048, 16, 24), (4096, 32, 32), (6144, 48, 48), (8192, 64, 80), (12288, 96, 96), (20480, 128, 105),
    (25600, 160, 128),
)  # fmt: skip
_GPUS = (
    "A100-80", "A100-40", "A100-PCIe-80", "H100", "H100-PCIe", "H100-NVL", "H200", "L40S", "B200", "GB200", "V100-32",
    "V100-16", "RTX2080Ti",
)  # fmt: skip
_SCHEDULES = (
    ("flush", False), ("2bw", False), ("interleaved", False), ("gpipe", False), ("bpipe", False), ("pipedream", False),
    ("2bw", True), ("zb-h1", False), ("zbv", False), ("interleaved", True), ("l2l", False),
)  # fmt: skip
_SIMULATED = ("zb-h1", "zbv", "l2l")  # no closed form, so that large ones take seconds
_SOFTWARE = (
    replace(MEGATRON_CORE, flash_attention=True), MEGATRON_CORE, MEGATRON_V3, MEGATRON_2021, PIPEDREAM_2BW,
    replace(MEGATRON_CORE, overlaps_gradients=True),
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A question to the planner. `cluster`: the fields of one, of which the last are its bandwidths."""

    name: str
    model: Architecture
    cluster: dict = field(hash=False)
    software: Software
    configuration: Configuration
    constants: Constants = field(default_factory=default_constants)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_estimate", lru_cache(maxsize=1)(self._ask))

    @property
    def machines(self) -> Cluster:
        return Cluster(**self.cluster)

    @property
    def estimate(self) -> Estimate:
        """Raises ValueError where it cannot run."""
        return self._estimate()

    @property
    def seconds(self) -> float:
        return self.estimate.seconds

    @property
    def fullest(self) -> float:
        """Bytes of the fullest rank."""
        return max(rank.total for rank in self.estimate.memory)

    def _ask(self) -> Estimate:
        machines = self.machines
        cost_model = FirstPrinciples(self.model, machines, self.software, self.constants)
        return Planner(self.model, machines, cost_model, self.software).estimate(self.configuration)

    # --- changed

    def configured(self, **changes: object) -> "Case | None":
        """None: that cannot run."""
        try:
            case = replace(self, configuration=replace(self.configuration, **changes))
        except ValueError:
            return None
        return case if case.can_run() else None

    def scheduled(self, schedule: str, virtual: int = 1) -> "Case | None":
        """With nothing beside it."""
        return self.configured(
            schedule=schedule, virtual=virtual, balance=False, provisional="off", provisional_microbatches=None,
            provisional_reduce=False, single_gradient_buffer=False,
        )  # fmt: skip

    def shaped(self, **changes: object) -> "Case":
        return replace(self, model=replace(self.model, **changes))

    def on(self, **changes: object) -> "Case":
        """On other machines: any field of a cluster, `within_node` and `between_nodes`."""
        links = {name: changes.pop(name) for name in ("within_node", NETWORK) if name in changes}
        return replace(self, cluster=self.cluster | changes | {"bandwidth": self.cluster["bandwidth"] | links})

    @property
    def roomy(self) -> "Case":
        """With so much memory that nothing is slower for want of it."""
        return self.on(memory_gib=1e6)

    def can_run(self) -> bool:
        try:
            self._estimate()
        except ValueError:
            return False
        return True

    def __repr__(self) -> str:
        return self.name


def cases(seed: int = SEED) -> list[Case]:
    """The same in every run."""
    draw = random.Random(seed)
    return [_runnable(draw, index) for index in range(NUM_CASES)]


def _runnable(draw: random.Random, index: int) -> Case:
    drawn = (_drawn(draw, index) for _ in range(200))
    return next(case for case in drawn if case is not None and case.can_run())


def _drawn(draw: random.Random, index: int) -> Case | None:
    gpu, (schedule, balance) = _GPUS[index % len(_GPUS)], _SCHEDULES[index % len(_SCHEDULES)]
    hidden, heads, most = draw.choice(SIZES)
    t = draw.choice((1, 2, 4, 8))
    p = draw.choice((2, 4, 6, 8) if schedule in _SIMULATED else (1, 2, 4, 6, 8, 9, 12, 16))
    if schedule in ("flush", "gpipe"):
        p = draw.choice((p, p, 24, 32, 64))
    d = draw.choice((1, 1, 2, 3, 4, 8, 9, 24, 64))
    if schedule == "l2l":
        p, most = draw.choice((1, 2)), 8
    per_node = min(t * p * d, Cluster(gpu=gpu, nodes=1).gpus_per_node)
    if t * p * d > 3072 or t * p * d % per_node or per_node % t:
        return None
    v = {"zbv": 2, "interleaved": draw.choice((2, 3)), "l2l": max(2, most // (2 * p))}.get(schedule, 1)
    if p == 1 and schedule not in ("flush", "2bw", "gpipe", "l2l"):
        return None
    layers = p * v * (1 if schedule == "l2l" else max(1, draw.choice((most // (p * v), most // (2 * p * v)))))
    m = draw.choice((p, 2 * p, 3 * p + 1)) if schedule in _SIMULATED else p * draw.choice((1, 2, 4 if p < 9 else 3))
    m = 1 if schedule == "pipedream" else m  # each is a batch
    size = draw.choice((1, 2, 4))
    software = draw.choice(_SOFTWARE)
    if software.flash_attention and gpu in ("H100", "H200", "L40S", "B200", "GB200") and schedule not in _SIMULATED:
        software = replace(software, fp8=draw.random() < 0.5)
    model = Architecture.gpt3(
        num_layers=layers, hidden_size=hidden, num_attention_heads=heads,
        sequence_length=draw.choice((1024, 2048, 4096)), vocabulary_size=51200,
    )  # fmt: skip
    if draw.random() < 0.3:
        model = replace(
            model, gated=True, ffn_hidden_size=hidden * 8 // 3 // 256 * 256, linear_biases=False, norm_vectors=1,
            num_positions=0, num_query_groups=max(t, heads // 4), tied_embeddings=False, hidden_dropout=False,
            attention_dropout=False,
        )  # fmt: skip
    if schedule == "pipedream":
        model = replace(model, tied_embeddings=False)
    configuration = Configuration(
        tensor=t, pipeline=p, data=d, virtual=v, micro_batch_size=size, global_batch_size=size * m * d,
        recompute="none" if schedule == "l2l" else draw.choice(("none", "attention", "layer")), schedule=schedule,
        balance=balance, sequence_parallel=t > 1 and draw.random() < 0.7,
        distributed_optimizer=schedule != "l2l" and d > 1 and draw.random() < 0.6,
        provisional="stage" if schedule == "2bw" and draw.random() < 0.3 else "off",
        rank_mapping=draw.choice(("standard", "standard", "pair-adjacent")) if p % 2 == 0 else "standard",
    )  # fmt: skip
    cluster = {"gpu": gpu, "nodes": t * p * d // per_node, "gpus_per_node": per_node}
    network = draw.choice((1.25, 12.5, 50, 100, 400)) * per_node / 8
    if schedule == "l2l":
        cluster["host_optimizer_ns"] = 1.5
    name = f"{index}-{gpu}-{schedule}{'+' * balance}-t{t}p{p}d{d}v{v}m{m}b{size}-h{hidden}L{layers}"
    return Case(name, model, cluster | {"bandwidth": {NETWORK: network}}, software, configuration)


def faster(case: Case, name: str, factor: float) -> Case:
    """The same on machines of which one rate is so many times as high."""
    device = case.machines.device
    rates = {
        "memory_bandwidth": device.memory_bandwidth, "peak_teraflops": device.peak_teraflops,
        "within_node": device.link_bandwidth, NETWORK: case.cluster["bandwidth"][NETWORK],
        "host_bandwidth": device.host_bandwidth,
    }  # fmt: skip
    return case.on(**{name: factor * rates[name]})
