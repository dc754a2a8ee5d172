"""The command line: what parses, what follows from what, and what is refused with which sentence."""

import argparse
import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from megatron import backend

backend.install()

from megatron.core.datasets.blended_megatron_dataset_config import parse_and_normalize_split
from megatron.pipeline.start_up.core_version import TRAINED
from megatron.trainer.arguments import build_parser, parse_args, platform, reference, validate_args
from megatron.trainer.arguments.flags.model import OF_LATENTS, OF_YARN
from megatron.trainer.arguments.flags.parser import GROUPS
from megatron.trainer.arguments.flags.specification import integer, number
from megatron.trainer.checkpoint.arguments import with_saved_arguments
from megatron.trainer.run import pretraining
from tests.pipeline.runtime import made_up_orders
from tests.trainer.arguments.command_line import CPU, GPU, arguments, argv

ROOT = Path(__file__).parents[3]
FREEZING = "--untie-embeddings-and-output-weights --freeze-training --freeze-interval 2"


def test_defaults_are_megatrons():
    """What the user leaves out has Megatron-LM's value."""
    args = arguments()
    expected = {
        "attention_dropout": 0.1, "hidden_dropout": 0.1, "weight_decay": 0.01, "clip_grad": 1.0, "adam_beta1": 0.9,
        "adam_beta2": 0.999, "adam_eps": 1e-8, "lr_decay_style": "linear", "min_lr": 0.0, "init_method_std": 0.02,
        "seed": 1234, "eval_iters": 100, "eval_interval": 1000, "log_interval": 100, "norm_epsilon": 1e-5,
        "initial_loss_scale": 2.0**32, "loss_scale_window": 1000.0, "hysteresis": 2, "rotary_base": 10000,
        "make_vocab_size_divisible_by": 128, "num_workers": 2, "optimizer": "adam", "sgd_momentum": 0.9,
        "distributed_timeout_minutes": 10, "position_embedding_type": "learned_absolute", "ckpt_format": "torch_dist",
        "pipeline_schedule": "flush", "normalization": "LayerNorm", "add_bias_linear": True,
    }  # fmt: skip
    assert {name: getattr(args, name) for name in expected} == expected


def test_flags_may_stand_in_a_file(tmp_path):
    """@FILE is its words; an error in it is one sentence, as any other."""
    (tmp_path / "flags").write_text("--num-layers 6 --hidden-size 48 # a comment\n--num-attention-heads 4\n")
    args = parse_args([f"@{tmp_path / 'flags'}", "--num-layers", "8"])
    assert (args.num_layers, args.hidden_size, args.num_attention_heads) == (8, 48, 4)
    (tmp_path / "flags").write_text("--save 'a\n")
    with pytest.raises(ValueError, match=r"a quote that does not end in '--save 'a'; end it in its line"):
        parse_args([f"@{tmp_path / 'flags'}"])


def test_values_that_follow():
    """Sizes that the user leaves out follow from the others as in Megatron-LM."""
    args = arguments("--swiglu --hidden-size 96 --num-attention-heads 6 --num-layers 4")
    assert args.ffn_hidden_size == 256 and args.kv_channels == 16
    assert arguments().ffn_hidden_size == 256
    assert arguments("--bf16").accumulate_allreduce_grads_in_fp32
    assert not arguments("--bf16 --grad-reduce-in-bf16").accumulate_allreduce_grads_in_fp32
    assert not arguments("--fp16").check_for_nan_in_loss_and_grad
    assert arguments("--fp16 --loss-scale 64").check_for_nan_in_loss_and_grad
    assert arguments(without="--global-batch-size", world_size=4).global_batch_size == 4
    assert arguments("--train-samples 83", without="--train-iters").train_iters == 10


