"""tools/text_generation.py: loads what training saved, continues prompts, streams, and says what is wrong."""

import contextlib
import io
import json
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

from tests import workers

CASES = "tests.commands.test_text_generation:"
REPOSITORY = Path(__file__).resolve().parent.parent.parent
PROMPT = "The käse "


def save_model(directory, flags="--tensor-model-parallel-size 2"):
    """Save a model as training would, from two ranks."""
    import torch.distributed as dist

    from megatron.core import parallel_state
    from megatron.trainer.arguments import Platform, parse_args, resolve_platform, validate_args
    from megatron.trainer.arguments.flags.config import TrainConfig
    from megatron.trainer.checkpoint.checkpoint import CheckpointPosition, RunParts, save_checkpoint
    from megatron.trainer.checkpoint.writer import CheckpointWriter
    from megatron.trainer.models import core_config
    from megatron.trainer.models.gpt import build_chunks, gpt_model
    from megatron.trainer.plan import from_flags
    from megatron.trainer.start_up.initialize import initialize

    argv = (
        "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 "
        "--micro-batch-size 1 --global-batch-size 2 --lr 0.1 --train-iters 1 --mock-data "
        "--tokenizer-type ByteLevelTokenizer --swiglu --init-method-std 0.4"
    )
    args = parse_args([*argv.split(), *flags.split()])
    validate_args(args, world_size=dist.get_world_size())
    resolve_platform(args, Platform(is_cuda=False, has_transformer_engine=False, has_apex=False))
    args = initialize(TrainConfig.of(args, padded_vocab_size=512))
    model_config = core_config.transformer_config(args)
    chunks = build_chunks(
        lambda own_config: lambda pre, post: gpt_model(args, own_config, pre_process=pre, post_process=post),
        model_config,
        stages=args.schedule.stages_of(parallel_state.get_pipeline_model_parallel_rank()),
        layers=from_flags.layers_of_stages(model_config),
    )
    for iteration in (5, 7):
        save_checkpoint(
            CheckpointWriter(directory), RunParts(chunks), args=args, position=CheckpointPosition(iteration=iteration)
        )
        with contextlib.suppress(StopIteration):
            next(chunks[0].parameters()).data.neg_()
    parallel_state.destroy_model_parallel()


def run_tool(argv, stdin=None):
    """Exit status, standard output and standard error of the tool in this process."""
    from megatron.commands import text_generation
    from megatron.core import parallel_state

    output, errors = io.StringIO(), io.StringIO()
    with (
        mock.patch("megatron.trainer.start_up.initialize.shut_down"),  # the process group belongs to the pool
        mock.patch("sys.stdin", io.StringIO(stdin or "")),
        contextlib.redirect_stdout(output),
        contextlib.redirect_stderr(errors),
    ):
        try:
            status = text_generation.main(argv)
        except SystemExit as end:
            status = end.code
        finally:
            if parallel_state.is_initialized():
                parallel_state.destroy_model_parallel()
    return status, output.getvalue(), errors.getvalue()


def plain_greedy(directory, prompt, num_tokens):
    """Ids after the prompt by argmax of plain forwards of the whole sequence."""
    import torch

    from megatron.commands import text_generation
    from megatron.core import parallel_state

    options = text_generation.parse(["--load", directory, "--prompt", prompt])
    model, tokenizer, vocab_size = text_generation.load_model(text_generation.training_arguments(options))
    ids = list(tokenizer.tokenize(prompt))
    start = len(ids)
    with torch.no_grad():
        for _ in range(num_tokens):
            length = len(ids)
            mask = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)
            logits = model(torch.tensor([ids]), torch.arange(length).unsqueeze(0), mask)
            ids.append(int(logits[0, -1, :vocab_size].argmax()))
    parallel_state.destroy_model_parallel()
    return ids[start:]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    directory = str(tmp_path_factory.mktemp("checkpoint"))
    workers.run(2, CASES + "save_model", directory=directory)
    return directory


def tool(*argv, stdin=None):
    ((status, output, errors),) = workers.run(1, CASES + "run_tool", argv=list(map(str, argv)), stdin=stdin)
    return status, output, errors


def continued(checkpoint, *flags, **options):
    status, output, errors = tool("--load", checkpoint, "--json", "--ignore-eod", *flags, **options)
    assert status == 0, errors
    return json.loads(output.splitlines()[-1])


@pytest.mark.full
def test_greedy_text_is_the_argmax_of_plain_forwards(checkpoint):
    """A checkpoint of two tensor-parallel ranks, loaded in one process: every token is the likeliest one."""
    result = continued(checkpoint, "--prompt", PROMPT, "--temperature", 0, "--num-tokens", 20)
    ((plain),) = workers.run(1, CASES + "plain_greedy", directory=checkpoint, prompt=PROMPT, num_tokens=20)
    assert result["tokens"] == plain and result["stopped"] == "length"
    assert (result["prompt"], len(result["tokens"])) == (PROMPT, 20)
    other = continued(checkpoint, "--prompt", PROMPT, "--temperature", 0, "--num-tokens", 20, "--ckpt-step", 5)
    assert other["tokens"] != plain, "--ckpt-step takes the older weights"


