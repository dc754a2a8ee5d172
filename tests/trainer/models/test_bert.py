"""BERT's initial weights: one model, however it is cut."""

from dataclasses import replace

import pytest
import torch

from tests import workers
from tests.trainer.arguments.bert_command_line import bert_arguments


def build_case(flags: str) -> dict[str, torch.Tensor]:
    """This rank's parameters by their names in the whole model."""
    from megatron.core import parallel_state
    from megatron.trainer.models import core_config
    from megatron.trainer.models.bert import bert_model

    args = bert_arguments(flags, world_size=torch.distributed.get_world_size())
    args = replace(args, padded_vocab_size=256)
    parallel_state.initialize_model_parallel(args.tensor_model_parallel_size, args.pipeline_model_parallel_size)
    try:
        model = bert_model(
            args, core_config.transformer_config(args), pre_process=parallel_state.is_pipeline_first_stage(),
            post_process=parallel_state.is_pipeline_last_stage(),
        )  # fmt: skip
        offset = model.encoder.layers[0].layer_number - 1
        found = {"state of the generator": torch.get_rng_state()}
        for name, parameter in model.named_parameters():
            words = name.split(".")
            if name.startswith("encoder.layers."):
                words[2] = str(int(words[2]) + offset)
            found[".".join(words)] = parameter.detach().clone()
        return found
    finally:
        parallel_state.destroy_model_parallel()


def whole_model(num_ranks: int, flags: str) -> dict[str, torch.Tensor]:
    parts = workers.run(num_ranks, "tests.trainer.models.test_bert:build_case", flags=flags)
    return {name: tensor for part in parts for name, tensor in part.items()}


def test_the_binary_head_and_token_types_come_together():
    """With the binary head there are two token types and a pooler, without it none of them."""
    names = {"embedding.tokentype_embeddings.weight", "pooler.dense.weight", "binary_head.weight"}
    assert names <= whole_model(1, "").keys()
    assert not names & whole_model(1, "--bert-no-binary-head").keys()


def test_weights_do_not_depend_on_the_tensor_degree():
    """At t=2 each rank holds its part of the very matrices of t=1, and all of those that are not cut."""
    (single,) = workers.run(1, "tests.trainer.models.test_bert:build_case", flags="")
    halves = workers.run(2, "tests.trainer.models.test_bert:build_case", flags="--tensor-model-parallel-size 2")
    for name, whole in single.items():
        first, second = halves[0][name], halves[1][name]
        if first.shape == whole.shape:
            assert torch.equal(first, whole) and torch.equal(second, whole), name
        else:
            dimension = next(i for i in range(whole.dim()) if first.shape[i] != whole.shape[i])
            assert torch.equal(torch.cat([first, second], dim=dimension), whole), name
    weights = [tensor for tensor in single.values() if tensor.dim() == 2]
    assert len({tensor.flatten()[0].item() for tensor in weights}) == len(weights), "layers share a stream"


NO_DROPOUT = "--hidden-dropout 0 --attention-dropout 0"
RESIDUAL = "--residual-from-norm"


def residual_case(flags: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Of the layers and of a loop over their parts that adds to what the norms give: the last hidden states [s, b, h],
    then the gradient of each parameter."""
    from megatron.core import parallel_state
    from megatron.trainer.models import core_config
    from megatron.trainer.models.bert import bert_model

    args = replace(bert_arguments(f"{RESIDUAL} {flags}"), padded_vocab_size=256)
    parallel_state.initialize_model_parallel()
    encoder = bert_model(args, core_config.transformer_config(args)).encoder
    entered = torch.randn(args.seq_length, 2, args.hidden_size)
    mask = torch.zeros(2, 1, args.seq_length, args.seq_length, dtype=torch.bool)
    parts = lambda part, hidden, *more: [each for each in part(hidden, *more) if each is not None]  # noqa: E731
    found = []
    for by_hand in (False, True):
        encoder.zero_grad(set_to_none=True)
        hidden = entered.clone().requires_grad_()
        if by_hand:
            for layer in encoder.layers:
                hidden = layer.input_layernorm(hidden)
                hidden = hidden + sum(parts(layer.self_attention, hidden, mask))
                hidden = layer.pre_mlp_layernorm(hidden)
                hidden = hidden + sum(parts(layer.mlp, hidden))
            hidden = encoder.final_layernorm(hidden)
        else:
            hidden = encoder(hidden, mask)
        hidden.square().mean().backward()
        found.append([hidden.detach(), *(each.grad for each in encoder.parameters())])
    return list(zip(*found, strict=True))


@pytest.mark.parametrize(
    "flags", ["", "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"]
)
def test_the_residual_is_what_the_norms_give(flags):
    """As the published BERT is defined."""
    [pairs] = workers.run(1, "tests.trainer.models.test_bert:residual_case", flags=f"{flags} {NO_DROPOUT}")
    for ours, by_hand in pairs:
        torch.testing.assert_close(ours, by_hand, rtol=1e-5, atol=1e-7)


def test_what_the_residual_does_not_go_with():
    with pytest.raises(ValueError, match=r"is not computed with --recompute-modules layernorm; leave it out"):
        bert_arguments(f"{RESIDUAL} --recompute-granularity selective --recompute-modules layernorm")
    with pytest.raises(ValueError, match=r"does not compute this model: .*; use --transformer-impl local"):
        bert_arguments(f"{RESIDUAL} --transformer-impl transformer_engine")
    assert bert_arguments(RESIDUAL).transformer_impl == "local"
