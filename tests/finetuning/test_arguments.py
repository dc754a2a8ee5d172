"""The command line: what follows from it, and a sentence for what cannot be."""

import pytest

from megatron.finetuning.arguments import parse_args, settled_intervals
from megatron.finetuning.partitioning import weight_bytes

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
    ("argv", "sentence"),
    [
        ("--max_grad_norm 1", "--max_grad_norm 1 needs the norm of all stages"),
        ("--pipeline_schedule pipedream --gradient_accumulation_steps 2", "pipedream steps after each"),
        (
            "--pipeline_schedule flush --weight_prediction",
            "--weight_prediction softens the staleness of ftpipe",
        ),
        ("--pipeline_schedule 2bw --gap_aware", "--gap_aware softens"),
        ("--pipeline_schedule flush --provisional_steps", "--provisional_steps softens"),
        ("--provisional_steps --weight_prediction", "--weight_prediction has others; leave one out"),
        ("--provisional_steps --gap_aware", "--gap_aware has others; leave one out"),
        ("--provisional_steps", "with --gradient_accumulation_steps 1 each is stepped at once; give 2 or more"),
        ("--weight_prediction --optim adafactor", "steps of sgd, adam and adamw, not of adafactor"),
        ("--per_device_eval_batch_size 3", "stages exchange tensors of one shape"),
        ("--do_eval", "--do_eval needs --validation_file"),
        ("--devices 4", "--devices 4 is for --dry_run"),
        ("--data_parallel_size 2", "1 device cannot be 2 equal pipelines; give a --data_parallel_size that divides"),
        (
            "--data_parallel_size 2 --provisional_steps --gradient_accumulation_steps 2",
            "--provisional_steps takes the gradients so far, of which --data_parallel_size 2 replicas have each a part",
        ),
        (
            "--fp16",
            "--fp16 has a loss scale.* under ftpipe each steps alone; give --bf16, or --pipeline_schedule flush",
        ),
        (
            "--attn_implementation flash_attention_2",
            "stages are graphs of torch's operators, which 'flash_attention_2' is not known to be; give eager or sdpa",
        ),
        ("--fp16 --bf16", "--bf16 has weights in bfloat16, and --fp16 in float16; leave one out"),
        (
            "--pipeline_schedule flush --fp16 --min_loss_scale 4 --initial_loss_scale 2",
            "--min_loss_scale 4 is above --initial_loss_scale 2; give less",
        ),
        ("--bf16 --dtype float32", "--bf16 has weights in bfloat16, and --dtype is float32; leave one out"),
        ("--bf16 --weight_prediction", "with --bf16 that is of FP32 masters; leave one out"),
        ("--learning_rate -1", "-1 is no number from 0 on"),
        ("--pipeline_schedule l2l --partition P.json", "--partition P.json: under l2l the layers are the stages"),
        ("--pipeline_schedule l2l --fp16", "--fp16 needs a loss scale, and l2l has none; give --bf16"),
        ("--pipeline_schedule l2l --no_recompute", "--no_recompute: l2l recomputes"),
        ("--no_recompute", "--no_recompute: ftpipe recomputes, since .* or give --pipeline_schedule flush"),
        ("--pipeline_schedule l2l --load_in_4bit", "--load_in_4bit packs frozen weights, and here all weights"),
        ("--pipeline_schedule l2l --load_in_4bit --load_in_8bit", "--load_in_4bit and --load_in_8bit choose two"),
        (
            "--pipeline_schedule l2l --l2l_moments bfloat16 --optim sgd",
            "masters in FP32, not for --optim",
        ),
        (
            "--pipeline_schedule l2l --l2l_moments bfloat16 --dtype bfloat16",
            "not for --dtype bfloat16; leave one",
        ),
        ("--load_in_8bit", "--load_in_8bit packs weights that live on the host; give --pipeline_schedule l2l"),
        ("--pipeline_schedule l2l --l2l_update eager", "--max_grad_norm is 1; give --max_grad_norm 0, or leave"),
        (
            "--pipeline_schedule l2l --optim adafactor --data_parallel_size 2 --dry_run --devices 2",
            "--optim adafactor cannot step a part of a layer alone",
        ),
        ("--num_train_epochs inf", "inf is no number from 0 on"),
        (f"--data_parallel_size {10**400}", "00' is too large; give a smaller number"),
        ("--adam_beta1 1", "1 is no number from 0 to less than 1"),
        ("--adam_beta2 1.0", "1.0 is no number from 0 to less than 1"),
        ("--warmup_ratio 1.5", "1.5 is no number from 0 to 1"),
        (
            "--save_strategy best",
            "--save_strategy best compares evaluations during training; give --eval_strategy steps",
        ),
        ("--early_stopping_patience 2", "--early_stopping_patience compares evaluations during training"),
        (
            "--save_strategy best --validation_file v --eval_strategy epoch --metric_for_best_model f1",
            "--metric_for_best_model f1 is none of the metrics of --task causal-lm .loss, perplexity.; give one",
        ),
        (
            "--early_stopping_patience 2 --validation_file v --eval_steps 4 --metric_for_best_model eval_perplexity",
            "--metric_for_best_model perplexity is better where it is less, and as in transformers the greatest value "
            "of all but losses would be taken as the best; give --greater_is_better false",
        ),
        (
            "--load_best_model_at_end --validation_file v --eval_strategy epoch --save_strategy steps",
            "--save_strategy is steps where --eval_strategy is epoch; give both the same, or --save_strategy best",
        ),
        ("--report_to wandb", "--report_to wandb: the package wandb is not installed; pip install wandb, or give none"),
        ("--report_to none tensorboard", "--report_to none contradicts tensorboard; leave one out"),
        ("--gradient_checkpointing --no_recompute", "recomputes activations, and --no_recompute keeps them"),
        ("--do_train perhaps", "--do_train.*: 'perhaps' is neither true nor false"),
        ("--eval_strategy often", "--evaluation_strategy.*: invalid choice: 'often'"),
        ("--eval_steps 2.5", "--eval_steps.*: '2.5' is no whole number of batches"),
        ("--save_steps -1", "'-1' is no whole number of batches"),
        ("--eval_strategy epoch", "--eval_strategy epoch has nothing to evaluate; give --validation_file"),
        ("--eval_steps 5", "--eval_steps has nothing to evaluate; give --validation_file"),
        ("--eval_each_epoch --eval_strategy steps", "--eval_each_epoch contradicts --eval_strategy steps"),
        ("--task poetry", "invalid choice: 'poetry'"),
        ("--no_such_flag", "unrecognized arguments: --no_such_flag"),
        ("--packing", "--packing puts several samples into a row .* and --task is causal-lm; give --no_group_texts"),
        ("--task text-to-text --packing", "and --task is text-to-text; leave it out"),
        (
            "--train_on_prompt",
            "--train_on_prompt is for --task chat, image-text-to-text, and --task is causal-lm; leave it out",
        ),
        ("--chat_template t.jinja", "--chat_template is for --task chat"),
    ],
)
def test_sentences(argv, sentence):
    with pytest.raises(ValueError, match=sentence):
        parse_args([*LEAST, *argv.split()])


