"""Training whose linears multiply in FP8: what it needs, and what is not modelled of it.

It is that of Transformer Engine with a scale for each tensor. The linears of layers multiply at the FP8 peak (work.py);
the attention's core, norms, embedding and head stay in 16 bits, and so do weights, gradients and what ranks send.
"""

from megatron.planner.job.configuration import Configuration
from megatron.planner.job.devices import Device
from megatron.planner.memory.architecture import Architecture

FP8_RECIPES = ("delayed", "tensorwise", "mxfp8")
"""Of Transformer Engine: a scale for each tensor, from earlier batches or from this one; or one for 32 elements, which
Blackwell's units multiply by themselves. None has a price of its own."""
_SCALES_BLOCKS = ("B200", "GB200", "GB300")
_WIDTH, _TOKENS = 16, 8  # what divides rows and columns of a product in FP8


def refuse_recipe(recipe: str | None, gpu: str) -> None:
    """Raises ValueError where such scales are not in the GPU's units."""
    if recipe == "mxfp8" and gpu not in _SCALES_BLOCKS:
        raise ValueError(
            f"config.fp8_recipe is 'mxfp8', which {gpu} does not multiply; give one of {', '.join(_SCALES_BLOCKS)}, or "
            "another recipe"
        )


def refuse_fp8(gpu: str, device: Device, model: Architecture, configuration: Configuration) -> None:
    """Raises ValueError for what cannot be, or has no price. `gpu`: the device's name."""
    if device.peak_teraflops_fp8 is None:
        raise ValueError(f"{gpu} has no units for FP8; give a GPU that has, as H100, or another precision")
    is_split = configuration.splits_backward
    for is_asked, what, reason in (
        (configuration.is_hosted, configuration.schedule, "weights that come from the host are cast each time"),
        (is_split, configuration.schedule, "it splits backwards, for which Transformer Engine's linears are not taken"),
        (configuration.predicts, "provisional weights", "each prediction is cast besides"),
    ):
        if is_asked:
            raise ValueError(f"FP8 with {what} is not modelled: {reason}; give another schedule or precision")
    t = configuration.tensor
    tokens = configuration.micro_batch_size * (model.sequence_length // configuration.context)
    wide = model.ffn_hidden_size * (2 if model.gated else 1)
    sizes = [
        (model.hidden_size, _WIDTH, "columns of the residual stream"),
        (model.query_width // t, _WIDTH, "columns of a rank's queries"),
        (model.key_width // t, _WIDTH, "columns of a rank's keys"),
        (wide // t, _WIDTH, "columns of a rank's feed-forward layer"),
        (tokens, _TOKENS, "tokens of a microbatch"),
    ]
    if model.experts:
        columns = model.experts.ffn_hidden_size // configuration.expert_degrees.tensor
        sizes.append((columns, _WIDTH, "columns of a rank's part of an expert"))
    for size, divisor, what in sizes:
        if size % divisor:
            raise ValueError(
                f"{what} are {size}, and products in FP8 take multiples of {divisor}; give another precision"
            )
