"""What does not go together is refused by name, with a reason and a remedy; what does is not."""

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron.pipeline.dropin.refusals import OF_ALL, OF_DELAYED_WEIGHTS, require_supported, require_supported_model
from megatron.pipeline.schedules import PRESETS
from megatron.pipeline.start_up import core_version
from tests.pipeline.dropin.arguments import arguments

HERE = ("flush", "gpipe", "bpipe", "zb-h1", "zb-h2", "2bw")
VALUES = {
    "cuda_graph_impl": "local", "context_parallel_size": 2, "num_microbatches_with_partial_activation_checkpoints": 0,
    "gtp_weight_remat_size": 2, "rerun_mode": "validate_results", "save_wgrads_interval": 5, "save_dgrads_interval": 5,
    "save_params_interval": 5, "save_activations_interval": 5, "optimizer": "dist_muon",
    "expert_model_parallel_size": 2, "num_distributed_optimizer_instances": 2, "fp8": "e4m3", "fp4": "e2m1",
    "experimental_attention_variant": "dsa", "vision_pretraining_type": "dino",
    "moe_router_load_balancing_type": "quantile_balancing", "moe_expert_rank_capacity_factor": 1.0,
    "moe_grad_scale_func": max, "step_batch_size_schedule": "0:8 1B:16", "iterations_to_skip": [3],
    "ckpt_convert_format": "torch", "ddp_param_name_patterns_for_fp32_local_accumulation": ["router"],
    "non_persistent_ckpt_type": "local", "mtp_num_layers": 1, "decoder_seq_length": 128,
}  # fmt: skip


@pytest.mark.parametrize("schedule", HERE)
def test_an_ordinary_run_goes_with_every_schedule(schedule):
    """Also where a version has none of the arguments that are asked for."""
    require_supported(arguments(f"--pipeline-schedule {schedule}"))


def test_interleaved_takes_several_stages():
    """And the others one."""
    two = {"virtual_pipeline_model_parallel_size": 2}
    require_supported(arguments("--pipeline-schedule interleaved", **two))
    with pytest.raises(ValueError, match="several stages on each rank, and there is one; give --num-virtual"):
        require_supported(arguments("--pipeline-schedule interleaved"))
    with pytest.raises(ValueError, match=r"one stage on each rank, and there are 2; leave .*, or use interleaved"):
        require_supported(arguments("--pipeline-schedule 2bw", **two))


@pytest.mark.parametrize("refusal", OF_ALL, ids=lambda each: each.argument)
@pytest.mark.parametrize("schedule", ["flush", "2bw"])
def test_what_no_schedule_goes_with(refusal, schedule):
    """Under each, in one sentence that names flag, schedule and remedy."""
    args = arguments(f"--pipeline-schedule {schedule}", **{refusal.argument: VALUES.get(refusal.argument, True)})
    with pytest.raises(ValueError) as raised:
        require_supported(args)
    sentence = str(raised.value)
    assert sentence.startswith(refusal.flag) and f"--pipeline-schedule {schedule}; {refusal.remedy}" in sentence
    assert refusal.reason in sentence and "\n" not in sentence


@pytest.mark.parametrize("refusal", OF_DELAYED_WEIGHTS, ids=lambda each: each.argument)
def test_what_2bw_does_not_go_with(refusal):
    """And flush does."""
    value = {refusal.argument: VALUES.get(refusal.argument, True)}
    require_supported(arguments("--pipeline-schedule flush", **value))
    with pytest.raises(ValueError) as raised:
        require_supported(arguments("--pipeline-schedule 2bw", **value))
    sentence = str(raised.value)
    assert sentence.startswith(refusal.flag) and refusal.reason in sentence and refusal.remedy in sentence


@pytest.mark.parametrize("kind", ["quantile_balancing", "global_aux_loss", ["aux_loss", "global_aux_loss"]])
def test_counts_over_batches_are_reset_where_2bw_never_comes(kind):
    """In Megatron-LM's reductions. What counts within a microbatch is as well balanced as ever."""
    args = arguments("--pipeline-schedule 2bw", moe_router_load_balancing_type=kind)
    with pytest.raises(ValueError, match=r"--moe-router-load-balancing-type .* use aux_loss"):
        require_supported(args)
    args.moe_router_load_balancing_type = "seq_aux_loss"
    require_supported(args)


def version_of(path: Path, number: str) -> str:
    """A folder with a megatron.core of this version."""
    (path / "package_info.py").write_text(
        "\n".join(map("{} = {}".format, ("MAJOR", "MINOR", "PATCH"), number.split(".")))
    )
    return str(path)


