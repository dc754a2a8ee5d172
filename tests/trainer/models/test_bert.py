"""BERT's initial weights: one model, however it is cut."""

from dataclasses import replace

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
