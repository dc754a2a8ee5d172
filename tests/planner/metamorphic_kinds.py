"""Cases with what few configurations have: experts, shared sequences, split weights, predictions, uneven stages, and
weights on the host in every way.
"""

import random
from collections.abc import Callable
from dataclasses import replace

from megatron.planner import Architecture, Cluster, Configuration
from megatron.planner.job.configuration import Sharding
from megatron.planner.job.software import DEEPSPEED, MEGATRON_2021, MEGATRON_CORE, TORCHTITAN, Software
from megatron.planner.memory.architecture import Experts
from tests.planner.metamorphic_cases import NETWORK, SIZES, Case

FLASH = replace(MEGATRON_CORE, flash_attention=True)
OVERLAPPED = replace(FLASH, overlaps_gradients=True, overlaps_weights=True)
_GPUS = ("A100-80", "H100", "H100-PCIe", "H200", "L40S", "B200", "V100-32")
_NETWORKS = (0.3, 1.25, 3.0, 12.5, 50.0, 100.0, 400.0)  # GB/s of a node of 8

Draw = random.Random
Chosen = tuple[Configuration, Architecture, Software]


def kinds(count: int, seed: object) -> list[Case]:
    """So many cases, of each kind as many. The same in every run."""
    draw, makers = Draw(f"kinds {seed}"), list(_MAKERS.items())
    return [_runnable(draw, index, *makers[index % len(makers)]) for index in range(count)]


def _runnable(draw: Draw, index: int, kind: str, make: Callable[[Draw], Chosen]) -> Case:
    while True:
        try:
            case = _on_machines(draw, f"{index}-{kind}", *make(draw))
        except ValueError:  # choices that do not go together
            continue
        if case is not None and case.can_run():
            return case


