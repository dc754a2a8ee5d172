"""Configurations that the planner refuses.

They have context or expert degrees that do not fit the model, or FP8 training that is impossible or not modelled.

The modelled FP8 recipe is that of Transformer Engine with a scale for each tensor. The linears of layers multiply at
the FP8 peak (work.py). The attention's core, norms, embedding and head stay in 16 bits. Weights, gradients and the
tensors that ranks send stay in 16 bits, too.
"""

from megatron.planner.job.configuration import Configuration
from megatron.planner.job.devices import Device
from megatron.planner.job.software import Software
from megatron.planner.memory.architecture import Architecture, Latents
from megatron.planner.memory.recompute import RecomputeScope

RING, GATHER, HEADS = "p2p", "all_gather", "a2a"
"""Values of --cp-comm-type: how ranks that share sequences exchange keys and values."""
KNOWN_TO_ENGINE = {"windows": (GATHER, HEADS), "sinks": (HEADS,), "latents": (RING,)}
"""Feature of an attention -> the exchanges with which Transformer Engine supports it. Latents: all exchanges since
Transformer Engine 2.15."""

OVERLAPPED = ("flush", "interleaved")
"""Schedules whose microbatches megatron.core merges: token copies of one microbatch are sent while another computes.
megatron.core merges them under `flush` only without a pipeline."""


def refuse_shares(model: Architecture, configuration: Configuration, software: Software) -> None:
    """Raise ValueError for context or expert parallelism that megatron.core refuses or the planner does not model.

    Also raised for Muon with weights on the host.
    """
    _refuse_context(model, configuration, software)
    _refuse_experts(model, configuration, software)
    if configuration.is_hosted and software.training_state(configuration).muon is not None:
        raise ValueError(
            f"{configuration.schedule} with Muon is not modelled, since nothing says how fast a host orthogonalises; "
            "choose another schedule"
        )


def _refuse_context(model: Architecture, configuration: Configuration, software: Software) -> None:
    context, length = configuration.context, model.sequence_length
    if context == 1:
        return
    if length % (2 * context):  # each rank has a part of the beginning and a part of the end, for a causal mask
        raise ValueError(
            f"sequences of {length} do not divide into two parts for each of {context} context parallel ranks; change "
            "context"
        )
    if configuration.sequence_parallel and length // context % configuration.tensor:
        raise ValueError(
            f"the {length // context} tokens of a context parallel rank do not divide by tensor "
            f"{configuration.tensor}; change one of them, or do without sequence parallelism"
        )
    if not software.of(configuration).flash_attention:
        raise ValueError(
            f"context parallelism over {context} ranks needs flash attention, since unfused attention takes whole "
            "sequences; choose flash attention, or one rank"
        )
    exchange = GATHER if software.gathers_keys else RING
    for what, is_there in (("windows", model.windows), ("sinks", model.sinks), ("latents", model.latents)):
        known = [each for each in KNOWN_TO_ENGINE[what] if each != HEADS]
        if is_there and exchange not in known:
            remedy = f"by {known[0]}; give --cp-comm-type {known[0]}" if known else (
                f"by {HEADS} alone, which has no price; choose context 1"
            )  # fmt: skip
            raise ValueError(f"context parallel ranks share sequences with {what} {remedy}")
    if model.patch_elements or model.num_classes:
        raise ValueError("context parallelism takes sequences of tokens, not images or classes; choose context 1")


def _refuse_experts(model: Architecture, configuration: Configuration, software: Software) -> None:
    experts, degrees = model.experts, configuration.expert_degrees
    if experts is None:
        if configuration.expert > 1 or configuration.expert_tensor not in (None, configuration.tensor):
            name = "expert" if configuration.expert > 1 else "expert_tensor"
            raise ValueError(f"{name} is {getattr(configuration, name)}, and the model has no experts; leave it out")
        return
    if configuration.is_hosted:
        raise ValueError(f"{configuration.schedule} with experts is not modelled; choose another schedule")
    if configuration.sharding is not None:
        raise ValueError("experts whose weights are split over replicas (FSDP, ZeRO) are not modelled; leave that out")
    if not software.fuses_elementwise or software.keeps_every_other_product:
        raise ValueError("experts are modelled with megatron.core's kernels and recomputation; give another software")
    if software.overlaps_experts:
        _refuse_overlap(configuration)
    if experts.count % degrees.parallel:
        raise ValueError(f"{experts.count} experts do not divide over {degrees.parallel} ranks; change expert")
    if degrees.parallel * degrees.tensor < configuration.tensor:
        raise ValueError(
            f"expert {degrees.parallel} with expert_tensor {degrees.tensor} would leave copies of an expert on the "
            f"{configuration.tensor} tensor ranks, which the trainer refuses; raise expert, or leave expert_tensor out"
        )
    if experts.ffn_hidden_size % degrees.tensor:
        raise ValueError(
            f"{experts.ffn_hidden_size} columns of an expert do not divide by expert_tensor {degrees.tensor}; change it"
        )
    if configuration.tensor > 1 and not configuration.sequence_parallel:
        raise ValueError(
            f"experts with tensor {configuration.tensor} need sequence parallelism, else each tensor rank would route "
            "all tokens; turn it on"
        )


