"""The data items and random numbers that a stage draws for each microbatch.

**Items.** Problem: an iterator yields microbatches in order, but a program may have a stage compute them in another
order. Then stages would use different samples for the same microbatch. In addition, a recompute needs the items of its
forward.

Solution: `DrawnData` draws the items of skipped microbatches ahead, one item per microbatch, and stores them until
their forward. `Recorder` stores the items of a forward. For a batch that may have to begin again, all items are kept.

**Random numbers.** Dropout masks depend on the layer and the sample, not on the schedule or the cut into stages. So do
the scores of routers that choose experts at random. Problem: if a random-number generator runs on through a stage, its
masks depend on how the layers are cut into stages, on the order in which a schedule runs the microbatches, on resumes,
and on whether a forward is recomputed.

Solution: seed before every layer. A hook seeds the device's generator and the states of megatron.core's tracker. The
hook runs before every transformer layer, before the embedding, and before each module with a `dropout_place` (a stack's
name and a number, such as ("head", 0)). The seed is a hash of the run's seed, the microbatch's first sample, the
stack's name and the layer's global number, and, for states that differ between tensor ranks, the tensor rank. Ranks
that share a sequence (context parallelism) draw the masks of their own tokens, so their rank enters, too. The sample's
index counts over the whole run and over all data-parallel replicas, so replicas differ. A recomputed layer runs the
same hook and so draws the same masks. After each microbatch the states are restored, so other users of the generators
see no change. A model that draws nothing gets no hooks.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from megatron import backend
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.tensor_parallel.random import get_data_parallel_rng_tracker_name
from megatron.core.transformer.moe.router import Router
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer
from megatron.core.transformer.transformer_layer import BaseTransformerLayer
from megatron.pipeline.program.copies import Share


class DrawnData:
    """The training data of one stage. Each microbatch may be requested once."""

    def __init__(self, share: Share | None = None) -> None:
        """Begin before any microbatch. `share`: the stage's share of a batch where it is a copy; None: all."""
        self._share = share
        self._next: int | None = None  # the microbatch that the iterator yields next, or one that it leaves out
        self._ahead: dict[int, list[Any]] = {}  # microbatch -> its items
        self._kept: dict[int, list[Any]] | None = None  # the same for microbatches that may be requested again

    def of(self, microbatch: int, source: Iterator | None, *, first: int) -> Iterator | None:
        """An iterator over the items of a microbatch.

        Args:
            microbatch: its index over the whole run.
            source: the data iterator; None if the stage reads no data.
            first: the first microbatch of the batch. At the first call the iterator must be at this microbatch. If the
                stage has a share, the iterator must be at the first microbatch of the share.
        """
        if source is None:
            return None
        drawn = self._of(microbatch, source, first=first)
        return drawn if self._kept is None else Recorder(drawn, self._kept.setdefault(microbatch, []))

    def keep(self) -> None:
        """Keep the items of the microbatches that are requested from now on."""
        self._kept = {}

    def forget(self) -> None:
        """Forget the kept items, and keep no more."""
        self._kept = None

    def give_again(self) -> None:
        """Let the kept items be requested once more."""
        self._ahead |= self._kept or {}
        self.forget()

    def _of(self, microbatch: int, source: Iterator, *, first: int) -> Iterator:
        if microbatch in self._ahead:
            return iter(self._ahead.pop(microbatch))
        for passed_over in range(first if self._next is None else self._next, microbatch):
            if self._share is None or self._share.takes(passed_over - first):
                self._ahead[passed_over] = [next(source)]
        self._next = microbatch + 1
        return source


class Recorder:
    """An iterator over `source` that appends each item to `drawn`, so that a recompute can use the same data."""

    def __init__(self, source: Iterator, drawn: list[Any]) -> None:
        self._source = source
        self._drawn = drawn

    def __iter__(self) -> "Recorder":
        return self

    def __next__(self) -> Any:
        item = next(self._source)
        self._drawn.append(item)
        return item


_DEFAULT_STATE = "default-rng"  # the tracker's name for the generator outside of every fork
_EMBEDDING_NUMBER = 0  # layers count from 1


