"""What software does unless it is told otherwise, as far as an entry leaves it out.

torchtitan splits sequences over its tensor ranks always (parallelize_llama.py), and recomputes selectively by its
default configuration (`activation_checkpoint.mode`). In 2025 torch.compile came to its loss; in December 2024 that was
switched off (train.py).
"""

import re
from collections.abc import Callable
from dataclasses import replace

from megatron.planner.job.configuration import Configuration
from megatron.planner.job.software import TORCHTITAN, TORCHTITAN_2025, Software
from megatron.planner.memory.activations import RecomputeScope

_2025_OR_LATER = re.compile(r"20(2[5-9]|[3-9]\d)")


def of_its_year(software: Software, text: str) -> Software:
    """The version that a text dates."""
    return TORCHTITAN_2025 if software is TORCHTITAN and _2025_OR_LATER.search(text) else software


def with_defaults(
    configuration: Configuration, software: Software, *, says_recompute: bool, assume: Callable[[str], None]
) -> Configuration:
    """The configuration with what the software does by default. `assume` is told."""
    if software not in (TORCHTITAN, TORCHTITAN_2025):
        return configuration
    if configuration.tensor > 1 and not configuration.sequence_parallel:
        assume("sequence parallelism, as torchtitan has it beside tensor parallelism")
        configuration = replace(configuration, sequence_parallel=True)
    if not says_recompute:
        assume("selective recomputation in its place, as torchtitan has by default")
        configuration = replace(configuration, recompute=RecomputeScope.ATTENTION)
    return configuration
