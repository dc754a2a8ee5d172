"""Flags that are not known, old or without effect: hints that do not mislead, and all of them in one message."""

import pytest

from megatron import backend

backend.install()

from megatron.trainer.arguments import parse_args, validate_args
from megatron.trainer.arguments.flags.config import padded_vocabulary
from megatron.trainer.arguments.flags.parser import GROUPS, meant
from megatron.trainer.data.tokenizer import build_tokenizer, padded_vocab_size
from tests.trainer.arguments.command_line import arguments, argv

KNOWN = [name for group in GROUPS for flag in group.flags for name in flag.names]
REFUSED = {name for group in GROUPS for flag in group.flags if flag.refused for name in flag.names}


@pytest.mark.parametrize(
    ("name", "flag"),
    [
        ("--num-layer", "--num-layers"),
        ("--num-lyers", "--num-layers"),
        ("--nun-lyaers", "--num-layers"),
        ("--micro_batch_size", "--micro-batch-size"),
        ("--Num-Layers", "--num-layers"),
        ("--ddp-impl", "--DDP-impl"),
        ("--pipeline-parallel-size", "--pipeline-model-parallel-size"),
        ("--min-scale", "--min-loss-scale"),
        ("--sed", "--seed"),
        ("--tensor-parallel-size", "--tensor-model-parallel-size"),
        ("--global-size", "--global-batch-size"),
    ],
)
def test_slips_get_a_hint(name, flag):
    """Letters, separators, capitals, a word left out."""
    assert meant(name, KNOWN, REFUSED) == flag


def test_a_flag_that_works_goes_before_one_that_is_refused():
    """Whoever leaves a word out means what can be used; of two flags that fit alike none is named."""
    with pytest.raises(ValueError, match=r"^--tensor-parallel-size is not .* mean --tensor-model-parallel-size"):
        parse_args(argv("--tensor-parallel-size 2"))
    assert meant("--one-thre", ["--one-thrae", "--one-three"], {"--one-thrae"}) == "--one-three"
    assert meant("--one-thre", ["--one-thrae", "--one-three"]) is None
    assert meant("--num-layer", ["--nun-layer", "--num-layers"]) == "--num-layers"


@pytest.mark.parametrize(
    "name",
    [  # each beside the flag whose letters are nearest
        "--delay-param-gather", "--encoder-tensor-model-parallel-size",
        "--no-delay-grad-reduce", "--position-embeddings", "--no-save",
        "--no-load", "--parallel-size", "--expert-parallel-size",
    ],
)  # fmt: skip
def test_other_flags_get_none(name):
    """What is nearest in letters is another flag, so none is named."""
    assert name not in KNOWN and meant(name, KNOWN, REFUSED) is None
    with pytest.raises(ValueError, match=f"^{name} is not a known flag; see --help for all flags$"):
        parse_args(argv(f"{name} 7"))


@pytest.mark.parametrize(
    ("flags", "remedy"),
    [
        ("--batch-size 8", "use --micro-batch-size"),
        ("--model-parallel-size 2", "it is called --tensor-model-parallel-size"),
        ("--warmup .01", "use --lr-warmup-fraction"),
        ("--data-impl cached", "prepare the text with it"),
        ("--checkpoint-num-layers 1", "--recompute-num-layers"),
        ("--dist-ckpt-format zarr", "torch_dist is the only format"),
    ],
)
def test_old_flags_name_the_new_ones(flags, remedy):
    """Flags of published scripts that are called otherwise today."""
    with pytest.raises(ValueError, match=f"{flags}: .*{remedy}"):
        parse_args(argv(flags))


def test_unknown_and_refused_flags_are_one_message():
    """Whoever brings a script reads at once all that has to go."""
    with pytest.raises(ValueError) as error:
        parse_args(argv("--foo 1 --moe-latent-size 8 --num-layer 2 --fp4-format e2m1 --foo 2"))
    first, *rest = str(error.value).splitlines()
    assert first == "4 flags cannot be used here"
    starts = ["--foo is not", "--num-layer is not", "--moe-latent-size 8: ", "--fp4-format e2m1: "]
    assert all(line.strip().startswith(start) for line, start in zip(rest, starts, strict=True))