class SeededDropout:
    """Seeds every layer of one stage's model for the microbatch being computed.

    Args:
        model: the stage's part of the model, wrapped or not.
        seed: the run's seed.
        tensor_rank: rank in the tensor-parallel group (default: megatron.core's).

    Attributes:
        active: whether the model has dropout, or routers that choose at random.

    Raises:
        ValueError: the model has a dropout that no hook would seed, outside of its layers, its embedding and its
            modules with a `dropout_place`.
    """

    def __init__(self, model: nn.Module, *, seed: int, tensor_rank: int | None = None) -> None:
        self._seed = seed
        self._tensor_rank = parallel_state.get_tensor_model_parallel_rank() if tensor_rank is None else tensor_rank
        self._context_rank = parallel_state.get_context_parallel_rank()
        self._generator = torch.Generator(device=backend.device())
        self._sample: int | None = None
        self._embedding_number = _EMBEDDING_NUMBER
        self._chooses = _chooses(model)  # in evaluations, too
        self.active = self._chooses or _drops(model)
        if self.active:
            self._register(model)

    def _register(self, model: nn.Module) -> None:
        seeded = []
        for name, module in model.named_modules():
            if isinstance(module, BaseTransformerLayer):
                stack = name.split(".layers.")[0].split(".")[-1]
                module.register_forward_pre_hook(self._hook(stack, module.layer_number))
                seeded.append(name)
            elif hasattr(module, "dropout_place"):
                module.register_forward_pre_hook(self._hook(*module.dropout_place))
                seeded.append(name)
            elif isinstance(module, LanguageModelEmbedding):
                module.register_forward_pre_hook(self._seed_embedding)
                seeded.append(name)
            elif isinstance(module, MultiTokenPredictionLayer):  # it embeds, too, with the same module
                module.register_forward_pre_hook(self._number_embedding(module.layer_number))
                module.register_forward_hook(self._number_embedding(_EMBEDDING_NUMBER))
        for name, module in model.named_modules():
            if isinstance(module, nn.Dropout) and module.p > 0 and not name.startswith(tuple(f"{s}." for s in seeded)):
                raise ValueError(
                    f"The dropout {name} lies outside of the transformer layers and the embedding, so its random "
                    "numbers would depend on the pipeline: set its rate to 0."
                )

    @contextmanager
    def microbatch(self, sample: int) -> Iterator[None]:
        """Context for a forward, recompute or backward of the microbatch whose first sample has index `sample`."""
        if not self.active:
            yield
            return
        tracker = tensor_parallel.get_cuda_rng_tracker()
        device_state, tracker_states = backend.device_rng_state(), tracker.get_states()
        self._sample = sample
        try:
            yield
        finally:
            self._sample = None
            tracker.set_states(tracker_states)
            backend.set_device_rng_state(device_state)

    def _hook(self, stack: str, number: int):
        def seed_layer(module: nn.Module, inputs: tuple) -> None:
            if self._sample is not None and (module.training or self._chooses):
                self._seed_all(stack, number)

        return seed_layer

    def _seed_embedding(self, module: nn.Module, inputs: tuple) -> None:
        self._hook("embedding", self._embedding_number)(module, inputs)

    def _number_embedding(self, number: int):
        def note(*_) -> None:
            self._embedding_number = number

        return note

    def _seed_all(self, stack: str, number: int) -> None:
        """Seed the tracker's states and the device's generator. Inside a fork the generator holds the forked state."""
        tracker = tensor_parallel.get_cuda_rng_tracker()
        states = tracker.get_states()
        inside = getattr(tracker, "_current_state_name", _DEFAULT_STATE)
        backend.manual_seed(self._hash(stack, number, inside))
        for name, state in states.items():
            seed = self._hash(stack, number, name)
            if isinstance(state, torch.Generator):
                state.manual_seed(seed)
            else:
                states[name] = self._generator.manual_seed(seed).get_state()
        tracker.set_states(states)

    def _hash(self, stack: str, number: int, state_name: str) -> int:
        common = state_name in (_DEFAULT_STATE, get_data_parallel_rng_tracker_name())
        rank = 0 if common else self._tensor_rank
        part = f"/{self._context_rank}" if self._context_rank else ""
        key = f"{self._seed}/{self._sample}/{stack}/{number}/{state_name}/{rank}{part}"
        return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "little") >> 1


def _drops(model: nn.Module) -> bool:
    rates = [module.p for module in model.modules() if isinstance(module, nn.Dropout)]
    rates += [module.hidden_dropout for module in model.modules() if hasattr(module, "hidden_dropout")]
    return any(rate > 0 for rate in rates)


def _chooses(model: nn.Module) -> bool:
    routers = (module for module in model.modules() if isinstance(module, Router))
    return any(each.config.moe_router_force_load_balancing for each in routers)
