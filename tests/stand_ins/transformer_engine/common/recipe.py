"""Recipes of FP8; those of FP4 are not there.

Those of Transformer Engine are pydantic's dataclasses, which leave out arguments that they do not know, such as the
`override_linear_precision` that megatron.core passes and Transformer Engine has not read since 2.0.
"""

import enum
import inspect
from typing import NamedTuple

from .._release import missing


class _Largest(NamedTuple):
    max_fwd: float
    max_bwd: float


class Format(enum.Enum):
    E4M3 = _Largest(448, 448)
    E5M2 = _Largest(57344, 57344)
    HYBRID = _Largest(448, 57344)


class Recipe:
    fp8_format = Format.HYBRID

    def __init__(self, **given):
        """Attributes of the class, with other values for those that it has."""
        of_class = dict(inspect.getmembers(type(self)))
        self.fp8_format = self.fp8_format
        vars(self).update((name, value) for name, value in given.items() if name in of_class)
        assert self.fp8_format is not Format.E5M2, "Pure E5M2 training is not supported."
        if getattr(self, "fp8_dpa", False) or getattr(self, "fp8_mha", False):
            raise NotImplementedError("the stand-in of Transformer Engine has no attention in FP8")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({vars(self)})"

    @classmethod
    def delayed(cls) -> bool:
        return issubclass(cls, DelayedScaling)


class DelayedScaling(Recipe):
    margin, amax_history_len, amax_compute_algo, reduce_amax = 0, 1024, "max", True
    fp8_dpa = fp8_mha = False


class Float8CurrentScaling(Recipe):
    fp8_dpa = fp8_mha = False


class Float8BlockScaling(Recipe):
    fp8_format = Format.E4M3


class MXFP8BlockScaling(Recipe):
    fp8_format = Format.E4M3


[NVFP4BlockScaling] = missing("NVFP4BlockScaling")