def test_values_that_are_none_hide_no_other_refusal():
    """A word where a number belongs, a choice that there is none of, a missing value: beside what else has to go."""
    with pytest.raises(ValueError) as error:
        parse_args(argv("--ckpt-format tar --seed one --foo 1 --moe-latent-size 8 --lr --init-method-std two --save"))
    first, *rest = str(error.value).splitlines()
    assert first == "7 flags cannot be used here"
    starts = ["--ckpt-format: invalid choice: 'tar'", "--seed: 'one' is not a whole", "--lr: expected one argument",
              "--init-method-std: 'two' is not", "--save: expected one", "--foo is not",
              "--moe-latent-size 8: "]  # fmt: skip
    assert all(line.strip().startswith(start) for line, start in zip(rest, starts, strict=True))


def test_flags_without_effect_are_said_once():
    """Logging, checks and speed of what is done otherwise: each is one note; a neutral value is none."""
    ignored = [flag for group in GROUPS for flag in group.flags if flag.ignored]
    assert {"--log-params-norm", "--log-num-zeros-in-grad", "--overlap-p2p-communication", "--DDP-impl"} <= {
        flag.name for flag in ignored
    }
    for flag in ignored:
        value = "" if flag.stores is not None else (flag.choices or ("7",))[0]
        args = parse_args(argv(f"{flag.name} {value}"))
        assert validate_args(args, world_size=1) == [f"{f'{flag.name} {value}'.strip()} has no effect: {flag.ignored}"]
        for value in flag.neutral:
            assert validate_args(parse_args(argv(f"{flag.name} {value}")), world_size=1) == []
    assert not validate_args(parse_args(argv("--data-impl mmap --dist-ckpt-format torch_dist")), world_size=1)


def test_old_names_do_the_same():
    """Old names of flags that are done here."""
    args = arguments("--checkpoint-activations --layernorm-epsilon 1e-6 --override-lr-scheduler")
    assert (args.recompute_granularity, args.recompute_method, args.recompute_num_layers) == ("full", "uniform", 1)
    assert args.norm_epsilon == 1e-6 and args.override_opt_param_scheduler
    with pytest.raises(ValueError, match=r"^--norm-epsilon: 'nan' is not a finite number"):
        parse_args(argv("--layernorm-epsilon nan"))


def test_names_of_programs_over_megatron_lm():
    """MindSpeed-LLM's and Pai-Megatron-Patch's words for a tokenizer of transformers."""
    mindspeed = arguments(
        "--tokenizer-type PretrainedFromHF --tokenizer-name-or-path there", without="--tokenizer-type"
    )
    assert (mindspeed.tokenizer_type, mindspeed.tokenizer_model) == ("HuggingFaceTokenizer", "there")
    pai = arguments("--patch-tokenizer-type Qwen3Tokenizer --load here", without="--tokenizer-type")
    assert (pai.tokenizer_type, pai.tokenizer_model) == ("HuggingFaceTokenizer", "here")
    named = arguments("--patch-tokenizer-type Qwen3Tokenizer --load here")
    assert (named.tokenizer_type, named.tokenizer_model) == ("NullTokenizer", None)


def test_rows_of_the_embedding_that_a_flag_says():
    """--padded-vocab-size goes before the vocabulary's size; tensor ranks share the rows evenly."""
    args = arguments("--padded-vocab-size 102 --tensor-model-parallel-size 2", world_size=2)
    assert (padded_vocabulary(args, 100), padded_vocabulary(args, 5000)) == (102, 102)
    assert padded_vocabulary(arguments(), 100) == 128
    with pytest.raises(ValueError, match="--padded-vocab-size 101 is not divisible by --tensor-model-parallel-size 2"):
        arguments("--padded-vocab-size 101 --tensor-model-parallel-size 2", world_size=2)
    tokenizer = build_tokenizer(args)
    assert padded_vocab_size(args, tokenizer) == 102
    with pytest.raises(ValueError, match="--padded-vocab-size 98 is less than the 101 ids of the tokenizer"):
        padded_vocab_size(arguments("--padded-vocab-size 98"), tokenizer)
