"""Published command lines: every argument parses, and works or is refused by name; a dry run passes or says why not."""

import importlib.util
import re

import pytest

from megatron import backend

backend.install()

from megatron.trainer.arguments import parse_args, resolve_platform, validate_args
from megatron.trainer.dry_run.dry_run import run_dry
from tests.trainer.arguments import t5_command_line
from tests.trainer.arguments.bert_command_line import defaults
from tests.trainer.arguments.command_line import GPU
from tests.trainer.arguments.published_command_lines import (
    BERT_340M,
    GPT3_175B,
    GPT3_175B_STEPS,
    LLAMA3_8B,
    LLAMA3_DATA,
    LLAMA3_MOCK,
    PASSES,
    REFUSED,
    recipe,
)


def test_bert_script():
    """The BERT 340M script is accepted, whose 16 stages do not divide its 24 layers."""
    args = parse_args(BERT_340M.split(), defaults=defaults())
    assert any("24 on 16 stages: 8 stages of 2, 8 of 1" in note for note in validate_args(args, world_size=128))
    resolve_platform(args, GPU)
    assert args.tokenizer_type == "BertWordPieceLowerCase" and args.bert_binary_head


def test_gpt3_script_with_a_batch_that_its_ramp_up_divides():
    """The GPT-3 175B script is accepted on 128 x 2 GPUs as it stands, but for pipedream it is refused by name."""
    args = parse_args(GPT3_175B.split())
    validate_args(args, world_size=256)
    resolve_platform(args, GPU)
    assert args.tokenizer_type == "GPT2BPETokenizer" and args.data_parallel_size == 2
    assert args.batch_sizes.num_microbatches(0) == 8
    with pytest.raises(ValueError, match=r"--pipeline-schedule pipedream .*--clip-grad 0"):
        validate_args(parse_args([*GPT3_175B.split(), "--pipeline-schedule", "pipedream"]), world_size=256)


def test_gpt3_script_under_2bw_names_the_batch_that_is_too_small():
    """Under 2bw the ramp-up's first batches are smaller than the pipeline is deep: refused before anything starts."""
    args = parse_args([*GPT3_175B.split(), "--pipeline-schedule", "2bw"])
    with pytest.raises(ValueError, match="8"):
        validate_args(args, world_size=256)
    args = parse_args([*GPT3_175B.replace("16 16 5859375", "32 32 5859375").split(), "--pipeline-schedule", "2bw"])
    validate_args(args, world_size=256)


@pytest.mark.parametrize("data", [LLAMA3_MOCK, LLAMA3_DATA])
def test_llama3_script_in_bf16(data):
    """The Llama-3 8B script without its FP8 part is accepted on 8 GPUs, its loss per token included."""
    args = parse_args(f"{LLAMA3_8B} {data}".split())
    notes = validate_args(args, world_size=8)
    resolve_platform(args, GPU)
    assert args.data_parallel_size == 8 and args.train_iters == 1953125000 // 128
    assert any("--sequence-parallel has no effect" in note for note in notes)


def dry_run(argv: str, num_gpus: int, capsys, architecture: str = "gpt") -> tuple[int, str, str]:
    """Exit status, output and error output of a dry run where neither TensorBoard nor Weights & Biases is there."""
    of_program = {"bert": defaults, "t5": t5_command_line.defaults}.get(architecture, dict)()
    args = parse_args([*argv.split(), "--dry-run", str(num_gpus)], defaults=of_program)
    return run_dry(args, f"pretrain_{architecture}.py"), *capsys.readouterr()


@pytest.fixture
def bare(monkeypatch, tmp_path):
    """A machine without launcher, files of the user's, and packages that only log."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name in ("tensorboard", "wandb") else find(name, *more)
    )
    monkeypatch.chdir(tmp_path)


@pytest.mark.sample(16)
@pytest.mark.parametrize(
    ("name", "schedule"),
    [
        pytest.param(name, schedule, marks=[pytest.mark.full] if schedule in published.full else [])
        for name, published in PASSES.items()
        for schedule in published.schedules
    ],
)
def test_dry_run_passes(bare, capsys, name, schedule):
    """With nothing but a schedule added the job is proved and estimated; what is not here is a warning each."""
    published = PASSES[name]
    argv = f"{published.argv} {published.changed} --pipeline-schedule {schedule}"
    status, out, err = dry_run(argv, published.num_gpus, capsys, published.architecture)
    assert (status, err) == (0, "")
    assert "proved for any number of batches" in out
    (billions,) = re.findall(r"model: (\S+) billion parameters", out)
    assert float(billions) == pytest.approx(published.billions, rel=0.02)
    for load in re.findall(r"--load (\S+)", argv):
        assert f"warning: --load {load} is not on this machine" in out
    if "--tensorboard-dir" in argv:
        assert re.search(
            r"warning: --tensorboard-dir \S+ has no effect: the package tensorboard is not installed here", out
        )


@pytest.mark.parametrize("name", REFUSED)
def test_all_that_is_refused_is_named_at_once(name):
    """One message names every flag that has to go, and no other."""
    with pytest.raises(ValueError) as error:
        validate_args(parse_args([*recipe(name).split(), "--pipeline-schedule", "flush"]), world_size=8)
    lines = str(error.value).splitlines()
    lines = lines if len(lines) == 1 else lines[1:]
    assert sorted(re.match(r" *(--[\w-]+)", line)[1] for line in lines) == sorted(REFUSED[name].split())


def test_steps_of_the_gpt3_script():
    """The newer form of the script trains the batches that its list says."""
    args = parse_args(GPT3_175B_STEPS.split())
    validate_args(args, world_size=128)
    assert args.batch_sizes.all_num_microbatches() == [16, 320, 624, 928, 1232, 1536]


def test_vocabulary_of_llama2_without_its_tokenizer(bare, capsys):
    """The embedding of a Llama-2 is not taken to be GPT-2's; with a small batch, whose proof is short."""
    _, out, _ = dry_run(f"{PASSES['Llama-2 70B'].argv} --global-batch-size 8", 64, capsys)
    assert "the embedding is taken to have 32768 rows, as Llama 2's" in out


def test_shape_that_only_the_cluster_knows(bare, capsys):
    """Without the checkpoint there is no model to check, and the sentence says how to go on."""
    status, _, err = dry_run(f"{PASSES['Llama-2 70B'].argv} --use-checkpoint-args", 64, capsys)
    assert (
        status == 1 and "--load checkpoints, which is not on this machine; for a dry run here give the model's" in err
    )