@pytest.mark.parametrize(
    "extra, without, message",
    [
        ("--foo 1", "", "--foo is not a known flag; see --help"),
        ("--num-layer 2", "", "did you mean --num-layers?"),
        ("--num-layers two", "", "--num-layers: 'two' is not a whole number"),
        ("stray", "", "'stray' belongs to no flag"),
        ("", "--hidden-size", "--hidden-size is needed"),
        ("", "--lr", "--lr is needed"),
        ("", "--train-iters", "--train-iters or --train-samples is needed"),
        ("--train-samples 100", "", "exclude each other"),
        ("--micro-batch-size 0", "", "--micro-batch-size 0 must be greater than 0"),
        ("--micro-batch-size 3", "", "--global-batch-size (8) is not divisible by"),
        ("--hidden-size 66", "", "--hidden-size 66 is not divisible by --num-attention-heads 4"),
        ("--seq-length 64", "", "--seq-length 64 is beyond --max-position-embeddings 32"),
        ("--pipeline-model-parallel-size 3", "", "start a multiple of 3 processes"),
        ("--group-query-attention --num-query-groups 3", "", "is not divisible by --num-query-groups 3"),
        (
            "--num-attention-heads 16 --group-query-attention --num-query-groups 1 --kv-channels 3 "
            "--tensor-model-parallel-size 4",
            "",
            "does not divide the 6 rows of keys and values",
        ),
        (
            "--hidden-size 96 --num-attention-heads 12 --group-query-attention --num-query-groups 4 "
            "--tensor-model-parallel-size 6",
            "",
            "neither of --num-query-groups 4 and --tensor-model-parallel-size 6",
        ),
        ("--fp16 --bf16", "", "--fp16 and --bf16 exclude each other"),
        ("--loss-scale 8", "", "--loss-scale needs --fp16"),
        ("--recompute-granularity full", "", "needs --recompute-method and --recompute-num-layers"),
        ("--recompute-granularity selective --recompute-modules mlp", "", "never returns"),
        ("--pipeline-schedule pipedream --global-batch-size 1", "", "add --clip-grad 0"),
        ("--pipeline-schedule pipedream --clip-grad 0 --fp16", "", "use --bf16"),
        ("--pipeline-schedule interleaved", "", "needs several stages on each rank; add --num-virtual-stages-per-"),
        ("--num-virtual-stages-per-pipeline-rank 2", "", "buys nothing with --pipeline-model-parallel-size 1; raise"),
        ("--microbatch-group-size-per-virtual-pipeline-stage 2", "", "has no effect where a rank has one stage; leave"),
        ("--2bw-single-gradient-buffer", "", "needs --pipeline-schedule 2bw"),
        ("--overlap-param-gather", "", "needs --use-distributed-optimizer"),
        ("--min-lr 1", "", "--min-lr 1.0 is greater than --lr 0.001"),
        ("--lr-warmup-iters 10", "", "a warm-up of 10 iters is not shorter"),
        ("--lr-decay-samples 10", "", "--lr-decay-samples does not fit --train-iters"),
        ("--lr-warmup-fraction 0.1 --lr-warmup-iters 2", "", "exclude each other"),
        ("--lr-decay-style WSD", "", "needs --lr-wsd-decay-iters"),
        ("--rampup-batch-size 2 4 100", "", "does not reach --global-batch-size 8 in whole steps"),
        ("--data-path a --data-cache-path b", "", "--data-path and --mock-data exclude each other"),
        ("", "--mock-data", "no data: give --data-path"),
        ("--train-data-path a --split 1,1,1", "--mock-data", "--split belongs to --data-path"),
        ("--tokenizer-type HuggingFaceTokenizer", "", "needs --tokenizer-model"),
        ("", "--tokenizer-type", "--tokenizer-type is needed"),
        ("--finetune", "", "--finetune needs --load"),
        (
            "--ckpt-step 3 --pretrained-checkpoint here",
            "",
            "--ckpt-step needs --load; of --pretrained-checkpoint the newest",
        ),
        (
            "--use-checkpoint-args --pretrained-checkpoint here",
            "",
            "--use-checkpoint-args needs --load; of --pretrained",
        ),
        ("--save=", "", "--save is empty; name a path or leave the flag out"),
        ("--load=", "", "--load is empty"),
        ("--pretrained-checkpoint=", "", "--pretrained-checkpoint is empty"),
        ("--pipeline-timeline=", "", "--pipeline-timeline is empty"),
        ("--metrics-file=", "", "--metrics-file is empty"),
        ("--tensorboard-dir=", "", "--tensorboard-dir is empty"),
        ("--data-cache-path=", "", "--data-cache-path is empty"),
        ("--ckpt-format zarr", "", "use torch_dist"),
        ("--use-mp-args-from-checkpoint-args", "", "needs --use-checkpoint-args"),
        ("--dist-ckpt-strictness loud", "", "--dist-ckpt-strictness: invalid choice: 'loud'"),
        ("--step-batch-size-schedule 0:4 1K:16", "", "--global-batch-size 8 is not the last size of --step-batch-size"),
        ("--step-batch-size-schedule 0:4 1K:8 --rampup-batch-size 2 2 9", "", "--rampup-batch-size exclude each other"),
        ("--step-batch-size-schedule 0:4 1X:8", "", "1X:8 is not TOKENS:SIZE"),
        ("--step-batch-size-schedule 0:4 1K:0", "", "1K:0 is not TOKENS:SIZE"),
        ("--step-batch-size-schedule 1K:4 2K:8", "", "the steps must begin at 0 tokens"),
        ("--step-batch-size-schedule 0:4 2K:6 2K:8", "", "lie at least a sequence"),
        (
            "--checkpoint-activations --recompute-granularity full",
            "",
            "the old form of --recompute-granularity",
        ),
        (
            "--pipeline-schedule pipedream --clip-grad 0 --global-batch-size 1 --calculate-per-token-loss",
            "",
            "--calculate-per-token-loss has no divisor",
        ),
        (
            "--pipeline-schedule l2l --clip-grad 0 --l2l-update eager --calculate-per-token-loss",
            "",
            "--calculate-per-token-loss depends on them all",
        ),
        ("--data-impl lazy", "", "--data-impl lazy: only data that tools/preprocess_data.py writes"),
        ("--dataloader-type cyclic", "", "use single"),
        ("--wandb-project x", "", "--wandb-project needs"),
        ("--transformer-impl transformer_engine", "", "use --transformer-impl local"),
        ("--apply-layernorm-1p", "", "--apply-layernorm-1p needs CUDA"),
        ("--bf16 --fp32-residual-connection", "", "--fp32-residual-connection needs CUDA"),
        ("--distributed-backend nccl", "", "--distributed-backend nccl needs CUDA"),
        ("--profile", "", "add --use-pytorch-profiler"),
        ("--fp16 --loss-scale 0", "", "--loss-scale 0.0 must be greater than 0; leave it out for a dynamic scale"),
        ("--fp16 --min-loss-scale 100 --initial-loss-scale 10", "", "--min-loss-scale 100.0 is greater than"),
        ("--pipeline-schedule pipedream --clip-grad 0", "", "pipedream (stash) updates after every microbatch"),
        (f"{FREEZING} --freeze-rule gradients --freeze-schedule 1,2", "", "--freeze-schedule 1,2 has no effect with"),
        (f"{FREEZING} --freeze-alpha 0.5 --freeze-schedule 1,2", "", "--freeze-alpha has no effect"),
        (f"{FREEZING} --activation-cache-gib 2", "", "--activation-cache-gib 2.0 is about an activation cache"),
        (f"{FREEZING} --activation-cache-use always", "", "add --activation-cache with its folder"),
    ],
)
def test_errors_are_one_sentence(extra, without, message):
    """A wrong command line is one sentence with value and remedy, whichever rule finds it."""
    with pytest.raises(ValueError) as error:
        ranks = re.search(r"--tensor-model-parallel-size (\d+)", extra)
        arguments(extra, without=without, world_size=int(ranks[1]) if ranks else 1)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "flags, first",
    [
        ("--freeze-interval 10", 10),
        ("--freeze-interval 2 --freeze-start 99", 101),
        ("--freeze-interval 9", None),
        ("--freeze-interval 2 --freeze-start 7", None),
        ("--freeze-interval 100 --skip-train", None),
    ],
)
def test_a_run_that_ends_before_it_changes_is_noted(flags, first):
    """What the tenth iteration decides comes too late in a run of ten."""
    args = parse_args(argv(f"{FREEZING} {flags}"))
    notes = [each for each in validate_args(args, world_size=1) if "nothing ever changes" in each]
    assert len(notes) == (first is not None)
    assert all(f"the first decision comes at iteration {first}, and training ends at iteration 10" in x for x in notes)


