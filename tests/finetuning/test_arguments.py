"""The command line: what follows from it, and a sentence for what cannot be."""

import pytest

from megatron.finetuning.arguments import parse_args

LEAST = ["--model_name_or_path", "m", "--task", "causal-lm", "--train_file", "t.jsonl", "--output_dir", "o"]


def test_both_spellings():
    args = parse_args([*LEAST, "--learning-rate", "1e-3", "--per_device_train_batch_size=4"])
    assert (args.learning_rate, args.per_device_train_batch_size) == (1e-3, 4)
    assert args.do_train and not args.do_eval


def test_clipping_follows_the_schedule():
    assert parse_args([*LEAST, "--pipeline_schedule", "flush"]).max_grad_norm == 1.0
    assert parse_args(LEAST).max_grad_norm == 0.0
    assert parse_args([*LEAST, "--max_grad_norm", "0"]).max_grad_norm == 0.0


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--max_grad_norm", "1"], "--max_grad_norm 1 needs the norm of all stages"),
        (["--pipeline_schedule", "pipedream", "--gradient_accumulation_steps", "2"], "pipedream steps after each"),
        (
            ["--pipeline_schedule", "flush", "--weight_prediction"],
            "--weight_prediction softens the staleness of ftpipe",
        ),
        (["--pipeline_schedule", "2bw", "--gap_aware"], "--gap_aware softens"),
        (["--weight_prediction", "--optim", "adafactor"], "and not of adafactor"),
        (["--per_device_eval_batch_size", "3"], "stages exchange tensors of one shape"),
        (["--do_eval"], "--do_eval needs --validation_file"),
        (["--devices", "4"], "--devices 4 is for --dry_run"),
        (["--data_parallel_size", "2"], "replicas of a captured pipeline are not supported"),
        (["--bf16"], "--bf16 means weights in FP32 .*; --dtype bfloat16 has"),
        (["--learning_rate", "-1"], "-1 is less than 0"),
        (["--task", "poetry"], "invalid choice: 'poetry'"),
        (["--no_such_flag"], "unrecognized arguments: --no_such_flag"),
    ],
)
def test_sentences(words, sentence):
    with pytest.raises(ValueError, match=sentence):
        parse_args([*LEAST, *words])


def test_what_is_missing():
    with pytest.raises(ValueError, match="nothing to train on"):
        parse_args([*LEAST[:4], "--do_train", "--output_dir", "o"])
    with pytest.raises(ValueError, match="nowhere to write"):
        parse_args(LEAST[:6])
