"""The part `config` of an entry: in the words of the papers and of NVIDIA's recipes; and what changes nothing."""

import pytest

from megatron.planner.job.configuration import Sharding
from megatron.planner.job.software import FLEX
from megatron.planner.memory.recompute import RecomputeScope
from megatron.planner.published.entries import Entry, read_entry
from megatron.planner.published.prediction import predict
from megatron.planner.time.calibration import default_constants
from tests.planner.published.measured import BPIPE_TABLE_7, MOE, SHARED, changed
from tests.planner.published.test_sharded_runs import TORCHTITAN

RUN = BPIPE_TABLE_7[0]
FP8 = {"precision": "fp8"}
ENDS = {"account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True}
SPLIT = changed(TORCHTITAN[2], config={"fsdp": None})


def entry(given: dict, **config: object) -> Entry:
    found = read_entry(changed(given, config=config))
    assert isinstance(found, Entry), found.reason
    return found


def seconds(found: Entry) -> float:
    return predict(found, default_constants()).estimate.seconds


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"v": None, "sequence_parallel": None, "zero1": None}, {}),
        ({"schedule": "1F1B"}, {"schedule": "flush"}),
        ({"v": 5}, {"schedule": "interleaved", "virtual": 5}),
        ({"recompute": "selective"}, {"recompute": RecomputeScope.ATTENTION}),
        ({"recompute": "layer (recalled)"}, {"recompute": RecomputeScope.LAYER}),
        ({"zero1": None, "zero": 1}, {"distributed_optimizer": True}),
        ({"global_batch": None}, {"global_batch_size": 32}),
    ],
)
def test_reads_a_configuration(config, expected):
    """Remarks in brackets are not read; batches have as many microbatches as stages, unless that is said."""
    configuration = entry(RUN, **config).configuration
    assert {name: getattr(configuration, name) for name in expected} == expected
    assert (configuration.tensor, configuration.pipeline, configuration.data) == (1, 16, 2)


def test_replicas_are_the_gpus_that_are_left():
    """Keys are passed round a ring of context parallel ranks, unless the entry says otherwise."""
    found = entry(SHARED, cp=4)
    assert (found.configuration.context, found.configuration.data, found.configuration.num_gpus) == (4, 4, 64)
    assert not found.software.gathers_keys and entry(SHARED, cp=4, cp_comm_type="all_gather").software.gathers_keys
    assert read_entry(changed(RUN, config={"d": None}, hardware={"gpus": 32})) == read_entry(RUN)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, None), ({"fsdp": False}, None), ({"fsdp": 1}, None), ({"zero": 1}, None), ({"zero": 0}, None),
        ({"fsdp": True}, (3, 128)), ({"fsdp": 8}, (3, 8)), ({"zero": 3}, (3, 128)), ({"zero": 2}, (2, 128)),
        ({"fsdp": True, "t": 2}, (3, 64)), ({"fsdp": 8, "zero": 3}, (3, 8)), ({"fsdp": 8, "zero": 2}, (2, 8)),
    ],
)  # fmt: skip
def test_how_weights_are_split(config, expected):
    sharding = None if expected is None else Sharding(stage=expected[0], shards=expected[1])
    found = entry(SPLIT, **config).configuration
    assert found.sharding == sharding and found.distributed_optimizer == (config.get("zero") == 1)


def test_embedding_and_loss_count_as_layers_of_the_split():
    """Llama 3.1 405B: 126 layers in 64 stages, as megatron.core deals them out."""
    found = entry(changed(SHARED, model={"layers": 126}), t=1, p=8, v=8, d=8, **ENDS)
    assert found.configuration.layers == (1, *[2] * 62, 1) and seconds(found) > 0
    one = entry(changed(SHARED, model={"layers": 31}), account_for_loss_in_pipeline_split=True)
    assert one.configuration.layers == (16, 15)


def test_the_fused_softmax_is_there_as_the_entry_says():
    """Of BPipe's Table 7: 52 heads on a rank, and 13."""
    has, has_not = BPIPE_TABLE_7[1], BPIPE_TABLE_7[3]
    for run, said, is_slower in ((has, True, False), (has_not, False, False), (has, False, True)):
        found = read_entry(run | {"fused_softmax_kernel_available": said})
        assert (seconds(found) > seconds(read_entry(run))) is is_slower
    wrong = read_entry(has_not | {"fused_softmax_kernel_available": True})
    assert "a microbatch has 13 heads on a rank, of which the kernel takes multiples of 4; correct it" in wrong.reason


def test_precisions():
    """Four bytes an element, and the rate of FP32; in FP8 linears alone, and the same MFU is of the peak of 16 bits."""
    half, single = entry(RUN, precision="fp16"), entry(RUN, precision="fp32")
    assert (half.software.element_bytes, single.software.element_bytes) == (2, 4) and not single.software.fuses_softmax
    assert single.seconds / half.seconds == pytest.approx(312 / 19.5)
    assert seconds(single) > 8 * seconds(half)
    hopper = {"gpu": "H100", "software": "Megatron-Core", "system": "DGX H100"}
    run = changed(RUN, hardware=hopper, model={"hidden": 10240, "heads": 80})
    wide, eighth = entry(run, precision="bf16"), entry(run, **FP8)
    assert (wide.software.fp8, eighth.software.fp8, eighth.software.element_bytes) == (False, True, 2)
    assert eighth.seconds == wide.seconds and seconds(wide) / 2 < seconds(eighth) < seconds(wide) / 1.2


