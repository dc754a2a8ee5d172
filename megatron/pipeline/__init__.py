"""Pipeline programs: built, proved, simulated and drawn without torch; `runtime` executes them.

`Pipeline` trains any ``nn.Module`` with such a program, and `synthesize` makes one for a `Problem` with `Costs`. They
are imported on first use: `Pipeline` needs torch, and few commands search.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron.pipeline.library.pipeline import Pipeline
    from megatron.pipeline.simulate.costs import Costs
    from megatron.pipeline.synthesis import Problem, synthesize

__all__ = ["Costs", "Pipeline", "Problem", "synthesize"]

_LAZY = {
    "Costs": "megatron.pipeline.simulate.costs",
    "Pipeline": "megatron.pipeline.library.pipeline",
    "Problem": "megatron.pipeline.synthesis",
    "synthesize": "megatron.pipeline.synthesis",
}


def __getattr__(name: str) -> object:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_LAZY[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
