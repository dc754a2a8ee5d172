"""megatron.core's optimizers, as far as a weight update that takes their step apart has to know them."""

from torch import Tensor

from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer, Float16OptimizerWithFloat16Params, FP32Optimizer

MegatronCoreOptimizer = FP32Optimizer | Float16OptimizerWithFloat16Params | DistributedOptimizer


def steps_parameters_in_place(optimizer: MegatronCoreOptimizer) -> bool:
    """True if the optimizer updates some of the model's parameters themselves and not masters of them."""
    if isinstance(optimizer, DistributedOptimizer) or optimizer.is_stub_optimizer:
        return False
    if isinstance(optimizer, FP32Optimizer):
        return True
    return any(optimizer.fp32_from_fp32_groups)


def single_optimizer(optimizer: MegatronOptimizer) -> MegatronCoreOptimizer:
    """The one that owns all parameters of the rank's chunks. Raises ValueError where there are several."""
    if not isinstance(optimizer, ChainedOptimizer):
        return optimizer
    if len(optimizer.chained_optimizers) != 1:
        raise ValueError(
            f"The model needs {len(optimizer.chained_optimizers)} chained optimizers (expert parameters?): the "
            "pipeline's weight update supports one."
        )
    return optimizer.chained_optimizers[0]


def copy_gradients(optimizer: MegatronCoreOptimizer) -> None:
    """Give the optimizer's parameters their gradients, in FP32, without any collective."""
    if isinstance(optimizer, FP32Optimizer):
        optimizer.prepare_grads()
    elif not optimizer.is_stub_optimizer:
        optimizer._copy_model_grads_to_main_grads()


def masters_of(optimizer: MegatronCoreOptimizer) -> dict[Tensor, Tensor]:
    """Parameter of the model -> its FP32 master, for those that have one. Not of the distributed optimizer."""
    if optimizer.is_stub_optimizer or isinstance(optimizer, FP32Optimizer):
        return {}
    groups = zip(optimizer.float16_groups, optimizer.fp32_from_float16_groups, strict=True)
    return {model: master for group in groups for model, master in zip(*group, strict=True)}


def gradients_of(optimizer: MegatronCoreOptimizer) -> list[Tensor]:
    """Those that its parameters have."""
    if optimizer.is_stub_optimizer:
        return []
    return [param.grad for param in optimizer.get_parameters() if param.grad is not None]