def test_what_is_missing():
    with pytest.raises(ValueError, match="nothing to train on"):
        parse_args([*LEAST[:4], "--do_train", "--output_dir", "o"])
    with pytest.raises(ValueError, match="nothing to train on"):
        parse_args([*LEAST[:4], "--dry_run"])
    with pytest.raises(ValueError, match="nowhere to write"):
        parse_args(LEAST[:6])


@pytest.mark.parametrize(
    ("argv", "evaluates", "saves", "notes"),
    [
        ("", 0, 0, 0),
        ("--eval_steps 3 --save_steps 7", 3, 7, 0),
        ("--eval_strategy steps --save_strategy steps --logging_steps 4", 4, 500, 0),
        ("--eval-strategy steps --eval_steps 0 --save_strategy steps --save_steps 0", 10, 0, 0),
        ("--evaluation_strategy steps --eval_steps 0.1 --save_steps 0.5", 5, 21, 0),
        ("--eval_strategy epoch --save_strategy epoch", 14, 14, 0),
        ("--eval_strategy epoch --eval_steps 5 --save_strategy no --save_steps 5", 14, 0, 2),
        ("--eval_each_epoch --eval_strategy epoch", 14, 0, 0),
        ("--eval_each_epoch --save_steps 2", 14, 2, 0),
    ],
)
def test_strategies(argv, evaluates, saves, notes):
    """What happens in 41 batches, 14 of them an epoch."""
    args = parse_args([*LEAST, "--validation_file", "v.jsonl", *argv.split()])
    assert len(args.notes) == notes
    args = settled_intervals(args, num_steps=41, steps_per_epoch=14)
    assert (args.eval_steps, args.save_steps) == (evaluates, saves)
    assert isinstance(args.eval_steps, int) and isinstance(args.save_steps, int)


def test_a_checkpoint_that_is_loaded_was_evaluated():
    argv = "--load_best_model_at_end --validation_file v --eval_steps 4 --save_steps"
    for number, fits in ((8, True), (6, False), (0.5, False)):
        args = parse_args([*LEAST, *argv.split(), str(number)])
        if fits:
            assert settled_intervals(args, num_steps=41, steps_per_epoch=14).save_steps == 8
            continue
        with pytest.raises(ValueError, match=r"--save_steps (6|21) is no multiple of --eval_steps 4; give one"):
            settled_intervals(args, num_steps=41, steps_per_epoch=14)


def test_recomputation_is_the_default():
    for argv, keeps in (
        ("", False), ("--gradient_checkpointing", False), ("--gradient_checkpointing false", True),
        ("--no_recompute", True), ("--no_recompute false", False),
    ):  # fmt: skip
        assert parse_args([*LEAST, "--pipeline_schedule", "flush", *argv.split()]).no_recompute == keeps


@pytest.mark.parametrize("schedule", ["ftpipe", "l2l"])
def test_the_default_of_transformers_is_no_mistake(schedule):
    """Files of flags spell it out; a schedule that recomputes says so."""
    args = parse_args([*LEAST, "--pipeline_schedule", schedule, "--gradient_checkpointing", "false"])
    assert not args.no_recompute
    assert f"--gradient_checkpointing false has no effect: {schedule} recomputes" in args.notes


def test_a_strategy_asks_for_evaluations():
    argv = [*LEAST, "--do_train", "--validation_file", "v.jsonl"]
    assert not parse_args(argv).do_eval
    assert parse_args([*argv, "--eval_strategy", "steps"]).do_eval
    assert not parse_args([*argv, "--eval_strategy", "no"]).do_eval


def test_precision():
    """--bf16 is bfloat16 weights; without it, what a parameter takes is all of one precision."""
    for argv, dtype, num_bytes in (
        ([], "float32", 16),
        (["--dtype", "bfloat16"], "bfloat16", 8),
        (["--bf16"], "bfloat16", 20),
        (["--bf16", "--dtype", "bfloat16", "--optim", "sgd"], "bfloat16", 16),
    ):
        args = parse_args([*LEAST, *argv])
        assert args.dtype == dtype and weight_bytes(args) == num_bytes