def numeric(*kinds):
    """The flags of these types that take a number and neither refuse it nor list or ignore its values."""
    flags = [flag for group in GROUPS for flag in group.flags if flag.type in kinds]
    return [flag for flag in flags if not (flag.refused or flag.choices or flag.help.startswith("Accepted"))]


@pytest.mark.parametrize("name", [flag.name for flag in numeric(integer, number) if flag.nargs != 3])
def test_every_number_has_a_range(name):
    """No numeric flag takes -1, whether or not somebody thought of it."""
    with pytest.raises(ValueError, match=rf"{name} -1(\.0)? must be "):
        arguments(f"{name} -1", without=name)


@pytest.mark.parametrize("text", ["nan", "inf", "-inf", "1e999"])
def test_numbers_are_finite(text):
    """No flag takes a value that comparisons with a limit let through."""
    flags = numeric(number)
    assert len(flags) > 20
    for flag in flags:
        with pytest.raises(ValueError, match=f"{flag.name}: '{text}' is not a finite number"):
            parse_args(argv(f"{flag.name}={text}"))


@pytest.mark.parametrize(
    "name, values, allowed",
    [
        ("--rotary-base", "0", "greater than 0"),
        ("--rope-scaling-factor", "0", "greater than 0"),
        ("--rotary-seq-len-interpolation-factor", "0", "greater than 0"),
        ("--init-method-std", "0", "greater than 0"),
        ("--adam-eps", "0", "greater than 0"),
        ("--log-interval", "0", "greater than 0"),
        ("--lr-decay-iters", "0", "greater than 0"),
        ("--hysteresis", "0", "greater than 0"),
        ("--initial-loss-scale", "0", "greater than 0"),
        ("--min-loss-scale", "0", "greater than 0"),
        ("--loss-scale-window", "0 0.5 1000.5", "a whole number greater than 0"),
        ("--adam-beta1", "1 1.5", "at least 0 and less than 1"),
        ("--adam-beta2", "1", "at least 0 and less than 1"),
        ("--sgd-momentum", "1", "at least 0 and less than 1"),
        ("--hidden-dropout", "1", "at least 0 and less than 1"),
        ("--lr-warmup-fraction", "1", "at least 0 and less than 1"),
        ("--rotary-percent", "0 1.5", "greater than 0 and at most 1"),
        ("--seed", "4294967296", "at least 0 and at most 2**32 - 1"),
        ("--distributed-timeout-minutes", "0 525601", "greater than 0 and at most 525600, a year"),
    ],
)
def test_ends_of_ranges(name, values, allowed):
    """Values at or beyond the end of a range are refused, with the range."""
    for value in values.split():
        with pytest.raises(ValueError) as error:
            arguments(f"--fp16 {name} {value}")
        assert re.fullmatch(rf"{name} {value}(\.0)? must be {re.escape(allowed)}", str(error.value))


