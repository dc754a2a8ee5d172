"""The initial weights: one model, however it is cut."""

from dataclasses import replace

import pytest
import torch

from tests import workers
from tests.trainer.arguments.command_line import arguments

MODEL = "--untie-embeddings-and-output-weights"


def build_case(flags: str) -> dict[str, torch.Tensor]:
    """This rank's parameters, of all its stages, by their names in the whole model."""
    from megatron.core import parallel_state
    from megatron.core.utils import unwrap_model
    from megatron.trainer.models import core_config, gpt
    from megatron.trainer.plan import from_flags
    from megatron.trainer.start_up import initialize

    args = arguments(flags, world_size=torch.distributed.get_world_size())
    args = initialize.set_up(replace(args, padded_vocab_size=256))
    try:
        model_config = core_config.transformer_config(args)
        stages = args.schedule.stages_of(parallel_state.get_pipeline_model_parallel_rank())
        layers, found = from_flags.layers_of_stages(model_config), {}

        def provider_of(own_config):
            return lambda pre, post: gpt.gpt_model(args, own_config, pre_process=pre, post_process=post)

        chunks = gpt.build_chunks(provider_of, model_config, stages=stages, layers=layers)
        for model in map(unwrap_model, chunks):
            for name, parameter in model.named_parameters():
                words = name.split(".")
                if name.startswith("decoder.layers."):
                    words[2] = str(model.decoder.layers[int(words[2])].layer_number - 1)
                assert ".".join(words) not in found, "two stages of a rank hold the same layer"
                found[".".join(words)] = parameter.detach().clone()
        found["state of the generator"] = torch.get_rng_state()
        return found
    finally:
        parallel_state.destroy_model_parallel()


def whole_model(num_ranks: int, flags: str) -> dict[str, torch.Tensor]:
    parts = workers.run(num_ranks, "tests.trainer.models.test_gpt:build_case", flags=flags)
    return {name: tensor for part in parts for name, tensor in part.items()}


@pytest.mark.sample(1)
@pytest.mark.parametrize("more", ["", "--swiglu --disable-bias-linear --normalization RMSNorm", "--bf16"])
def test_weights_do_not_depend_on_the_number_of_stages(more):
    """p=1, 2 and 4, several stages on a rank and uneven ones start from bit-equal weights, and leave the generator in
    the same state."""
    single = whole_model(1, f"{MODEL} {more}")
    for stages, cut in (
        (2, ""),
        (4, ""),
        (2, "--num-virtual-stages-per-pipeline-rank 2"),
        (4, "--pipeline-model-parallel-layout E|ttt|t|L"),
    ):
        parts = whole_model(stages, f"{MODEL} {more} --pipeline-model-parallel-size {stages} {cut}")
        assert parts.keys() == single.keys()
        for name, tensor in single.items():
            assert torch.equal(parts[name], tensor), name
    weights = {name: tensor for name, tensor in single.items() if tensor.dim() == 2}
    assert len({tensor.flatten()[0].item() for tensor in weights.values()}) == len(weights), "layers share a stream"


@pytest.mark.sample(1)
@pytest.mark.parametrize("more", ["", "--swiglu --group-query-attention --num-query-groups 2"])
def test_weights_do_not_depend_on_the_tensor_degree(more):
    """At t=2 each rank holds its part of the very matrices of t=1."""
    single = workers.run(1, "tests.trainer.models.test_gpt:build_case", flags=f"{MODEL} {more}")[0]
    halves = workers.run(
        2, "tests.trainer.models.test_gpt:build_case", flags=f"{MODEL} {more} --tensor-model-parallel-size 2"
    )
    for name, tensor in single.items():
        first, second = (half[name] for half in halves)
        if first.shape == tensor.shape:
            assert torch.equal(first, second), name
            continue
        dim = next((d for d in range(tensor.dim()) if first.shape[d] != tensor.shape[d]), 0)
        if "linear_fc1" in name and "swiglu" in more:
            (gate, up), (gate2, up2) = first.chunk(2), second.chunk(2)
            joined = torch.cat([gate, gate2, up, up2])
        else:
            joined = torch.cat([first, second], dim=dim)
        assert torch.equal(joined, tensor), name


def test_seed_changes_the_weights():
    """Another --seed gives another model."""
    one, other = (whole_model(1, f"{MODEL} --seed {seed}") for seed in (1, 2))
    name = "decoder.layers.0.mlp.linear_fc1.weight"
    assert not torch.equal(one[name], other[name])
