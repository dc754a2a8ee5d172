"""What a GPU holds of weights that are split: shards, what is gathered, gradients, one microbatch."""

from dataclasses import replace

import pytest

from megatron.planner import Architecture, Cluster, Configuration, Planner
from megatron.planner.job.configuration import Sharding
from megatron.planner.job.software import MEGATRON_CORE, TORCHTITAN, Software
from megatron.planner.memory.memory import MemoryParts
from megatron.planner.memory.parameters import (
    FP8_COPY_BYTES,
    layer_parameters,
    matrix_parameters,
    stage_parameters,
)

LLAMA_8B = Architecture(
    num_layers=32, hidden_size=4096, ffn_hidden_size=14336, num_attention_heads=32, num_query_groups=8, kv_channels=128,
    sequence_length=8192, vocabulary_size=128256, tied_embeddings=False, gated=True, linear_biases=False,
    norm_vectors=1, hidden_dropout=False, attention_dropout=False,
)  # fmt: skip
TOTAL = stage_parameters(LLAMA_8B, 1, (32,))[0]
LAYER = layer_parameters(LLAMA_8B, 1)
ROOT = TOTAL - 32 * LAYER


def parts(software: Software, *, data: int = 8, shards: int | None = None, stage: int = 3, **choices) -> MemoryParts:
    cluster = Cluster(gpu="H100", nodes=max(1, data // 8), bandwidth={"between_nodes": 400.0})
    configuration = Configuration(
        data=data, micro_batch_size=1, global_batch_size=data, sharding=Sharding(stage=stage, shards=shards or data),
        **choices,
    )  # fmt: skip
    (rank,) = Planner(LLAMA_8B, cluster, software=software).memory(configuration)
    assert rank.num_parameters == TOTAL
    return rank.parts


def test_the_model_is_llama_3_1_8b():
    """Its published number of parameters."""
    assert TOTAL == 8_030_261_248


def test_shards_shrink_with_replicas():
    """Masters and moments take 12 bytes a parameter, and each replica has its part of them."""
    for data in (8, 16, 64):
        assert parts(TORCHTITAN, data=data).optimizer == pytest.approx(12 * TOTAL / data)


def test_groups_hold_copies():
    """With 8 shards of 64 replicas a GPU has as much as with 8 replicas."""
    assert parts(TORCHTITAN, data=64, shards=8) == parts(TORCHTITAN, data=8)


def test_what_is_gathered():
    """FSDP2: embedding and head, two layers, and the buffer of one, in 16 bits; Megatron-FSDP copies nothing, and keeps
    its shard of the weights in 16 bits besides."""
    assert parts(TORCHTITAN).weights == 2 * (ROOT + 3 * LAYER)
    assert parts(MEGATRON_CORE).weights == pytest.approx(2 * (ROOT + 2 * LAYER) + 2 * TOTAL / 8)


def test_stage_2_holds_all_weights():
    """And everything else as stage 3."""
    two, three = parts(MEGATRON_CORE, stage=2), parts(MEGATRON_CORE, stage=3)
    assert two.weights == pytest.approx(2 * TOTAL + 2 * TOTAL / 8)
    assert (two.optimizer, two.gradients, two.activations) == (three.optimizer, three.gradients, three.activations)


def test_gradients():
    """The shard in FP32; embedding and head, and two layers, whole: one as it is computed, one as it is reduced."""
    assert parts(TORCHTITAN).gradients == pytest.approx(4 * TOTAL / 8 + 2 * ROOT + (2 + 4) * LAYER)


def test_selective_recomputation_of_torchtitan():
    """A layer keeps its input, queries, values, the attention's result, the gate and what leaves the MLP: 63.5 KB of a
    token. The embedding keeps nothing, and the head its inputs and the softmax in FP32."""
    layer = 2 * (4096 + 4096 + 1024 + 4096 + 14336 + 4096)
    head = 2 * 2 * 4096 + 4 * 128256
    assert parts(TORCHTITAN, recompute="attention").activations == 8192 * (32 * layer + head)


def test_the_loss_of_pytorch_takes_more():
    """The gradients of its softmax and of the logits lie in FP32 beside it: 8 bytes of a logit, and 2 if fused."""
    fused = parts(Software(flash_attention=True))
    unfused = parts(Software(flash_attention=True, fuses_loss=False))
    assert unfused.workspace - fused.workspace == pytest.approx(6 * 8192 * 128256)


def test_casts_to_fp8_stay_with_weights_that_stay():
    """Of all layers' matrices with stage 2, in which each is cast once."""
    for stage, copies in ((2, FP8_COPY_BYTES * matrix_parameters(LLAMA_8B, 1, 32)), (3, 0)):
        half, eighth = (parts(software, stage=stage) for software in (MEGATRON_CORE, replace(MEGATRON_CORE, fp8=True)))
        assert eighth.weights - half.weights == copies


def test_shards_in_fp8_alone():
    """A byte less of each element of a matrix in a rank's shard; with stage 2 two bytes less in what stays, besides."""
    matrices = matrix_parameters(LLAMA_8B, 1, 32)
    for stage in (2, 3):
        kept, alone = (parts(replace(MEGATRON_CORE, fp8=True, fp8_weights=each), stage=stage) for each in (False, True))
        assert kept.weights - alone.weights == matrices / 8 + 2 * matrices * (stage == 2)