def test_extreme_values_are_let_through():
    """What lies just inside a range works."""
    args = arguments(
        "--fp16 --seed 4294967295 --adam-beta1 0 --sgd-momentum 0 --hidden-dropout 0 --lr-warmup-iters 0 "
        "--loss-scale-window 1 --hysteresis 1 --min-loss-scale 8 --initial-loss-scale 8 --weight-decay 0"
    )
    assert (args.seed, args.loss_scale_window, args.initial_loss_scale) == (2**32 - 1, 1.0, 8.0)
    arguments("--fp16 --loss-scale 8 --min-loss-scale 100 --initial-loss-scale 10")  # a static scale has no limits


@pytest.mark.parametrize("data", ["--mock-data", "--data-path a"])
@pytest.mark.parametrize("split", ["a,b,c", "0,0,0", "90,5,5,5", "-90,5,5", "1e2,5,5", "90,,10", "90 5 5", "nan", "."])
def test_split_that_is_none(split, data):
    """A split must be one to three shares that megatron.core reads as they are written."""
    with pytest.raises(ValueError, match=rf"--split {re.escape(split)} must be 1 to 3 shares .* for example 969,30,1"):
        validate_args(parse_args([*argv(data, "--mock-data"), f"--split={split}"]), world_size=1)


@pytest.mark.parametrize("split", ["969, 30, 1", "1", "0,1", "99.5,.5,0", "100,0,0", "'99,1,0'"])
def test_split_is_what_megatron_reads(split):
    """A split that passes comes out of megatron.core's parser as the same shares."""
    shares = [float(share) for share in split.strip("'").split(",")]
    args = parse_args([*argv(), "--split", split])
    validate_args(args, world_size=1)
    parsed = parse_and_normalize_split(args.split)
    assert parsed == pytest.approx([share / sum(shares) for share in shares] + [0.0] * (3 - len(shares)))