@pytest.mark.parametrize(
    ("version", "stages", "chunks", "is_refused"),
    [("0.16.1", 4, None, True), ("0.16.1", 2, 2, True), ("0.16.1", 2, None, False), ("0.17.0", 4, None, False)],
)
def test_stages_between_the_ends_know_where_conversations_begin(
    tmp_path, monkeypatch, version, stages, chunks, is_refused
):
    """Megatron-LM 0.16 tells the first and the last alone."""
    found = SimpleNamespace(submodule_search_locations=[version_of(tmp_path, version)])
    monkeypatch.setattr(core_version, "find_spec", lambda name: found)
    cut = {"pipeline_model_parallel_size": stages, "virtual_pipeline_model_parallel_size": chunks}
    flags = f"--pipeline-schedule {'interleaved' if chunks else 'flush'}"
    require_supported(arguments(flags, **cut))
    with (
        pytest.raises(ValueError, match=r"--sft on 4 pipeline stages: .* use 2 stages") if is_refused else nullcontext()
    ):
        require_supported(arguments(flags, sft=True, **cut))


@pytest.mark.parametrize("optimizer", ["dist_muon", "soap", "lion"])
def test_2bw_goes_with_two_optimizers(optimizer):
    """All others step in ways of their own."""
    require_supported(arguments("--pipeline-schedule 2bw", optimizer="sgd"))
    with pytest.raises(ValueError, match=f"--optimizer {optimizer} .*; use adam or sgd"):
        require_supported(arguments("--pipeline-schedule 2bw", optimizer=optimizer))


def test_what_a_model_provider_sets_is_asked_again():
    """Of the built model's configuration, which validation has not seen, and of arguments that building changed."""
    args = arguments("--pipeline-schedule flush", variable_seq_lengths=False)
    require_supported_model(args, SimpleNamespace(variable_seq_lengths=False))
    with pytest.raises(ValueError, match="--variable-seq-lengths sends shapes before tensors"):
        require_supported_model(args, SimpleNamespace(variable_seq_lengths=True))
    args.modelopt_enabled = True
    with pytest.raises(ValueError, match="--modelopt-enabled changes the tensors that stages send"):
        require_supported_model(args, SimpleNamespace())


@pytest.mark.parametrize("name", sorted(PRESETS.keys() - {*HERE, "interleaved", "interleaved-zb"}))
def test_schedules_that_are_not_for_their_models(name):
    """Those in a V, pipedream and l2l, each with what to use; so is whatever preset a later one adds."""
    with pytest.raises(ValueError, match=f"--pipeline-schedule {name} .*; use "):
        require_supported(arguments(f"--pipeline-schedule {name}"))


def test_two_versions_need_a_format_that_has_room_for_them():
    """Only where checkpoints are saved or loaded."""
    require_supported(arguments("--pipeline-schedule 2bw", ckpt_format="torch"))
    for name in ("save", "load"):
        with pytest.raises(ValueError, match=r"--ckpt-format torch has no place .*; use torch_dist"):
            require_supported(arguments("--pipeline-schedule 2bw", ckpt_format="torch", **{name: "somewhere"}))


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("--pipeline-schedule newest", "there is no --pipeline-schedule newest; choose from gpipe, flush"),
        ("--pipeline-program x.csv --pipeline-schedule 2bw", "--pipeline-program x.csv takes the place of --pipeline"),
        ("--pipeline-program absent.csv", "--pipeline-program absent.csv cannot be read .*; give a CSV file"),
        ("--pipeline-schedule flush --2bw-provisional stage", "--2bw-provisional stage goes with .* 2bw, not flush"),
        ("--pipeline-schedule 2bw --2bw-provisional uniform", "uniform needs --2bw-provisional-microbatches"),
        ("--pipeline-schedule 2bw --2bw-provisional-reduce", "--2bw-provisional-reduce has no effect without"),
    ],
)
def test_choices_that_do_not_go_together(flags, sentence):
    with pytest.raises(ValueError, match=sentence):
        require_supported(arguments(flags))


@pytest.mark.parametrize(
    "flags",
    [
        "--pipeline-timeline here", "--pipeline-rank-mapping pair-adjacent", "--pipeline-log-saved-activations",
        "--2bw-provisional stage",
    ],
)  # fmt: skip
def test_our_flags_without_a_schedule(flags):
    """They would do nothing in silence."""
    with pytest.raises(ValueError, match=f"{flags} is for a pipeline schedule; give --pipeline-schedule"):
        require_supported(arguments(flags))


def test_without_our_flags_nothing_is_refused():
    """Whatever Megatron-LM is asked for."""
    require_supported(arguments("", overlap_grad_reduce=True, use_torch_fsdp2=True))


def test_a_timeline_of_nothing():
    with pytest.raises(ValueError, match="--pipeline-timeline-iterations 0 shows nothing"):
        require_supported(
            arguments("--pipeline-schedule 2bw --pipeline-timeline here --pipeline-timeline-iterations 0")
        )