@pytest.mark.full
def test_stages_of_the_training_run_do_not_matter(tmp_path):
    """A model saved from two ranks with two stages each continues as the same model saved from one process."""
    cuts = {1: "", 2: "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2"}
    found = []
    for num_ranks, flags in cuts.items():
        folder = str(tmp_path / str(num_ranks))
        workers.run(num_ranks, CASES + "save_model", directory=folder, flags=f"--num-layers 4 {flags}")
        flags = ["--ckpt-step", 5, "--prompt", PROMPT, "--temperature", 0, "--num-tokens", 20]  # 5: as initialised
        found.append(continued(folder, *flags)["tokens"])
    assert found[0] == found[1] and len(found[0]) == 20


@pytest.mark.full
def test_layers_that_predict_further_tokens_are_left_out(tmp_path):
    """A model that was trained with them continues as the same model without."""
    found = []
    for flags in ("", "--mtp-num-layers 2"):
        folder = str(tmp_path / flags)
        workers.run(1, CASES + "save_model", directory=folder, flags=f"--position-embedding-type rope {flags}")
        flags = ["--ckpt-step", 5, "--prompt", PROMPT, "--temperature", 0, "--num-tokens", 8]  # 5: as initialised
        found.append(continued(folder, *flags)["tokens"])
    assert found[0] == found[1] and len(found[0]) == 8


def test_sampled_text_follows_the_seed(checkpoint):
    """The same seed gives the same text, another seed another; the prompt may come from standard input."""
    flags = ["--temperature", 0.9, "--top-k", 50, "--top-p", 0.95, "--num-tokens", 40]
    first = continued(checkpoint, *flags, stdin=PROMPT)
    assert first == continued(checkpoint, *flags, "--prompt", PROMPT)
    assert first["tokens"] != continued(checkpoint, *flags, "--prompt", PROMPT, "--seed", 1)["tokens"]
    assert len(first["tokens"]) == 40, "beyond the model's 32 positions too"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--prompt", "x" * 33], ("33 tokens", "32 positions")),
        (["--prompt", "a", "--ckpt-step", 6], ("iter_0000006 does not exist", "--ckpt-step 7")),
        (["--prompt", "a", "--load", "/nowhere"], ("--load /nowhere holds no checkpoint; name the directory",)),
        (["--prompt", "a", "--temperature", -1], ("temperature -1",)),
        (["--prompt", "a", "--num-tokens", 0], ("--num-tokens 0",)),
        (["--prompt", "a", "--tokenizer-type", "SentencePieceTokenizer"], ("--tokenizer",)),
    ],
)
def test_what_cannot_be_done_is_said_in_one_sentence(checkpoint, flags, words):
    """Status 2, one error line, no traceback."""
    status, _, errors = tool("--load", checkpoint, *flags)
    assert status == 2 and "Traceback" not in errors
    assert all(word in errors.splitlines()[-1] for word in words), errors


def test_text_comes_in_whole_characters():
    """A character of several tokens is printed with the last of them; nothing is lost at the end."""
    from megatron.commands import text_generation

    class Bytes:
        def detokenize(self, ids):
            return bytes(ids).decode("utf-8", errors="replace")

    text = "aé€😀"
    pieces = list(text_generation.pieces(Bytes(), list(text.encode())))
    assert pieces == ["a", "é", "€", "😀", ""]
    assert "".join(text_generation.pieces(Bytes(), list(text.encode())[:-1])) == "aé€\ufffd"
    assert list(text_generation.pieces(Bytes(), [97, 300, 98])) == ["a", "<|300|>", "b", ""]


@pytest.mark.full
def test_door(checkpoint):
    """As a user runs it: the prompt and its continuation on standard output, status 0."""
    command = [sys.executable, str(REPOSITORY / "tools" / "text_generation.py"), "--load", checkpoint]
    command += ["--prompt", PROMPT, "--temperature", "0", "--num-tokens", "8", "--ignore-eod"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    expected = continued(checkpoint, "--prompt", PROMPT, "--temperature", 0, "--num-tokens", 8)
    assert expected["text"]
    assert result.stdout == PROMPT + expected["text"] + "\n"
    assert "Traceback" not in result.stderr


def test_a_prompt_with_half_a_character(capsys):
    """As bytes that are no UTF-8 come from the command line; nothing is loaded."""
    from megatron.commands import text_generation

    assert text_generation.main(["--load", "nowhere", "--prompt", "a\udcff"]) == 2
    assert "error: the prompt has the lone surrogate \\udcff at character 2" in capsys.readouterr().err


def test_standard_input_of_other_bytes(capsys, monkeypatch):
    """Bytes that are no UTF-8 are refused before anything is loaded."""
    from megatron.commands import text_generation

    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"a\xff"), encoding="utf-8"))
    assert text_generation.main(["--load", "nowhere"]) == 2
    assert "error: standard input is no UTF-8 text (invalid start byte); convert it" in capsys.readouterr().err


def test_prompts_that_a_tokenizer_cannot_take():
    """An empty one begins a document; another is refused in a sentence."""
    from megatron.commands import text_generation

    class Numbers:
        eod = 9

        def tokenize(self, text):
            return [int(word) for word in text.split(" ")]

    assert text_generation._prompt_ids(Numbers(), "") == [9]
    assert text_generation._prompt_ids(Numbers(), "1 2") == [1, 2]
    with pytest.raises(ValueError, match=r"^the prompt cannot be tokenized: invalid literal .*; give one that"):
        text_generation._prompt_ids(Numbers(), "one")
