"""FP8 and moments of 16 bits: which flags go together, and what a dry run counts."""

from dataclasses import replace

import pytest

from megatron import backend

backend.install()

from megatron.planner import estimate_memory
from megatron.trainer.arguments.platform import require_hardware_queues
from megatron.trainer.dry_run import dry_run
from megatron.trainer.plan import from_flags
from tests.trainer.arguments.command_line import CPU, GPU, SMALL, arguments, parse_args

P2 = "--pipeline-model-parallel-size 2"
FP8 = "--fp8-format hybrid"
TENSORWISE = f"{FP8} --fp8-recipe tensorwise"
SIZES = "--hidden-size 64 --seq-length 64 --max-position-embeddings 64"
NARROW = "--use-precision-aware-optimizer --use-distributed-optimizer"


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (f"{FP8} --transformer-impl local", "needs the layers of --transformer-impl transformer_engine"),
        (f"{FP8} --fp8-recipe custom", "--fp8-recipe custom: .*use one of delayed, tensorwise, blockwise, mxfp8"),
        (f"{FP8} --pipeline-schedule l2l", "--pipeline-schedule l2l does not go with --fp8-format hybrid: weights"),
        (f"{FP8} {P2} --pipeline-schedule bpipe", "--pipeline-schedule bpipe does not go with .*moved with activ"),
        (f"{FP8} --log-saved-activations", "--log-saved-activations does not go with"),
        (
            f"{FP8} {P2} --pipeline-recompute",
            "delayed does not go with --pipeline-recompute: .*use --fp8-recipe tensorw",
        ),
        (f"{FP8} --mtp-num-layers 1 --position-embedding-type rope", "does not go with --mtp-num-layers: .*tensorwise"),
        (f"{FP8} {P2} --elastic-pipeline", "--elastic-pipeline"),
        (
            f"{TENSORWISE} --num-experts 4 --moe-ffn-hidden-size 24 --disable-bias-linear",
            "columns of a rank's part of an expert are 24",
        ),
        (
            f"{TENSORWISE} --multi-latent-attention --position-embedding-type rope --kv-lora-rank 12 --v-head-dim 16 "
            "--qk-head-dim 16 --qk-pos-emb-head-dim 8 --q-lora-rank 32",
            "columns of the latents of keys are 12",
        ),
        (f"{FP8} --first-last-layers-bf16", "--first-last-layers-bf16 does not go with --fp8-recipe delayed"),
        (
            f"{FP8} {P2} --fp8-recipe tensorwise --first-last-layers-bf16 --num-layers-at-end-in-bf16 3",
            "--num-layers-at-end-in-bf16 3 is more than 2, the layers of a stage",
        ),
        (f"{FP8} --hidden-size 72", "columns of a rank's queries are 72, and .* take multiples of 16"),
        (f"{FP8} --fp8-recipe mxfp8 --seq-length 8", "tokens of a microbatch on a rank are 8, .* multiples of 32"),
        ("--moe-router-padding-for-quantization --num-experts 4 --disable-bias-linear", "is for FP8; add --fp8-format"),
        (f"{NARROW} --exp-avg-dtype fp16", "--exp-avg-dtype fp16 has so narrow a range .*use bf16"),
        (f"{NARROW} --exp-avg-sq-dtype fp8", "--exp-avg-sq-dtype fp8 has so narrow a range"),
        ("--exp-avg-dtype bf16", "--exp-avg-dtype bf16 needs --use-precision-aware-optimizer; add it"),
        ("--use-precision-aware-optimizer", "does not go with a run without --use-distributed-optimizer; add it"),
        (f"{NARROW} --optimizer-kernel fused", "does not go with --optimizer-kernel fused; leave it out"),
        (f"{NARROW} {P2} --pipeline-schedule 2bw --2bw-provisional stage", "does not go with --2bw-provisional stage"),
        (f"{NARROW} --main-params-dtype fp16", "--main-params-dtype fp16: .*use fp32"),
        ("--no-fp8-wgrad", "--no-fp8-wgrad: gradients of weights are in FP8, too"),
    ],
)
def test_what_does_not_go_together(flags, said):
    """One sentence each, with the flag and what to do."""
    with pytest.raises(ValueError, match=said):
        arguments(f"{SIZES} {flags}", world_size=2 if P2 in flags else 1)


