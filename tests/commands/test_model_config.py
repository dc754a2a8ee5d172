"""Models by a config.json of Hugging Face's, and by name."""

import json
import math

import pytest
import transformers

from megatron.commands import grid_search as tool
from megatron.commands.grid_search.model_config import KNOWN, NAMED, model_of_config, named_model
from megatron.planner import Architecture
from megatron.planner.memory.architecture import ExpertDegrees
from megatron.planner.memory.parameters import stage_parameters
from megatron.trainer.arguments import Platform
from megatron.trainer.plan.command import Job

GPU = Platform(is_cuda=True, has_transformer_engine=True, has_apex=True, has_deep_ep=True)
SMALL = {
    "llama": {"num_key_value_heads": 2, "head_dim": 16}, "mistral": {"num_key_value_heads": 2, "sliding_window": None},
    "qwen2": {"num_key_value_heads": 2}, "qwen3": {"num_key_value_heads": 2, "head_dim": 24},
    "mixtral": {"num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {"num_key_value_heads": 2, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48,
                  "shared_expert_intermediate_size": 32},
    "qwen3_moe": {"num_key_value_heads": 2, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48,
                  "head_dim": 16},
    "gpt2": {"n_layer": 2, "n_embd": 64, "n_head": 4, "n_positions": 128},
    "gpt_neo": {"num_layers": 2, "num_heads": 4, "attention_types": [[["global"], 2]]},
    "gpt_neox": {"use_parallel_residual": False}, "bert": {},
    "gpt_oss": {"num_key_value_heads": 2, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2,
                "rope_parameters": {"rope_type": "default", "rope_theta": 150000.0},
                "sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]},
    "megatron-bert": {},
}  # fmt: skip
SMALL["deepseek_v3"] = {
    "first_k_dense_replace": 1, "moe_intermediate_size": 32, "num_key_value_heads": 4, "n_routed_experts": 16,
    "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2, "q_lora_rank": 32, "kv_lora_rank": 16,
    "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "n_shared_experts": 1, "rope_scaling": None,
    "num_nextn_predict_layers": 0, "head_dim": 8, "norm_topk_prob": True,
}  # fmt: skip
SMALL["deepseek_v2"] = {**SMALL["deepseek_v3"], "norm_topk_prob": False, "topk_method": "greedy"}
SIZES = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 96,
         "vocab_size": 256, "max_position_embeddings": 128}  # fmt: skip


def job_of(argv, architecture="gpt", sequence_length=64) -> Job:
    return Job.read([*argv, "--seq-length", str(sequence_length)], architecture=architecture, platform=GPU)


def total_parameters(shape: Architecture) -> int:
    (count,) = stage_parameters(shape, 1, (shape.num_layers,), ExpertDegrees())
    return count


def config_file(tmp_path, kind: str, **values):
    """What transformers writes of such a model."""
    sizes = {} if kind in ("gpt2", "gpt_neo") else SIZES
    if kind == "gpt_neo":
        sizes = {name: SIZES[name] for name in ("hidden_size", "intermediate_size", "max_position_embeddings")}
    given = {"vocab_size": 256, **sizes, **SMALL[kind], **values}
    transformers.AutoConfig.for_model(kind, **given).save_pretrained(tmp_path)
    return tmp_path / "config.json"


@pytest.mark.parametrize("kind", KNOWN)
def test_the_model_has_the_parameters_of_transformers(tmp_path, kind):
    """As many as its own module, for each family: layers, heads, groups, experts, biases, norms, tied embeddings. But
    for biases of GPT-Neo's queries, keys and values, which its module has not, and the gate of Qwen2-MoE's shared
    expert, which megatron.core's has not."""
    path = config_file(tmp_path, kind)
    configured = model_of_config(str(path), sequence_length=64)
    shape = job_of(configured.argv, configured.architecture).shape(1)
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    auto = transformers.AutoModelForPreTraining if "bert" in kind else transformers.AutoModelForCausalLM
    import torch

    with torch.device("meta"):
        module = auto.from_config(config)
    more = {"gpt_neo": 2 * 3 * 64, "qwen2_moe": -2 * 64}.get(kind, 0)
    assert total_parameters(shape) == more + sum({id(each): each.numel() for each in module.parameters()}.values())


@pytest.mark.parametrize("name", NAMED)
def test_named_models_have_the_size_of_their_name(name):
    """Within a tenth, where the name has one."""
    configured = named_model(name)
    job = job_of(configured.argv, configured.architecture, 512)
    count = total_parameters(job.shape(1))
    said = [float(part[:-1]) for part in name.split("-") if part[-1:] == "b" and part[:-1].replace(".", "").isdigit()]
    sizes = {"mixtral-8x7b": 46.7, "mixtral-8x22b": 140.6, "gpt2": 0.124, "gpt2-medium": 0.355, "gpt2-large": 0.774,
             "gpt2-xl": 1.558, "bert-large": 0.335}  # fmt: skip
    assert count / 1e9 == pytest.approx(sizes.get(name) or said[0], rel=0.1)