def test_checkpoint_arguments_that_override_flags_are_noted(monkeypatch):
    """--use-checkpoint-args says which flags of the command line it overrides, and no others."""

    def take_over(args, further):
        saved = argparse.Namespace(num_layers=2, hidden_size=64, add_bias_linear=True, swiglu=True, hidden_dropout=0.5)
        return with_saved_arguments(args, saved, "DIR", further=further)

    monkeypatch.setattr(pretraining, "with_checkpoint_arguments", take_over)
    args = parse_args(argv("--load DIR --use-checkpoint-args --disable-bias-linear --hidden-dropout 0.1"))
    args, notes = pretraining.complete(args)
    assert (args.num_layers, args.swiglu, args.hidden_dropout) == (2, True, 0.1)
    assert [note for note in notes if "checkpoint" in note] == [
        "--num-layers 4 has no effect: --use-checkpoint-args takes num_layers 2 from the checkpoint",
        "--disable-bias-linear has no effect: --use-checkpoint-args takes add_bias_linear True from the checkpoint",
    ]


def test_every_refused_flag_says_what_to_do():
    """Each flag in the table of refusals parses, is refused by its name, and its sentence ends with a remedy."""
    refused = [flag for group in GROUPS for flag in group.flags if flag.refused]
    assert len(refused) > 50
    for flag in refused:
        value = "" if flag.stores is not None else "7"
        with pytest.raises(ValueError) as error:
            parse_args(argv(f"{flag.name} {value}"))
        assert str(error.value).startswith(flag.name)
        assert ";" in flag.refused or "use " in flag.refused
    for flag in refused:
        for value in flag.neutral:
            parse_args(argv(f"{flag.name} {' '.join(value) if isinstance(value, list) else value}"))


@pytest.mark.parametrize(
    "flags",
    [
        "--expert-model-parallel-size 1", "--mtp-num-layers 0", "--main-grads-dtype fp32", "--main-params-dtype fp32",
        "--exp-avg-dtype fp32", "--exp-avg-sq-dtype fp32", "--optimizer-offload-fraction 0.0",
        "--cpu-offloading-num-layers 0",
    ],
)  # fmt: skip
def test_a_refused_flag_may_ask_for_nothing(flags):
    """A script that spells out what is done anyway runs."""
    assert not validate_args(parse_args(argv(flags)), world_size=1)


def test_the_home_of_the_user_is_known(monkeypatch):
    """A shell leaves `~` alone in `--save=~/run`: it is the home of the user, wherever a path is taken."""
    monkeypatch.setenv("HOME", "/home/me")
    args = parse_args(argv("--save=~/run --load ~/old --vocab-file=~/v --data-path 1 ~/a 2 /b~/c --wandb-save-dir=~/w"))
    assert (args.save, args.load, args.vocab_file) == ("/home/me/run", "/home/me/old", "/home/me/v")
    assert args.data_path == ["1", "/home/me/a", "2", "/b~/c"] and args.wandb_save_dir == "/home/me/w"