def test_weights_in_fp8_alone():
    """2 bytes less of each element of a linear, and a byte less to gather."""
    found = entry(SHARED, **FP8)
    own, less = (
        predict(each, default_constants()).estimate for each in (found, entry(SHARED, **FP8, fp8_param_gather=True))
    )
    matrices = 16 * found.model.layer_matrices // 2
    assert own.memory[0].parts.weights - less.memory[0].parts.weights == 2 * matrices
    assert less.seconds < own.seconds


def test_scales_of_blocks_are_blackwells():
    for gpu, is_known in (("H100", False), ("B200", True)):
        given = changed(SHARED, hardware={"gpu": gpu, "gpus_per_node": 8})
        found = read_entry(changed(given, config=FP8 | {"fp8_recipe": "mxfp8"}))
        assert found == entry(given, **FP8) if is_known else "which H100 does not multiply" in found.reason


def test_dispatchers_and_graphs():
    """DeepEP moves fewer copies, and beside another microbatch they cost less still; graphs spare the host."""
    given = changed(MOE, config={"p": 1, "ep": 4})
    plain, flex = entry(given), entry(given, moe_flex_dispatcher_backend="hybridep")
    beside = entry(given, moe_flex_dispatcher_backend="deepep", overlap_moe_expert_parallel_comm=True)
    assert (plain.software.dispatcher, flex.software.dispatcher) == ("alltoall", FLEX)
    assert seconds(plain) > seconds(flex) > seconds(beside)
    assert entry(SHARED, cuda_graph_scope="full").software.cuda_graphs and not entry(SHARED).software.cuda_graphs


def test_sequences_and_experts_are_priced():
    """Long sequences on several ranks take less memory; of as many GPUs experts take more time than a dense layer that
    does their products, for copies have to move, and less than all experts would."""
    long = changed(SHARED, model={"seq": 65536}, config={"global_batch": 32})
    saved = [
        max(rank.parts.activations for rank in predict(entry(long, cp=cp), default_constants()).estimate.memory)
        for cp in (1, 4)
    ]
    assert saved[1] == pytest.approx(saved[0] / 4)
    dense = {"num_experts": None, "moe_router_topk": None, "name": "Llama 3"}
    active = changed(MOE, model=dense | {"ffn": 2 * 14336}, config={"ep": None, "etp": None})
    all_ = changed(active, model={"ffn": 8 * 14336})
    assert seconds(read_entry(active)) < seconds(read_entry(MOE)) < seconds(read_entry(all_))


@pytest.mark.parametrize(
    ("given", "config", "words"),
    [
        (SHARED, {"cp": 3}, "64 GPUs do not divide by t=2, p=2 and cp=3; correct"),
        (SHARED, {"cp": 2, "cp_comm_type": "a2a"}, "config.cp_comm_type is 'a2a': input should be 'p2p' or "),
        (SHARED, {"cp": 2, "flash_attention": False}, "context parallelism over 2 ranks needs flash attention"),
        (MOE, {"ep": 3}, "expert 3 times expert_tensor 1 does not divide the 32 ranks of a stage"),
        (MOE, {"sequence_parallel": False}, "experts with tensor 2 need sequence parallelism"),
        (SPLIT, {"fsdp": 256}, "128 replicas do not divide into groups of 256 shards"),
        (SPLIT, {"fsdp": 24}, "128 replicas do not divide into groups of 24 shards; change one of them"),
        (SPLIT, {"fsdp": 8, "zero1": True}, "leave the distributed optimizer out"),
        (SPLIT, {"fsdp": 64, "p": 2}, "p is 2, of which the time of both together is not modelled; give p 1"),
        (SPLIT, {"fsdp": -8}, "config.fsdp is -8"),
        (SPLIT, {"zero": True}, "config.zero is True: a number is wanted"),
        (changed(SPLIT, hardware={"gpus": 1}), {"zero": 3, "global_batch": 2}, "1 replicas split nothing; give 2"),
        (RUN, {"precision": "fp32", "flash_attention": True}, "config.flash_attention is True in fp32"),
        (RUN, FP8, "config.precision is 'fp8', and the software of this run multiplies in 16 bits"),
        (RUN, {"technique": "compile"}, "such software has fused kernels without it; leave compile out"),
        (RUN, ENDS, "80 layers and 2 for embedding and loss do not divide into 16 stages"),
        (SHARED, {"fp8_recipe": "tensorwise"}, "config.fp8_recipe is 'tensorwise' with another precision than fp8"),
        (SHARED, FP8 | {"fp8_recipe": "blockwise"}, "input should be 'delayed', 'tensorwise' or 'mxfp8'"),
        (SHARED, {"fp8_param_gather": True}, "config.fp8_param_gather is True with another precision"),
        (SHARED, FP8 | {"fp8_param_gather": True, "zero1": False}, "with a whole optimizer on each replica"),
        (SHARED, {"moe_flex_dispatcher_backend": "deepep"}, "is 'deepep' with no experts"),
        (SHARED, {"overlap_moe_expert_parallel_comm": True}, "is True with no experts"),
        (SHARED, {"cuda_graph_scope": "attn"}, "config.cuda_graph_scope is 'attn'"),
        (SHARED, {"tp_comm_overlap": True, "sequence_parallel": False}, "with whole sequences on tensor ranks"),
        (SHARED, {"technique": "asyncTP", "sequence_parallel": False}, "with whole sequences on tensor ranks"),
        (SHARED, {"technique": "asyncTP", "tp_comm_overlap": False}, "and config.technique has asyncTP; correct one"),
        (SHARED, {"grad_reduce_in_bf16": True, "precision": "fp16"}, "is True with precision fp16"),
    ],
)  # fmt: skip
def test_what_does_not_agree_or_changes_nothing_is_refused(given, config, words):
    found = read_entry(changed(given, config=config))
    assert words in found.reason and "; " in found.reason
