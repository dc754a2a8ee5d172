"""What worker processes do in the tests of transitions: train, change the degrees by hand, and tell what they have."""

import random
import time
from dataclasses import asdict, replace
from unittest import mock

import numpy
import torch

from megatron.core import parallel_state, tensor_parallel
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.utils import unwrap_model
from megatron.pipeline.runtime.stages.megatron.optimizers import named_parameters
from megatron.trainer.arguments import parse_args
from megatron.trainer.changes import transfer_plan as planning
from megatron.trainer.changes.change import destroy_groups, set_groups_aside
from megatron.trainer.changes.state_in_memory import hand_over, hold_run
from megatron.trainer.checkpoint.state import complete_state
from megatron.trainer.programs import pretrain_gpt
from megatron.trainer.ranks import StopSignal
from megatron.trainer.run.assembly import assemble
from megatron.trainer.run.loop import run_to_the_end
from megatron.trainer.run.pretraining import complete
from megatron.trainer.start_up import initialize
from megatron.trainer.start_up.run import setup_model_and_optimizer
from tests.trainer.run.run_case import BASE

ITERATIONS = 3


def arguments(flags, num_stages):
    """Those of a run of so many stages on the ranks that there are."""
    args, _ = complete(
        parse_args(f"{BASE} --global-batch-size 8 {flags} --pipeline-model-parallel-size {num_stages}".split())
    )
    return replace(args, padded_vocab_size=128)


def trained(flags, num_stages):
    """A run after a few iterations, drained and closed."""
    args = initialize.set_up(arguments(f"{flags} --train-iters {ITERATIONS}", num_stages))
    run = assemble(args, pretrain_gpt.program())
    run_to_the_end(run, StopSignal(), started=time.time())
    return run.args, run.model_and_optimizer


def rebuilt(args, like, *, num_frozen=0):
    """Untrained parts under the degrees of `args`, whose groups are up; everything else is as in `like`. The first
    `num_frozen` layers are frozen, and then the embedding, too."""
    args = replace(args, padded_vocab_size=like.padded_vocab_size)

    def model_provider(args, config):
        build = pretrain_gpt.model_provider(args, config)

        def provider(pre_process, post_process):
            model = build(pre_process, post_process)
            _freeze(model, num_frozen)
            return model

        return provider

    return setup_model_and_optimizer(args, replace(pretrain_gpt.program(), model_provider=model_provider))


def change_degrees(flags, stages):
    """Train, then go through the numbers of stages; for each change what there was before and after on this rank."""
    args, parts = trained(flags, stages[0])
    changes = []
    for num_stages in stages[1:]:
        before = whole_state(parts)
        state = hold_run(parts, iteration=ITERATIONS)
        old_groups = set_groups_aside()
        new_args = arguments(f"{flags} --train-iters {ITERATIONS}", num_stages)
        args, old_args = initialize.set_up(new_args), args
        new = rebuilt(args, old_args)
        with mock.patch.object(planning, "DIRECT_BYTES", 1000):  # so that these small models have runs, too
            moved = hand_over(state, new, iteration=ITERATIONS, piece_bytes=5000)
        assert_unchanged(parts, before)
        changes.append((before, whole_state(new), asdict(moved)))
        new.update.close()
        destroy_groups(old_groups)
        parts = new
    return changes


def _freeze(model, num_layers):
    for name, parameter in model.named_parameters():
        words = name.split(".")
        if words[0] == "decoder" and words[1] == "layers":
            frozen = model.decoder.layers[int(words[2])].layer_number <= num_layers
        else:
            frozen = words[0] == "embedding" and num_layers > 0
        parameter.requires_grad = not frozen


def freeze_deeper(flags, stages, frozen):
    """Go from `stages[0]` stages with `frozen[0]` frozen layers to `stages[1]` with `frozen[1]`: as `change_degrees`,
    with random numbers instead of trained ones, and the weights of the frozen layers beside."""
    args = initialize.set_up(arguments(flags, stages[0]))
    parts = rebuilt(args, args, num_frozen=frozen[0])
    _randomize(parts)
    parts.update.versions.reset(ITERATIONS)
    before = whole_state(parts), _weights(parts.chunks)
    state = hold_run(parts, iteration=ITERATIONS)
    old_groups = set_groups_aside()
    new_args = initialize.set_up(arguments(flags, stages[1]))
    new = rebuilt(new_args, args, num_frozen=frozen[1])
    hand_over(state, new, iteration=ITERATIONS)
    after = whole_state(new), _weights(new.chunks)
    new.update.close()
    destroy_groups(old_groups)
    return before, after