def test_a_search_takes_a_config(run, tmp_path):
    """As it takes the same flags by hand; flags of the command line come last, and rope's scaling is in the script."""
    path = config_file(
        tmp_path, "llama", rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0,
                                            "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                                            "original_max_position_embeddings": 64},
    )  # fmt: skip
    common = ["--cluster", "A100-80", "--gpus-per-node", 2, "--global-batch-size", 8, "--schedules", "flush", "--json",
              "--seq-length", 64, "--simulate", 1]  # fmt: skip
    status, out, err = run("search", *common, "--model-config", path, "--output", tmp_path / "plan")
    assert status == 0, err
    argv = model_of_config(str(path), sequence_length=64).argv
    by_hand = json.loads(run("search", *common, *argv)[1])
    assert json.loads(out)["best"] == by_hand["best"]
    script = (tmp_path / "plan" / "best.sh").read_text()
    for flag in ("--use-rope-scaling", "--rotary-base 500000", "--swiglu", "--num-query-groups 2", "--vocab-size 256"):
        assert flag in script
    fewer = json.loads(run("search", *common, "--model-config", path, "--num-layers", 1)[1])
    assert fewer["best"][0]["iteration_seconds"] < by_hand["best"][0]["iteration_seconds"]


def test_a_search_takes_a_name(run):
    common = ["--cluster", "A100-80", "--global-batch-size", 8, "--schedules", "flush", "--simulate", 1]
    status, out, _ = run("search", *common, "--model", "llama-2-7b", "--seq-length", 2048, "--json")
    assert status == 0 and json.loads(out)["best"]
    assert "--seq-length" in run("search", *common, "--model", "llama-2-7b")[2]
    message = run("search", *common, "--model", "llama-2-7")[2].splitlines()[-1]
    assert message == (
        "error: --model llama-2-7 is no model that is known; the nearest that is known is llama-2-7b; --list-models "
        "lists them"
    )


def test_names_are_listed(run, capsys):
    with pytest.raises(SystemExit) as ended:
        tool.main(["search", "--list-models"])
    assert not ended.value.code and capsys.readouterr().out.split() == [*NAMED]


@pytest.mark.parametrize(
    ("kind", "changes", "reason"),
    [
        ("llama", {"model_type": "phi3"}, "model_type 'phi3' is not among llama, mistral, "),
        ("llama", {"model_type": None}, "model_type is missing, which has to be among llama, mistral, "),
        ("llama", {"hidden_size": None}, "hidden_size is missing; give the config.json of a model"),
        (
            "llama",
            {"hidden_size": math.inf},
            "hidden_size is inf, no number from 0 on; give the config.json of a model",
        ),
        (
            "llama",
            {"hidden_size": math.nan},
            "hidden_size is nan, no number from 0 on; give the config.json of a model",
        ),
        ("llama", {"rope_theta": -1}, "rope_theta is -1, no number from 0 on; give the config.json of a model"),
        ("llama", {"rope_scaling": {"rope_type": "llama3"}}, "rope_scaling.factor is missing; give the config.json"),
        ("llama", {"tie_word_embeddings": "no"}, "tie_word_embeddings is 'no'; give true or false"),
        ("qwen3_moe", {"num_experts_per_tok": None}, "num_experts_per_tok is missing; give the config.json of a model"),
        ("llama", {"hidden_size": "64"}, "hidden_size is '64', no number; give"),
        ("llama", {"hidden_act": "relu"}, "the activation is 'relu', and llama is read with silu or swish; give the"),
        ("llama", {"attention_bias": True}, "attention_bias is True, and llama is read with False; give the model"),
        ("llama", {"quantization_config": {"bits": 4}}, "and weights that are quantized are not trained here; give"),
        ("mistral", {"sliding_window": 32}, "sliding_window is 32, and attention to a window is not modelled; give"),
        ("qwen3_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step is 2, and experts are read for every layer"),
    ],
)
def test_what_a_config_may_not_say(tmp_path, kind, changes, reason):
    """One sentence with the file, the value, the reason and the remedy."""
    path = config_file(tmp_path, kind)
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(ValueError) as found:
        model_of_config(str(path), sequence_length=64)
    assert str(found.value).startswith(f"{path}: ") and reason in str(found.value) and "\n" not in str(found.value)


def test_null_is_the_default_of_the_family(tmp_path):
    path = config_file(tmp_path, "llama")
    expected = model_of_config(str(path), sequence_length=64)
    document = json.loads(path.read_text())
    for key in ("attention_bias", "hidden_act", "tie_word_embeddings", "rope_scaling", "quantization_config"):
        path.write_text(json.dumps(document | {key: None}))
        assert model_of_config(str(path), sequence_length=64) == expected, key


def test_a_window_that_is_no_shorter_is_all(tmp_path):
    path = config_file(tmp_path, "mistral", sliding_window=64)
    assert model_of_config(str(path), sequence_length=64).argv
    with pytest.raises(ValueError, match="sliding_window is 64"):
        model_of_config(str(path), sequence_length=None)


def test_what_is_not_modelled_is_noted(tmp_path):
    for kind, key, more in (("gpt_neox", "use_parallel_residual", {"use_parallel_residual": True}),
                            ("bert", "model_type", {})):  # fmt: skip
        path = config_file(tmp_path, kind, **more)
        (note,) = model_of_config(str(path), sequence_length=64).notes
        assert note.startswith(f"{path}: {key}: ")


def test_a_t5_is_not_searched(tmp_path):
    """It is trained from its folder, and refused here by its name, as every other family."""
    path = tmp_path / "config.json"
    path.write_text('{"model_type": "t5"}')
    with pytest.raises(ValueError, match=r"model_type.*t5"):
        model_of_config(str(path), sequence_length=64)


def test_two_models_are_refused(run, tmp_path):
    status, _, err = run("search", "--cluster", "A100-80", "--model", "gpt2", "--model-yaml", "x.yaml")
    assert status == 1 and err.splitlines()[-1] == "error: --model-yaml and --model exclude each other; keep one"
