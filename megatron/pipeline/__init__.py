"""Pipeline programs: built, proved, simulated and drawn without torch; `runtime` executes them.

`Pipeline` trains any ``nn.Module`` with such a program. `Pipeline` needs torch, so it is imported on first use.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron.pipeline.library.pipeline import Pipeline

__all__ = ["Pipeline"]

_LAZY = {"Pipeline": "megatron.pipeline.library.pipeline"}


def __getattr__(name: str) -> object:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_LAZY[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
