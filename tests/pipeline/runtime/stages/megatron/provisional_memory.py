"""What a rank with predicted weights allocates for weights and gradients, counted while a tiny GPT trains."""

from collections.abc import Iterable
from unittest import mock

import torch

from megatron.pipeline.runtime.stages.megatron.update import MegatronWeightUpdate
from megatron.pipeline.runtime.update.elementwise_step import RULES
from megatron.pipeline.runtime.update.versions import WeightVersions
from megatron.pipeline.runtime.update.weight_prediction import PredictedVersions
from tests.pipeline.runtime.stages.megatron import megatron_cases as cases
from tests.pipeline.runtime.stages.megatron.megatron_model import parallel


def count(**options) -> dict[str, int]:
    """Train one case on this rank; bytes at the most of its weights, its gradients, and what a prediction copies where
    the optimizer's rule is not known.
    """
    case = cases.Case(**options)
    with parallel(case), mock.patch.dict(RULES, clear=True):
        stages, update = cases.build(case)
        held = _watch(update)
        copied = _watch_copies(update)
        engine = cases.engine_of(case, stages, update)
        for batch in range(len(case.batches)):
            info = cases.batch_info(case, batch)
            engine.run_batch(info.num_microbatches, info.num_samples)
        engine.drain()
        engine.close()
        versions, slots = update.versions, update._gradients._slots
        return {
            "weights": sum(_bytes(slot.values()) for slot in versions._slots) + _bytes(_true(versions).values()),
            "copies": max(copied),
            "gradients": sum(_bytes(slot.views.values()) for slot in slots) + max(held),
        }


def _watch(update: MegatronWeightUpdate) -> list[int]:
    """Bytes of the copies of gradients that are held, after each that is made."""
    held = [0]

    def watched(keep):
        def kept(*args) -> None:
            keep(*args)
            batches = update._batches.values()
            whole = sum(_bytes(batch.partial.gradients.views.values()) for batch in batches if batch.partial)
            tied = sum(batch.partial_embed.gradients.nbytes for batch in batches if batch.partial_embed)
            held.append(whole + tied)

        return kept

    update.hold, update.hold_embed = watched(update.hold), watched(update.hold_embed)
    return held


def _watch_copies(update: MegatronWeightUpdate) -> list[int]:
    """Bytes of the copies from which each provisional step is taken: parameters, gradients and moments."""
    copied = [0]
    if update._prediction is not None:
        [provisional] = update._prediction._provisionals
        step = provisional._step

        def watched(group, copies) -> None:
            step(group, copies)
            state = provisional._optimizer.state
            moments = sum(_bytes(each for each in state[own].values() if each.dim()) for own in copies)
            copied.append(sum(moved.nbytes + moved.grad.nbytes for moved in copies.values()) + moments)

        provisional._step = watched
    return copied


def _true(versions: WeightVersions) -> dict[str, torch.Tensor]:
    """The true weights, where they are kept beside the versions."""
    return versions._true if isinstance(versions, PredictedVersions) else {}


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)
