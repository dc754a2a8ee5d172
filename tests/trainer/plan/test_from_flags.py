"""From flags to the planner's records, and flags that a search prices and the trainer refuses."""

from megatron import backend

backend.install()

import pytest

from megatron.planner import Configuration, Recompute
from megatron.planner.memory.architecture import Experts
from megatron.trainer.arguments import Platform
from megatron.trainer.arguments.flags.experts import pattern_of_layers
from megatron.trainer.models.core_config import transformer_config
from megatron.trainer.plan import from_flags
from megatron.trainer.plan.command import Job
from megatron.trainer.plan.from_flags import PricedFlags
from tests.trainer.arguments.command_line import GPU, arguments


@pytest.mark.parametrize(
    "flags, layers",
    [
        ("--num-layers 6", (6,)),
        ("--num-layers 8 --pipeline-model-parallel-size 4", (2, 2, 2, 2)),
        ("--num-layers 8 --pipeline-model-parallel-size 4 --decoder-first-pipeline-num-layers 2", (2, 2, 2, 2)),
        ("--num-layers 9 --pipeline-model-parallel-size 4 --decoder-last-pipeline-num-layers 3", (2, 2, 2, 3)),
        ("--num-layers 7 --pipeline-model-parallel-size 4 --account-for-embedding-in-pipeline-split", (1, 2, 2, 2)),
        (
            "--num-layers 8 --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2",
            (2, 2, 2, 2),
        ),
        (
            "--num-layers 8 --pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 2 "
            "--num-virtual-stages-per-pipeline-rank 2",
            (1, 3, 1, 3),
        ),
        ("--num-layers 4 --pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Et|t*2|t|L", (1, 2, 1, 0)),
    ],
)
def test_layers_of_stages(flags, layers):
    """Each stage has the layers that megatron.core gives it, in the order of the stages and not of the ranks."""
    args = arguments(flags, world_size=max(1, int(flags.partition("parallel-size ")[2][:1] or 1)))
    assert from_flags.layers_of_stages(transformer_config(args)) == layers


@pytest.mark.parametrize(
    "flags, recompute",
    [
        ("", Recompute()),
        ("--recompute-activations", Recompute(modules=frozenset({"core_attn"}))),
        (
            "--recompute-granularity full --recompute-method block --recompute-num-layers 3",
            Recompute(method="block", num_layers=3),
        ),
        ("--pipeline-recompute", Recompute(whole_stage=True)),
    ],
)
def test_scopes(flags, recompute):
    """Every way to recompute arrives."""
    assert from_flags.activation_setting(arguments(flags)).recompute == recompute


def test_formats():
    """Formats of weights, gradients and activations, and whether attention keeps its scores."""
    state, setting = from_flags.training_state(arguments("--bf16")), from_flags.activation_setting(arguments("--bf16"))
    assert (state.weight_bytes, state.gradient_bytes, setting.element_bytes) == (2, 4, 2)
    assert setting.saves_scores and not from_flags.activation_setting(arguments("--bf16", platform=GPU)).saves_scores
    assert from_flags.activation_setting(arguments("--bf16 --attention-backend unfused", platform=GPU)).saves_scores
    assert from_flags.activation_setting(arguments("", platform=GPU)).saves_scores  # flash attention takes 16 bits only
    assert from_flags.training_state(arguments("--bf16 --grad-reduce-in-bf16")).gradient_bytes == 2
    assert from_flags.training_state(arguments("--fp16")).gradient_bytes == 2
    assert from_flags.training_state(arguments("--optimizer sgd --sgd-momentum 0")).num_moments == 0
    wide = arguments("--bf16 --fp32-residual-connection", platform=GPU)
    assert from_flags.activation_setting(wide).residual_bytes == 4


ENGINE = Platform(is_cuda=True, has_transformer_engine=True, has_apex=True, has_deep_ep=True)
WORDS = (
    "--num-layers 8 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --vocab-size 100 --bf16 --swiglu "
    "--disable-bias-linear --ffn-hidden-size 96"
)


def job(flags: str = "") -> Job:
    return Job.read(f"{WORDS} {flags}".split(), architecture="gpt", platform=ENGINE)


def test_a_job_without_them_is_as_before():
    plain = job()
    assert plain.priced == PricedFlags() and plain.shape(1).experts is None
    one = job("--context-parallel-size 1")
    assert (one.priced, one.argv) == (plain.priced, plain.argv)
    assert job("--expert-model-parallel-size 1") == plain and job("--num-experts 0").shape(1) == plain.shape(1)