def _on_machines(draw: Draw, name: str, asked: Configuration, model: Architecture, software: Software) -> Case | None:
    gpu = draw.choice(("H100", "B200") if software.fp8 else _GPUS)
    per_node = min(asked.num_gpus, Cluster(gpu=gpu, nodes=1).gpus_per_node)
    if asked.num_gpus > 3072 or asked.num_gpus % per_node or per_node % asked.tensor:
        return None
    links = {NETWORK: draw.choice(_NETWORKS) * per_node / 8}
    if draw.random() < 0.2:
        links["within_node"] = draw.choice((12, 64, 600))
    cluster = {"gpu": gpu, "nodes": asked.num_gpus // per_node, "gpus_per_node": per_node, "bandwidth": links}
    m, size = asked.num_microbatches, asked.micro_batch_size
    degrees = f"t{asked.tensor}p{asked.pipeline}d{asked.data}v{asked.virtual}m{m}b{size}"
    return Case(f"{name}-{gpu}-{asked.schedule}-{degrees}-h{model.hidden_size}", model, cluster, software, asked)


# --- what is drawn


def _model(draw: Draw, num_layers: int, hidden_size: int, heads: int, **changes: object) -> Architecture:
    model = Architecture.gpt3(
        num_layers=num_layers, hidden_size=hidden_size, num_attention_heads=heads,
        sequence_length=draw.choice((1024, 2048, 4096, 8192)), vocabulary_size=draw.choice((51200, 128256)),
    )  # fmt: skip
    if draw.random() < 0.5:
        model = replace(
            model, gated=True, ffn_hidden_size=hidden_size * 8 // 3 // 256 * 256, linear_biases=False, norm_vectors=1,
            num_positions=0, tied_embeddings=False, hidden_dropout=False, attention_dropout=False,
        )  # fmt: skip
    return replace(model, **changes)


def _configuration(draw: Draw, p: int, v: int = 1, **changes: object) -> Configuration:
    t, d = draw.choice((1, 2, 4, 8)), draw.choice((1, 1, 2, 3, 4, 8, 24))
    m = p * draw.choice((1, 2, 4))
    if v == 1 and draw.random() < 0.4:
        m += draw.randint(0, p)
    values = {
        "tensor": t, "pipeline": p, "data": d, "virtual": v, "micro_batch_size": draw.choice((1, 2, 4)),
        "recompute": draw.choice(("none", "attention", "layer")),
        "sequence_parallel": t > 1 and draw.random() < 0.7, "distributed_optimizer": d > 1 and draw.random() < 0.6,
    } | changes  # fmt: skip
    size, data = values["micro_batch_size"], values["data"]
    return Configuration(**{"global_batch_size": size * m * data} | values)


def _any_schedule(draw: Draw) -> tuple[str, int]:
    schedule = draw.choice(("flush", "2bw", "gpipe", "interleaved"))
    return schedule, 2 if schedule == "interleaved" else 1


def _pipeline(draw: Draw) -> int:
    return draw.choice((2, 3, 4, 6, 8, 12, 16))


def _layers_of(draw: Draw, stages: int) -> int:
    return stages * draw.choice((1, 2, 4))


# --- kinds


def _experts(draw: Draw) -> Chosen:
    (schedule, v), p, (hidden, heads, _) = _any_schedule(draw), _pipeline(draw), draw.choice(SIZES[:5])
    asked = _configuration(
        draw, p, v, schedule=schedule, sequence_parallel=True, expert=draw.choice((1, 2, 4, 8)),
        expert_tensor=draw.choice((None, 1)),
    )  # fmt: skip
    experts = Experts(
        count=draw.choice((8, 16, 64)), topk=draw.choice((1, 2, 4)), ffn_hidden_size=hidden // draw.choice((1, 2)),
        shared_ffn_hidden_size=draw.choice((0, hidden)), layers=draw.choice((1, 2)),
        capacity_factor=draw.choice((None, 1.25)),
    )  # fmt: skip
    return asked, _model(draw, _layers_of(draw, p * v), hidden, heads, experts=experts), MEGATRON_CORE


def _context(draw: Draw) -> Chosen:
    (schedule, v), p, (hidden, heads, _) = _any_schedule(draw), _pipeline(draw), draw.choice(SIZES[:5])
    asked = _configuration(draw, p, v, schedule=schedule, context=draw.choice((2, 4, 8)))
    software = replace(draw.choice((FLASH, OVERLAPPED)), gathers_keys=draw.random() < 0.4)
    return asked, _model(draw, _layers_of(draw, p * v), hidden, heads), software


def _sharded(draw: Draw) -> Chosen:
    hidden, heads, _ = draw.choice(SIZES[:5])
    data = draw.choice((2, 4, 8, 16, 64, 128))
    shards = draw.choice([each for each in (data, data // 2, data // 8) if each >= 2])
    asked = _configuration(
        draw, 1, data=data, distributed_optimizer=False, sharding=Sharding(stage=draw.choice((2, 3)), shards=shards)
    )
    software = draw.choice((FLASH, TORCHTITAN, replace(MEGATRON_2021, sharding=DEEPSPEED), replace(FLASH, fp8=True)))
    return asked, _model(draw, draw.choice((2, 8, 24, 48)), hidden, heads), software


def _predicted(draw: Draw) -> Chosen:
    p, (hidden, heads, _) = draw.choice((1, 2, 4, 8, 16)), draw.choice(SIZES)
    options = {"provisional": "stage"}
    if draw.random() < 0.5:
        options = {"provisional": "uniform", "provisional_microbatches": 1}
    d = draw.choice((1, 2, 8))
    asked = _configuration(
        draw, p, schedule="2bw", data=d, distributed_optimizer=d > 1 and draw.random() < 0.5,
        provisional_reduce=d > 1 and draw.random() < 0.5, balance=p > 2 and draw.random() < 0.2, **options,
    )  # fmt: skip
    return asked, _model(draw, _layers_of(draw, p), hidden, heads), draw.choice((FLASH, MEGATRON_CORE, OVERLAPPED))


def _one_buffer(draw: Draw) -> Chosen:
    p, (hidden, heads, _) = _pipeline(draw), draw.choice(SIZES)
    asked = _configuration(draw, p, schedule="2bw", single_gradient_buffer=True)
    return asked, _model(draw, _layers_of(draw, p), hidden, heads), draw.choice((FLASH, MEGATRON_CORE))


def _uneven(draw: Draw) -> Chosen:
    (schedule, v), p, (hidden, heads, _) = _any_schedule(draw), _pipeline(draw), draw.choice(SIZES)
    if v == 1:
        schedule = draw.choice((schedule, "bpipe"))
    layers = [draw.randint(2, 4)] * (p * v)
    if draw.random() < 0.5:
        layers = [each - draw.randint(0, 1) for each in layers]
    layers[-1] -= 1
    asked = _configuration(draw, p, v, schedule=schedule, layers=tuple(layers))
    return asked, _model(draw, sum(layers), hidden, heads), draw.choice((FLASH, MEGATRON_CORE, MEGATRON_2021))


def _hosted(draw: Draw) -> Chosen:
    p, v, d, (hidden, heads, _) = draw.choice((1, 2)), draw.choice((2, 4)), draw.choice((1, 2, 4)), draw.choice(SIZES)
    asked = _configuration(
        draw, p, v, schedule="l2l", data=d, recompute="none", distributed_optimizer=False,
        resident_stages=draw.choice((1, 2, 3)), host_update=draw.choice(("eager", "deferred")),
        stash=draw.choice(("device", "host")), gathers_fetch=d > 1 and draw.random() < 0.4,
    )  # fmt: skip
    return asked, _model(draw, p * v, hidden, heads), draw.choice((FLASH, MEGATRON_CORE))


_MAKERS: dict[str, Callable[[Draw], Chosen]] = {
    "experts": _experts, "context": _context, "sharded": _sharded, "predicted": _predicted, "one-buffer": _one_buffer,
    "uneven": _uneven, "hosted": _hosted,
}  # fmt: skip