TRANSLATED = {  # a rule turns the flag into another value, or refuses what cannot be
    "use_rotary_position_embeddings", "add_position_embedding", "use_flash_attn", "pipeline_extra_warmup",
    "rampup_batch_size", "step_batch_size_schedule", "decrease_batch_size_if_needed",
    "checkpoint_activations", "grad_reduce_in_bf16", "recompute_activations",
    "balance_activations", "pipeline_offload_activations",
    "dataloader_type", "create_attention_mask_in_dataloader", "ckpt_format",
    "l2l_update", "l2l_resident_stages", "l2l_stash", "freeze_alpha", "freeze_schedule", "epochs",
    "num_layers_per_virtual_pipeline_stage",
    "microbatch_group_size_per_virtual_pipeline_stage", "make_vocab_size_divisible_by",
    "num_layer_list", "pipeline_model_parallel_layout", "patch_tokenizer_type", "moe_enable_deepep",
}  # fmt: skip


@pytest.mark.full
def test_every_flag_is_read():
    """A flag that is neither refused nor said to be accepted without effect is read where the run is built."""
    folder = ROOT / "megatron"
    arguments_folder = folder / "trainer" / "arguments"
    # They write or read the flags of other runs.
    hands_on = {"trainer/plan/command.py", "trainer/checkpoint/arguments.py", "planner/published/settings.py"}
    hands_on |= {"planner/search/outcome.py", "commands/grid_search/sweep.py"}
    assert all((folder / name).is_file() for name in hands_on)
    sources = [path for path in folder.rglob("*.py") if arguments_folder not in path.parents]
    sources = [path for path in sources if str(path.relative_to(folder)) not in hands_on]
    sources = [path for path in sources if not {"dropin", "finetuning"} & set(path.parts)]  # with flags of their own
    text = "\n".join(path.read_text() for path in sources)
    text, compared = re.subn(r"\n_ASKED = \(.*?\n\)", "", text, flags=re.DOTALL)  # to compare flags is not to read them
    assert compared == 1
    if "*OF_LATENTS" in text and "for name in OF_YARN" in text:  # the names that core_config.py reads
        text += json.dumps((OF_LATENTS, OF_YARN))
    flags = [flag for group in GROUPS for flag in group.flags if not flag.refused and "Accepted" not in flag.help]
    unread = {flag.dest for flag in flags if not re.search(rf'args\.{flag.dest}\b|"{flag.dest}"', text)}
    assert unread == TRANSLATED
    files = [*(arguments_folder / "rules").glob("*.py"), arguments_folder / "flags" / "config.py"]
    rules = "\n".join(path.read_text() for path in files)
    assert all(f"args.{name}" in rules for name in TRANSLATED)


def test_platform_turns_off_defaults_and_refuses_what_cannot_be():
    """Fusions that CUDA packages provide are on there and off here; the implementation follows what is installed."""
    here, there = arguments(platform=CPU), arguments("--position-embedding-type rope", platform=GPU)
    assert (here.transformer_impl, there.transformer_impl) == ("local", "transformer_engine")
    assert not here.gradient_accumulation_fusion and there.gradient_accumulation_fusion
    assert not here.masked_softmax_fusion and there.apply_rope_fusion
    assert here.use_cpu_initialization and not there.use_cpu_initialization
    assert arguments("--transformer-impl local", platform=GPU).transformer_impl == "local"
    assert arguments("--optimizer-kernel fused", platform=CPU).optimizer_kernel == "fused"
    with pytest.raises(ValueError, match=r"--optimizer-kernel fused is for steps on a CPU.*leave the flag out"):
        arguments("--optimizer-kernel fused", platform=GPU)


