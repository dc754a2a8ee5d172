"""Which kernel of torch's optimizers takes the steps.

torch steps parameters one by one, an operation after another (`loop`), or each in one pass of a compiled kernel
(`fused`): on a CPU several times faster; the last bits may differ. The kernel is in the optimizer's groups, which a
checkpoint brings along, so it is chosen after loading.
"""

import torch

from megatron.core.optimizer import MegatronOptimizer

KERNELS = ("loop", "fused")
_WITH_KERNELS = (torch.optim.Adam, torch.optim.SGD)  # and AdamW, which is an Adam


def choose_kernel(optimizer: MegatronOptimizer, kernel: str) -> None:
    """Have `optimizer` step with a kernel of `KERNELS`. What is not torch's (Apex, Transformer Engine) has one only."""
    for each in getattr(optimizer, "chained_optimizers", [optimizer]):
        inner = getattr(each, "optimizer", None)
        if isinstance(inner, _WITH_KERNELS):
            for group in inner.param_groups:
                group["fused"] = True if kernel == "fused" else None
