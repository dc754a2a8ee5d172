"""Searches that tests share: small models, and the papers' own."""

from functools import cache

from megatron.planner import Architecture, Cluster
from megatron.planner.job.software import Software
from megatron.planner.planner import Planner
from megatron.planner.published.interval import Intervals
from megatron.planner.search import Outcome, Space, Training, search
from megatron.planner.search.outcome import Budget
from megatron.planner.time.calibration import default_constants, load_calibration
from megatron.planner.time.first_principles import FirstPrinciples

TRAINING = Training()
PAPER = Software(gradient_bytes=2)  # BPipe, section 1: 20 bytes a parameter


@cache
def planner(model: Architecture, cluster: Cluster, software: Software) -> Planner:
    return Planner(model, cluster, FirstPrinciples(model, cluster, software, default_constants()), software)


def run(
    model: Architecture, cluster: Cluster, software: Software = PAPER, training: Training = TRAINING, **space: object
) -> Outcome:
    """A search whose vocabulary is padded already."""
    num_simulated, objective = space.pop("num_simulated", 1), space.pop("objective", "time")
    chosen = Space(num_gpus=cluster.num_gpus, gpus_per_node=cluster.gpus_per_node, **space)
    return search(chosen, lambda _: planner(model, cluster, software), training, num_simulated=num_simulated,
                  objective=objective)  # fmt: skip


def priced(
    outcome: Outcome, model: Architecture, cluster: Cluster, *, tokens: float | None = 1e9, price: float | None = 2.0
) -> Outcome:
    """With intervals of the calibration that comes along, and with bills at 2 euros for a GPU for an hour."""
    calibration = load_calibration()
    intervals = Intervals.of_calibration(calibration.name, calibration.constants)
    budget = Budget(
        num_gpus=cluster.num_gpus, sequence_length=model.sequence_length, tokens=tokens, price_per_gpu_hour=price,
        currency="EUR",
    )  # fmt: skip
    return outcome.with_prices(lambda each: intervals.of(each.estimate, model, cluster, PAPER), budget)


def a100(nodes: int) -> Cluster:
    """The machines of BPipe, section 4.1."""
    return Cluster(gpu="A100-80", nodes=nodes, bandwidth={"between_nodes": 100.0})


def gpt3(num_layers: int, hidden_size: int, heads: int) -> Architecture:
    """A model of BPipe, table 1."""
    return Architecture.gpt3(
        num_layers=num_layers, hidden_size=hidden_size, num_attention_heads=heads, sequence_length=2048,
        vocabulary_size=51200,
    )  # fmt: skip