@pytest.mark.parametrize(
    "flags, fuses",
    [
        ("--pipeline-schedule 2bw", False),
        ("--pipeline-schedule 2bw --2bw-single-gradient-buffer", True),
        ("--pipeline-schedule 2bw --transformer-impl local", True),
        ("", True),
        (
            "--pipeline-schedule pipedream --clip-grad 0 --untie-embeddings-and-output-weights --global-batch-size 1",
            True,
        ),
    ],
)
def test_an_engine_that_keeps_its_gradient_buffer_is_not_fused_with_two(flags, fuses):
    """Fusion is off, with a note, only where such a Transformer Engine meets the two gradient buffers of 2bw."""
    flags = f"{flags} --pipeline-model-parallel-size 2"
    args = parse_args(argv(flags))
    validate_args(args, world_size=2)
    notes = platform.resolve_platform(args, replace(GPU, engine_keeps_main_grad=True))
    assert args.gradient_accumulation_fusion is fuses
    said = [note for note in notes if "Transformer Engine 2.6.0 or later" in note]
    assert len(said) == (not fuses)
    assert arguments(flags, world_size=2, platform=GPU).gradient_accumulation_fusion


def test_help_is_complete():
    """`--help` shows every flag under its group."""
    text = build_parser().format_help()
    for group in GROUPS:
        assert group.title in text
        for flag in group.flags:
            assert all(name in text for name in flag.names)


def test_no_flag_twice():
    """No two records share a name or a destination, so that none overwrites another."""
    flags = [flag for group in GROUPS for flag in group.flags]
    names = [name for flag in flags for name in flag.names]
    assert len(set(names)) == len(names)
    destinations = [flag.dest for flag in flags]
    assert len(set(destinations)) == len(destinations)


@pytest.mark.parametrize("name", reference.PAGES)
def test_pages_of_flags_are_current(name):
    """The pages of flags in docs are what the parser's records render to."""
    page = (ROOT / "docs" / name).read_text()
    assert page == reference.PAGES[name](), "run: python -m megatron.trainer.arguments.reference docs"


def test_parsing_needs_no_torch():
    """A wrong command line is refused in well under a second: parsing imports neither torch nor megatron.core."""
    code = (
        "import sys; import megatron.trainer.arguments; "
        "assert not {'torch', 'megatron.core', 'numpy', 'rich'} & set(sys.modules), sorted(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=30)


def test_a_single_gradient_buffer_needs_batches_in_order():
    """An order that comes back to a batch has no use for one gradient buffer: refused with the flag's name."""
    with made_up_orders.registered(), pytest.raises(ValueError, match="leave out --2bw-single-gradient-buffer"):
        arguments("--pipeline-schedule 2bw-entangled --global-batch-size 3 --2bw-single-gradient-buffer")


def test_refused_flags_are_named_at_once():
    """A script with several flags that cannot be used learns of all of them in one run, each with its remedy."""
    with pytest.raises(ValueError) as caught:
        arguments("--moe-use-upcycling --spec other --fp4-format e2m1")
    first, *others = str(caught.value).splitlines()
    assert first == "3 flags cannot be used here"
    assert sorted(line.split(":")[0].strip() for line in others) == [
        "--fp4-format e2m1", "--moe-use-upcycling", "--spec other",
    ]  # fmt: skip


def test_losses_of_further_tokens_that_a_core_weighs_by_rank_are_refused():
    """With shared sequences and a loss per token, from megatron.core 0.17 on; each of the flags alone is taken."""
    flags = {
        "--mtp-num-layers 1 --position-embedding-type rope",
        "--context-parallel-size 2",
        "--calculate-per-token-loss",
    }
    newer = replace(CPU, core=TRAINED[0, 17])
    arguments(" ".join(flags), world_size=2)
    with pytest.raises(ValueError, match=r"this megatron\.core weighs the losses of a rank by its own tokens"):
        arguments(" ".join(flags), world_size=2, platform=newer)
    for left_out in flags:
        arguments(" ".join(flags - {left_out}), world_size=2, platform=newer)