def _refuse_overlap(configuration: Configuration) -> None:
    """Raise ValueError unless megatron.core's conditions for --overlap-moe-expert-parallel-comm hold."""
    is_plain = configuration.pipeline > 1 and configuration.virtual == 1
    for is_asked, what, remedy in (
        (configuration.expert == 1, "expert 1", "give more, or do without"),
        (is_plain, "one stage on each rank of a pipeline", "interleave"),
        (configuration.schedule not in OVERLAPPED, configuration.schedule, "interleave"),
        (configuration.recompute is RecomputeScope.LAYER, "recompute layer", "choose another scope"),
    ):
        if is_asked:
            raise ValueError(f"copies of tokens beside another microbatch do not go with {what}; {remedy}")


FP8_RECIPES = ("delayed", "tensorwise", "mxfp8")
"""Recipes of Transformer Engine: a scale for each tensor, from earlier batches (`delayed`) or from this one
(`tensorwise`), or a scale for every 32 elements (`mxfp8`), which Blackwell's units apply. All have the same price."""
_SCALES_BLOCKS = ("B200", "GB200", "GB300")
_WIDTH, _TOKENS = 16, 8  # divisors of the columns and rows of a product in FP8


def refuse_recipe(recipe: str | None, gpu: str, name: str = "config.fp8_recipe") -> None:
    """Raise ValueError if the GPU's units do not support the scales of the FP8 recipe, which `name` gives."""
    if recipe == "mxfp8" and gpu not in _SCALES_BLOCKS:
        raise ValueError(
            f"{name} is 'mxfp8', which {gpu} does not multiply; give one of {', '.join(_SCALES_BLOCKS)}, or another "
            "recipe"
        )


def refuse_units(gpu: str, device: Device) -> None:
    """Raise ValueError if the GPU does not multiply in FP8."""
    if device.peak_teraflops_fp8 is None:
        raise ValueError(f"{gpu} has no units for FP8; give a GPU that has, as H100, or another precision")


def undivided_in_fp8(
    *,
    tensor: int,
    hidden: int,
    heads: tuple[int, int],
    latents: tuple[Latents, int] | None,
    feed_forward: tuple[int, ...],
    expert: int,
    tokens: int,
    recipe: str = "delayed",
) -> str | None:
    """The first size that is no multiple of what FP8 needs in Transformer Engine, in words; None: all sizes are.

    Args:
        tensor: tensor parallel size, over which the widths of heads and feed-forward layers are divided.
        heads: widths of all queries, and of all keys.
        latents: sizes of latent attention, and its number of heads; None: other attention, with the widths `heads`.
        feed_forward: widths of the feed-forward layer and of the shared expert; 0: there is none.
        expert: width of a rank's part of an expert; 0: there are none.
        tokens: number of tokens of a microbatch on a rank.
    """
    width, rows = (32, 32) if recipe == "mxfp8" else (_WIDTH, _TOKENS)
    names = "a rank's queries", "a rank's keys"
    columns = {name: size // tensor for name, size in zip(names, heads, strict=True)}
    if latents is not None:
        own, number = latents
        columns = {
            "the latents of queries": own.query_rank,
            "the latents of keys": own.key_rank,
            "rotated keys": own.rotated,
            "a rank's values": own.value * number // tensor,
        }
    columns |= {"the residual stream": hidden, "a rank's part of an expert": expert}
    names = "a rank's feed-forward layer", "a rank's shared expert"
    columns |= {name: size // tensor for name, size in zip(names, feed_forward, strict=True)}
    sizes = [(f"columns of {name}", size, width) for name, size in columns.items()]
    for what, size, divisor in (*sizes, ("tokens of a microbatch on a rank", tokens, rows)):
        if size % divisor:
            return f"{what} are {size}, and products in FP8 take multiples of {divisor}"
    return None


def refuse_fp8(gpu: str, device: Device, model: Architecture, configuration: Configuration) -> None:
    """Raise ValueError for FP8 training that is impossible or not modelled. `gpu`: the device's name."""
    refuse_units(gpu, device)
    is_split = configuration.splits_backward
    for is_asked, what, reason in (
        (configuration.is_hosted, configuration.schedule, "weights that come from the host are cast each time"),
        (is_split, configuration.schedule, "it splits backwards, and casts between I and W have no price"),
        (configuration.predicts, "provisional weights", "each prediction is cast besides"),
    ):
        if is_asked:
            raise ValueError(f"FP8 with {what} is not modelled: {reason}; give another schedule or precision")
    experts, t = model.experts, configuration.tensor
    undivided = undivided_in_fp8(
        tensor=t,
        hidden=model.hidden_size,
        heads=(model.query_width, model.key_width),
        latents=model.latents and (model.latents, model.num_attention_heads),
        feed_forward=(model.ffn_hidden_size, experts.shared_ffn_hidden_size if experts else 0),
        expert=experts.ffn_hidden_size // configuration.expert_degrees.tensor if experts else 0,
        tokens=configuration.micro_batch_size
        * (model.sequence_length // configuration.context)
        // (t if configuration.sequence_parallel else 1),
    )
    if undivided is not None:
        raise ValueError(f"{undivided}; give another precision")