def test_experts():
    """Megatron's defaults: a token goes to 2, which are as wide as the MLP and on every layer."""
    assert job("--num-experts 8").shape(1).experts == Experts(count=8, topk=2, ffn_hidden_size=96)
    full = (
        "--num-experts 8 --moe-router-topk 3 --moe-ffn-hidden-size 32 --moe-shared-expert-intermediate-size 64 "
        "--moe-layer-freq ([0]*1+[1]*3)*2 --moe-expert-capacity-factor 1.5 --expert-model-parallel-size 4 "
        "--expert-tensor-parallel-size 1 --moe-grouped-gemm --moe-token-dispatcher-type alltoall"
    )
    asked = job(full)
    assert asked.shape(2).experts == Experts(
        count=8, topk=3, ffn_hidden_size=32, shared_ffn_hidden_size=64, layers=(0, 1, 1, 1, 0, 1, 1, 1),
        capacity_factor=1.5,
    )  # fmt: skip
    assert (asked.priced.expert, asked.priced.expert_tensor) == (4, 1)
    assert "--num-experts" in asked.argv and "--expert-model-parallel-size" not in asked.argv


def test_how_copies_of_tokens_get_to_experts():
    """DeepEP's dispatcher, and beside another microbatch; by default neither."""
    plain = job("--num-experts 8 --expert-model-parallel-size 4").software
    assert (plain.dispatcher, plain.overlaps_experts) == ("alltoall", False)
    flags = "--moe-token-dispatcher-type flex --overlap-moe-expert-parallel-comm"
    asked = job(f"--num-experts 8 --expert-model-parallel-size 4 {flags}")
    assert (asked.software.dispatcher, asked.software.overlaps_experts) == ("flex", True)


def test_context_parallelism():
    """A configuration decides how many ranks share a sequence; how they do stays in the command."""
    asked = job("--context-parallel-size 4 --cp-comm-type all_gather")
    assert asked.priced.context == 4 and asked.software.gathers_keys and not job().software.gathers_keys
    shared = Configuration(tensor=2, data=2, context=4, micro_batch_size=1, global_batch_size=8)
    args = asked.arguments(shared)
    assert (args.data_parallel_size, args.context_parallel_size, args.cp_comm_type) == (2, 4, ["all_gather"])
    assert asked.refusal(shared) is None and asked.dropped == ("--context-parallel-size 4",)
    setting, state = from_flags.activation_setting(args), from_flags.training_state(args)
    assert (setting.context, setting.gathers_keys, state.data) == (4, True, 8)
    assert asked.software.activation_setting(shared).context == 4
    assert asked.software.training_state(shared).data == 8


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ("--moe-router-topk 2", "--moe-router-topk is given, and --num-experts is not; give both"),
        ("--expert-model-parallel-size 2", "--expert-model-parallel-size is given, and --num-experts is not"),
        ("--num-experts -1", "--num-experts -1 must be at least 0"),
        ("--context-parallel-size 0", "--context-parallel-size 0 is below 1; give 1 or more"),
        ("--num-experts 8 --moe-router-topk two", "--moe-router-topk: 'two' is not a whole number"),
        ("--num-experts 8 --moe-expert-capacity-factor x", "--moe-expert-capacity-factor: 'x' is not a number"),
        ("--num-experts 8 --moe-layer-freq [1,0]", "has 2 entries, and the model 8 layers; give a 1 or 0 for each"),
        ("--num-experts 8 --moe-router-topk 9", "--moe-router-topk 9 is more than --num-experts 8"),
        ("--context-parallel-size 2 --cp-comm-type a2a", "--cp-comm-type a2a has no price; give p2p or all_gather"),
        (
            "--num-experts 8 --expert-model-parallel-size 2 --moe-token-dispatcher-type allgather",
            "allgather has no price; give alltoall or flex",
        ),
        ("--overlap-moe-expert-parallel-comm", "--overlap-moe-expert-parallel-comm is given, and --num-experts is not"),
        ("--moe-token-dispatcher-type flex", "--moe-token-dispatcher-type flex is given, and --num-experts is not"),
    ],
)
def test_refusals(flags, reason):
    with pytest.raises(ValueError) as refused:
        job(flags).shape(1)
    assert reason in str(refused.value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("2", 2), ("[0]+[1]*3", [0, 1, 1, 1]), ("([1]*2+[0])*2", [1, 1, 0, 1, 1, 0]), (" [1, 0] ", [1, 0])],
)
def test_patterns_of_layers(text, expected):
    assert pattern_of_layers(text, "--moe-layer-freq") == expected


@pytest.mark.parametrize(
    "text", ["", "two", "[1", "__import__('os')", "[1]*[1]", "[1.5]", "[[1]]", "2+2", "[1]*10**9", "[True]", "[1]*-1+3"]
)
def test_what_is_no_pattern(text):
    with pytest.raises(ValueError, match="is no pattern; give a number, or lists"):
        pattern_of_layers(text, "--moe-layer-freq")