@torch.no_grad()
def _randomize(parts):
    complete_state(parts.optimizer)
    inner = getattr(parts.optimizer, "chained_optimizers", [parts.optimizer])[0]
    generator = torch.Generator().manual_seed(torch.distributed.get_rank())
    for _, kind, _, tensor in _optimizer_tensors(inner):
        tensor.copy_(torch.tensor(7.0) if kind == "step" else torch.rand(tensor.shape, generator=generator))


def _weights(chunks):
    names = _names_in_model(chunks)
    return {names[id(each)]: each.detach().clone() for chunk in chunks for each in chunk.parameters()}


def whole_state(parts):
    """What this rank has, under names in the whole model: (pieces: (name, tensor rank) -> [(first element, of how many,
    elements)], what is the same on all ranks, generators)."""
    parts.update.show_newest()
    names = _names_in_model(parts.chunks)
    pieces = {}

    def add(parameter, kind, first, total, data):
        key = (kind, names[id(parameter)], parallel_state.get_tensor_model_parallel_rank())
        pieces.setdefault(key, []).append((first, total, data.detach().flatten().clone()))

    parameters = named_parameters(parts.chunks)
    for version in parts.update.versions.live():
        for name, tensor in parts.update.versions.tensors(version).items():
            add(parameters[name], f"version {version}", 0, tensor.numel(), tensor)
    inner = getattr(parts.optimizer, "chained_optimizers", [parts.optimizer])[0]
    for parameter, kind, first, tensor in _optimizer_tensors(inner):
        add(parameter, kind, first, 1 if kind == "step" else parameter.numel(), tensor)
    groups = [  # megatron.core's distributed optimizer leaves there a step that it has loaded, and counts elsewhere
        {name: value for name, value in group.items() if name not in ("params", "step")}
        for group in inner.optimizer.param_groups
    ]
    scaler = getattr(inner, "grad_scaler", None)
    scale = (scaler.scale.item(), vars(scaler).get("_growth_tracker")) if scaler else None
    common = repr((groups, scale, parts.scheduler.state_dict(), parts.update.state_dict()))  # a norm may be no number
    return pieces, common, _generators()


def assert_unchanged(parts, before):
    """What is old is as it was, bit for bit (the generators have been used)."""
    pieces, common, _ = whole_state(parts)
    assert pieces.keys() == before[0].keys()
    assert common == before[1], (common, before[1])
    for key, found in pieces.items():
        assert all(torch.equal(one[2], other[2]) for one, other in zip(found, before[0][key], strict=True)), key


def _names_in_model(chunks):
    names = {}
    for model in map(unwrap_model, chunks):
        for name, parameter in model.named_parameters():
            words = name.split(".")
            if name.startswith("decoder.layers."):
                words[2] = str(model.decoder.layers[int(words[2])].layer_number)
            if name == "output_layer.weight" and model.share_embeddings_and_output_weights:
                words = ["embedding", "word_embeddings", "weight"]
            names[id(parameter)] = ".".join(words)
    return names


def _optimizer_tensors(inner):
    """(parameter, kind, first element, tensor) of all that an optimizer keeps."""
    if isinstance(inner, DistributedOptimizer):
        for buffer in inner.buffers:
            for parameter in buffer.param_index_map:
                try:
                    span = inner._get_model_param_range_map(parameter)["param"]
                except KeyError:  # another replica's
                    continue
                for kind, tensor in inner._get_main_param_and_optimizer_states(parameter).items():
                    yield parameter, kind, 0 if kind == "step" else span.start, tensor
        return
    pairs = [(parameter, parameter) for group in inner.optimizer.param_groups for parameter in group["params"]]
    if hasattr(inner, "float16_groups"):
        groups = zip(inner.float16_groups, inner.fp32_from_float16_groups, strict=True)
        pairs = [pair for parameters, masters in groups for pair in zip(parameters, masters, strict=True)]
        yield from ((parameter, "param", 0, master) for parameter, master in pairs)
    for parameter, key in pairs:
        yield from ((parameter, kind, 0, tensor) for kind, tensor in inner.optimizer.state[key].items())


def _generators():
    tracker = tensor_parallel.get_cuda_rng_tracker().get_states()
    return (
        random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist(),
        {name: state.tolist() for name, state in tracker.items()},
    )  # fmt: skip
