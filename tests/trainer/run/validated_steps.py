"""What a run says of its steps and leaves of its state, for the tests of optimistic steps."""

import hashlib
from collections.abc import Callable
from typing import Any

import torch

from megatron.pipeline.runtime.stages.megatron.optimizers import optimizers_of
from megatron.trainer.start_up.run import Run


def state_and_validations(run: Run) -> Callable[[], dict[str, Any]]:
    """For `watch`: digests of weights, masters, moments and counters at the end, and whether each step was right."""
    validate, found = getattr(run.update, "validate", None), []

    def noting(version: int) -> bool:
        found.append(validate(version))
        return found[-1]

    run.update.validate = noting
    return lambda: {"state": _state(run), "validations": found, "copied": _bytes_of_copy(run)}


def _state(run: Run) -> dict[str, Any]:
    # As text, in which a NaN equals a NaN.
    state: dict[str, Any] = {"numbers": repr((run.update.state_dict(), run.scheduler.state_dict()))}
    for number, chunk in enumerate(run.chunks):
        state |= {f"{number} {name}": _digest(each) for name, each in chunk.named_parameters()}
    for number, each in enumerate(optimizers_of(run.optimizer)):
        scaler = getattr(each, "grad_scaler", None)
        state[f"scaler {number}"] = scaler and {name: float(value) for name, value in vars(scaler).items()}
        for group_number, group in enumerate(each.optimizer.param_groups):
            place = f"{number} {group_number}"
            state[f"{place} rates"] = {name: value for name, value in group.items() if isinstance(value, float)}
            for index, master in enumerate(group["params"]):
                state[f"{place} {index}"] = _digest(master)
                for name, value in each.optimizer.state[master].items():
                    state[f"{place} {index} {name}"] = _digest(torch.as_tensor(value))
    return state


def _bytes_of_copy(run: Run) -> int:
    """The bytes of the copy that the run keeps, without the optimizer's counters of steps."""
    kept = getattr(run.update, "kept", None)
    copies = [] if kept is None else [each for each in kept._copies.values() if each.numel() > 1]
    return sum(each.numel() * each.element_size() for each in copies)


def _digest(tensor: torch.Tensor) -> str:
    return hashlib.blake2b(tensor.detach().reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
