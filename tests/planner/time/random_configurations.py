"""Random configurations with the times of their instructions, and random ones of random models on random clusters."""

from dataclasses import replace
from random import Random

from megatron.pipeline.schedules import Schedule
from megatron.pipeline.simulate.costs import Costs
from megatron.planner import Architecture, Cluster, Configuration
from megatron.planner.planner import Planner
from megatron.planner.time.first_principles import FirstPrinciples

KINDS = (
    "flush", "gpipe", "bpipe", "interleaved", "interleaved+balance", "2bw", "2bw+balance", "2bw stage",
    "2bw uniform", "2bw stage+balance", "pipedream", "l2l",
)  # fmt: skip
"""Schedules with a closed form; of 2bw also with what provisional weights read."""

Asked = tuple[Configuration, Schedule, Costs]


def random_costs(generator: Random, kind: str) -> Asked:
    """Stages that differ by up to twice, all, at the ends or the last alone; transfers and moves of up to three
    forwards; steps and reductions of up to a batch and more.
    """
    while True:
        try:
            asked = _configuration(generator, kind)
            schedule = asked.pipeline_schedule(tied_embeddings=generator.random() < 0.5)
        except ValueError:  # choices that do not go together
            continue
        if schedule.accepts(asked.num_microbatches) and _is_small(asked):
            return asked, schedule, _costs(generator, asked)


def _is_small(asked: Configuration) -> bool:
    """Whether the whole is simulated in less than a second; without a drain it is a dozen batches."""
    return asked.num_microbatches * asked.num_stages <= (2000 if asked.preset.policy.drains else 1500)


def _configuration(generator: Random, kind: str) -> Configuration:
    plain = kind.removesuffix("+balance")
    name, _, provisional = plain.partition(" ")
    p, d = generator.choice([2, 3, 4, 6, 8, 12, 16]), generator.choice([1, 1, 2, 4])
    v, m = 1, generator.choice([p, generator.randint(p, 4 * p), generator.randint(4 * p, 12 * p)])
    choices = {}
    if name in ("flush", "gpipe", "bpipe"):
        m = generator.choice([1, generator.randint(1, p), m])
    elif name == "interleaved":
        v, m = generator.choice([2, 2, 3, 4]), p * generator.choice([1, 2, 3, 8])
    elif name == "pipedream":
        m = 1
    elif name == "l2l":
        p, v, choices = 1, generator.choice([4, 6, 8]), {"host_update": "eager"}
        m = generator.choice([4, 8, 16])
    if provisional:
        choices = {"provisional": provisional, "provisional_reduce": d > 1 and generator.random() < 0.5}
    if provisional == "uniform":
        choices["provisional_microbatches"] = generator.randint(1, m - p + 1)
    return Configuration(
        schedule=name, pipeline=p, virtual=v, data=d, micro_batch_size=1, global_batch_size=m * d,
        balance=plain != kind, **choices,
    )  # fmt: skip


def _costs(generator: Random, asked: Configuration) -> Costs:
    n, spread = asked.num_stages, generator.choice([0, 0.1, 0.4, 1.0])
    varies = generator.choice([range(n), (0, n - 1), (0, n - 1), (n - 1,)])
    ratio, slow = generator.choice([1, 2, 2, 3]), generator.choice([0, 0, 0.1, 0.3, 0.8, 1.5, 3.0])

    def stages(value: float) -> list[float]:
        return [value * (generator.uniform(1, 1 + spread) if stage in varies else 1) for stage in range(n)]

    forward, edges = stages(1.0), [slow] * (n - 1)
    if generator.random() < 0.5:  # some within a node
        edges = [slow * generator.choice([0.1, 1]) for _ in edges]
    own = asked.num_microbatches * (1 + ratio)  # a stage's computations of a batch
    moves = generator.choice([0, 0.5, 1, 1.5, 2, 3]) * asked.preset.balance
    once = [generator.uniform(0, own) for _ in range(3)] if asked.is_hosted else [0.0] * 3
    return Costs(
        forward=forward, backward=[ratio * each for each in forward], step=generator.choice([0, 0.02, 0.3]) * own,
        predict=generator.choice([None, 0.5, 2.0]), hold=generator.choice([0, 0.3]),
        latency=generator.choice([0, 0, 0.05]), bandwidth=1.0, forward_bytes=edges,
        evict=[moves * each for each in forward], reduce_grad=stages(generator.choice([0, 0.05, 0.3, 1, 2]) * own),
        reduce_norm=generator.choice([0, 0.2]), reduce_embed=generator.choice([0, 0.1, 0.5]) * own,
        **dict(zip(("fetch", "store", "update"), once, strict=True)),
    )  # fmt: skip


def random_estimate(generator: Random, kind: str) -> tuple[Planner, Configuration]:
    """A GPT-3 of any size on nodes of four or eight GPUs with slow and fast links, in layers that divide evenly or do
    not.
    """
    while True:
        try:
            asked = _configuration(generator, kind)
            t = generator.choice([1, 2, 4])
            while asked.pipeline * asked.data * t % 4:
                t *= 2
            degrees = asked.pipeline * asked.data * t
            per_node = generator.choice([each for each in (4, 8) if degrees % each == 0])
            model, layers = _model(generator, asked)
            cluster = Cluster(
                gpu=generator.choice(["A100-80", "A100-40", "H100", "V100-32"]), nodes=degrees // per_node,
                gpus_per_node=per_node, bandwidth={"between_nodes": generator.choice([3.0, 12.5, 100.0])},
            )  # fmt: skip
            asked = _with(
                asked, tensor=t, layers=layers, micro_batch_size=generator.choice([1, 2, 4]),
                recompute=generator.choice(["none", "attention", "layer"]) if not asked.is_hosted else "none",
                sequence_parallel=t > 1 and generator.random() < 0.5,
                distributed_optimizer=asked.data > 1 and not asked.is_hosted and generator.random() < 0.5,
                rank_mapping=generator.choice(["standard", "standard", "pair-adjacent"]),
            )  # fmt: skip
            planner = Planner(model, cluster, FirstPrinciples(model, cluster))
            planner.layers(asked)
            schedule = asked.pipeline_schedule(tied_embeddings=model.tied_embeddings)
        except ValueError:
            continue
        if schedule.accepts(asked.num_microbatches) and _is_small(asked):
            return planner, asked


def _model(generator: Random, asked: Configuration) -> tuple[Architecture, tuple[int, ...] | None]:
    """A model, and the layers of each stage where they are not as many."""
    of_stage, heads = generator.randint(1, 4), generator.choice([16, 32, 64, 96])
    layers = None
    if generator.random() < 0.25 and of_stage > 1 and not asked.is_hosted:
        layers = (*[of_stage] * (asked.num_stages - 1), of_stage - 1)
    model = Architecture.gpt3(
        num_layers=sum(layers or (of_stage,) * asked.num_stages), hidden_size=heads * 128, num_attention_heads=heads,
        sequence_length=generator.choice([512, 2048, 4096]), vocabulary_size=generator.choice([32000, 51200, 128000]),
    )  # fmt: skip
    return replace(model, tied_embeddings=generator.random() < 0.5), layers


def _with(asked: Configuration, micro_batch_size: int, **changes: object) -> Configuration:
    """The same with other choices and as many microbatches."""
    values = {name: getattr(asked, name) for name in asked.__dataclass_fields__}
    batch = asked.global_batch_size * micro_batch_size
    return Configuration(**values | changes | {"micro_batch_size": micro_batch_size, "global_batch_size": batch})
