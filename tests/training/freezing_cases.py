"""What tests of freezing watch in a run on the ranks: reports by batch, and the optimizer's state under the names of
the whole model.
"""

import torch
from torch import Tensor

from megatron.pipeline.runtime.megatron_optimizers import single_optimizer
from tests.training.run_case import numbered_names


def watch(run):
    """For `train_case`."""
    report, reports = run.reporter.iteration, []

    def watching(batch, progress) -> None:
        report(batch, progress)
        reports.append({"losses": batch.losses, "norm": batch.grad_norm, "layers": list(batch.layers_squared),
                        "num_frozen": run.freezing.num_frozen if run.freezing else 0, "scale": batch.loss_scale,
                        "overflow": batch.overflow, "lr": batch.learning_rate})  # fmt: skip

    run.reporter.iteration = watching
    return lambda: {"batches": reports, "moments": moments(run), "num_frozen": run.freezing and run.freezing.num_frozen}


def moments(run) -> dict[str, dict]:
    """Each trained parameter's state, where the rank has it whole."""
    from megatron.core.utils import unwrap_model

    inner = single_optimizer(run.optimizer)
    names = {each: name for chunk in run.chunks for name, each in numbered_names(unwrap_model(chunk))}
    if hasattr(inner, "float16_groups"):
        pairs = [pair for halves, masters in zip(inner.float16_groups, inner.fp32_from_float16_groups, strict=True)
                 for pair in zip(halves, masters, strict=True)]  # fmt: skip
    elif inner.optimizer is None or hasattr(inner, "model_param_group_index_map"):
        return {}
    else:
        pairs = [(each, each) for group in inner.optimizer.param_groups for each in group["params"]]
    return {names[model]: {key: value.clone() if isinstance(value, Tensor) else value
                           for key, value in inner.optimizer.state[master].items()}
            for model, master in pairs}  # fmt: skip