def test_what_the_machine_lacks():
    """Layers of Transformer Engine, or the units of a recipe."""
    old = replace(GPU, without_fp8={"mxfp8": "Device too old"})
    for platform, said in ((CPU, "--fp8-format hybrid needs CUDA"), (old, "mxfp8 is not for this machine: Device too")):
        with pytest.raises(ValueError, match=said):
            arguments(f"{SIZES} {FP8} --fp8-recipe mxfp8", platform=platform)


@pytest.mark.parametrize(
    ("gpu", "recipe", "said"),
    [("A100-80", "delayed", "A100-80 has no units for FP8"), ("H100", "mxfp8", "--fp8-recipe is 'mxfp8', which H100")],
)
def test_what_the_named_gpu_lacks(gpu, recipe, said):
    with pytest.raises(ValueError, match=said):
        dry_run.check_job(
            parse_args(f"{SMALL} {SIZES} {FP8} --fp8-recipe {recipe} --dry-run 1 --dry-run-gpu {gpu}".split())
        )


def test_a_dry_run_counts_layers_in_bf16():
    """Their weights have no copies in FP8, and their inputs take two bytes; one that counts all so has none in FP8."""
    ends = "--first-last-layers-bf16 --num-layers-at-start-in-bf16 {} --num-layers-at-end-in-bf16 {}"
    eighth, mixed, most, half = (
        dry_run.check_job(parse_args(f"{SMALL} {SIZES} --bf16 {flags} --dry-run 1 --dry-run-gpu H100".split()))
        for flags in (TENSORWISE, f"{TENSORWISE} {ends.format(1, 1)}", f"{TENSORWISE} {ends.format(2, 2)}", "")
    )
    parts = [each.memory[0].parts for each in (eighth, mixed, most, half)]
    assert parts[0].weights > parts[1].weights > parts[2].weights == parts[3].weights
    assert parts[0].activations < parts[1].activations < parts[2].activations == parts[3].activations


def test_scales_that_replicas_share_take_a_queue():
    """No stream may share its hardware queue with the reductions of scales, which computations wait for."""
    flags = f"{SIZES} --tensor-model-parallel-size 2 {P2} --pipeline-schedule 2bw --global-batch-size 8"
    args = {more: arguments(f"{flags} {more}", world_size=8, platform=GPU) for more in ("", FP8, TENSORWISE)}
    queues = {"CUDA_DEVICE_MAX_CONNECTIONS": str(_least_queues(args[""]))}
    require_hardware_queues(args[TENSORWISE], queues)
    with pytest.raises(ValueError, match="the job may hang; export 32"):
        require_hardware_queues(args[FP8], queues)
    require_hardware_queues(args[FP8], {"CUDA_DEVICE_MAX_CONNECTIONS": "32"})


def _least_queues(args) -> int:
    for number in range(2, 33):
        try:
            require_hardware_queues(args, {"CUDA_DEVICE_MAX_CONNECTIONS": str(number)})
        except ValueError:
            continue
        return number
    raise AssertionError("32 are enough")


def memory(flags: str) -> list:
    args = arguments(f"{SIZES} --bf16 --untie-embeddings-and-output-weights {flags} {P2}", world_size=2, platform=GPU)
    args = replace(args, padded_vocab_size=128)
    _, demand = from_flags.prove(args)
    ranks = estimate_memory(
        from_flags.architecture(args), from_flags.activation_setting(args), from_flags.training_state(args), demand,
        layers=(2, 2),
    )  # fmt: skip
    return [each.parts for each in ranks]


def test_what_a_dry_run_counts():
    """Of each version of a linear's weight two bytes more in FP8, and moments of two bytes."""
    linears = 2 * 12 * 64 * 64
    for schedule, versions in (("flush", 1), ("2bw", 2)):
        schedule = f"--pipeline-schedule {schedule}"
        half, eighth = memory(schedule), memory(f"{schedule} {FP8}")
        for before, after in zip(half, eighth, strict=True):
            assert after.weights - before.weights == versions * 2 * linears
            assert after.activations < before.activations and after.optimizer == before.optimizer
    wide, narrow = (memory(f"{NARROW} --exp-avg-dtype bf16 --exp-avg-sq-dtype {each}") for each in ("fp32", "bf16"))
    for before, after in zip(wide, narrow, strict=True):
        assert before.optimizer / after.optimizer == pytest.approx((4 + 2 + 4) / (4 + 2 + 2))
