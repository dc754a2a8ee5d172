"""A job's arguments for a configuration are those that its command line says."""

from dataclasses import replace

import pytest
from hypothesis import given, settings

from megatron.planner import Configuration
from megatron.trainer.arguments import Platform, parse_args
from megatron.trainer.plan.command import SEARCHED, Job, missing_flags, model_argv
from tests.commands.trial.strategies import configurations

CPU = Platform(is_cuda=False, has_transformer_engine=False, has_apex=False)
WORDS = (
    "--num-layers 8 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --lr 1e-3 --train-iters 4 --data-path d "
    "--tokenizer-type BertWordPieceLowerCase --vocab-file v --recompute-granularity full --micro-batch-size 7 "
    "--bf16 --untie-embeddings-and-output-weights"
)
HOSTED = {"schedule": "l2l", "pipeline": 2, "data": 2, "virtual": 2, "stash": "host", "gathers_fetch": True}
JOBS = {each: Job.read(WORDS.split(), architecture=each, platform=CPU) for each in SEARCHED}


def check(architecture: str, configuration: Configuration) -> None:
    job = JOBS[architecture]
    more = ("--rank-topology", "topology.yaml") if configuration.rank_mapping == "optimized" else ()
    command = [*job.argv, *configuration.argv(), *more]
    parsed = parse_args(command, prog=job.program, defaults=SEARCHED[architecture][1])
    assert vars(job.namespace(configuration)) == vars(parsed)


@settings(max_examples=50, deadline=None)
@given(configurations())
def test_values_that_are_set_are_those_that_are_parsed(configuration):
    """Value by value, and which were given: so what a search has asked the rules about is what it writes."""
    for architecture in SEARCHED:
        check(architecture, configuration)


@pytest.mark.parametrize("changes", [{}, {"host_update": "eager", "resident_stages": 3, "stash": "device"}])
def test_weights_on_the_host(changes):
    """Likewise."""
    check("gpt", Configuration(micro_batch_size=1, global_batch_size=8, **{**HOSTED, **changes}))


def test_no_namespace_changes_another():
    """What the rules fill in stays in the namespace that they were asked about."""
    job, configuration = JOBS["gpt"], Configuration(micro_batch_size=1, global_batch_size=8, pipeline=2)
    before = vars(job.namespace(configuration)).copy()
    args = job.arguments(configuration)
    assert args.world_size == 2 and args.batch_sizes.global_batch_size == 8
    assert vars(job.namespace(configuration)) == before


ENGINE = Platform(is_cuda=True, has_transformer_engine=True, has_apex=True, has_deep_ep=True)


def test_halves_are_trained_by_the_same_layers():
    """Transformer Engine trains split backwards, too: in the program's namespace and in what the planner takes for it.
    Where the installed one cannot, megatron.core's own layers do, which keep scores; who asks for it is refused."""
    words = WORDS.replace("BertWordPieceLowerCase --vocab-file v", "NullTokenizer --vocab-size 100").split()
    whole, split = (
        Configuration(pipeline=2, micro_batch_size=1, global_batch_size=8, schedule=name) for name in ("flush", "zb-h1")
    )
    job = Job.read(words, architecture="gpt", platform=ENGINE)
    assert job.arguments(whole).transformer_impl == job.arguments(split).transformer_impl == "transformer_engine"
    assert job.software.of(split) is job.software and job.software.flash_attention
    old = replace(ENGINE, engine_puts_off=False)
    job = Job.read(words, architecture="gpt", platform=old)
    assert job.arguments(whole).transformer_impl == "transformer_engine"
    assert job.arguments(split).transformer_impl == "local" and job.refusal(split) is None
    assert job.software.of(whole) is job.software and job.software.flash_attention
    other = job.software.of(split)
    assert not other.flash_attention and other.activation_setting(split).saves_scores
    local = Job.read([*words, "--transformer-impl", "local"], architecture="gpt", platform=old)
    assert local.software.of(split) is local.software
    asked = Job.read([*words, "--transformer-impl", "transformer_engine"], architecture="gpt", platform=old)
    assert "can put weight gradients off from 2.3.0 on" in asked.refusal(split)


SCRIPT = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 --bf16 "
    "--no-bias-gelu-fusion --split 8,1,1 --data-path 0.3 a 0.7 b --lr 1e-3 --lr-warmup-samples 10 --train-samples 100 "
    "--tensor-model-parallel-size 4 --sequence-parallel --pipeline-schedule 2bw --micro-batch-size 2 "
    "--global-batch-size 64 --rampup-batch-size 8 8 100 --recompute-granularity selective --save here --load here "
    "--save-interval 10 --tensorboard-dir board --metrics-file m.jsonl --use-distributed-optimizer --eval-iters 3"
)
KEPT = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 --bf16 "
    "--no-bias-gelu-fusion --split 8,1,1 --data-path 0.3 a 0.7 b --lr 1e-3"
)


def test_degrees_batches_lengths_and_outputs_are_left_out():
    """What is left parses to the same as what was kept alone: nothing is changed on the way."""
    found = parse_args(list(model_argv(SCRIPT.split(), architecture="gpt")))
    expected = parse_args(KEPT.split())
    assert vars(found) == vars(expected)


def test_the_order_of_a_script_does_not_matter():
    """A profile and a run of the same model have the same words."""
    argv = SCRIPT.split(" --")
    turned = ("--" + " --".join([*argv[1:], argv[0].removeprefix("--")])).split()
    assert model_argv(turned, architecture="gpt") == model_argv(SCRIPT.split(), architecture="gpt")


SHAPE = ["--num-layers", "2", "--hidden-size", "8", "--num-attention-heads", "2", "--seq-length", "8"]
WHOLE = [*SHAPE, "--max-position-embeddings", "8", "--lr", "1e-3", "--mock-data", "--tokenizer-type", "NullTokenizer",
         "--vocab-size", "10"]  # fmt: skip


def told(argv, architecture="gpt"):
    return missing_flags(argv, architecture=architecture, iterations=10)


def test_nothing_is_missing():
    assert told(WHOLE) == []


def test_all_that_is_missing_is_told_at_once():
    assert told(SHAPE) == [
        "--max-position-embeddings is needed",
        "--lr is needed",
        "no data: give --data-path, --train-data-path, --data-args-path or --mock-data",
        "--tokenizer-type is needed (or --vocab-file and --merge-file for GPT-2's)",
    ]


@pytest.mark.parametrize("flag", ["--num-layers", "--lr", "--mock-data", "--max-position-embeddings", "--vocab-size"])
def test_each_flag_is_missed(flag):
    at = WHOLE.index(flag)
    width = 1 if flag == "--mock-data" else 2
    (sentence,) = told([*WHOLE[:at], *WHOLE[at + width :]])
    assert flag in sentence


def test_files_of_a_tokenizer_are_told_together():
    without = [word for word in WHOLE if word not in ("--vocab-size", "10", "NullTokenizer", "--tokenizer-type")]
    assert told([*without, "--tokenizer-type", "GPT2BPETokenizer"]) == [
        "--tokenizer-type GPT2BPETokenizer needs --vocab-file and --merge-file"
    ]
    assert told(without, "bert") == ["--tokenizer-type BertWordPieceLowerCase needs --vocab-file"]
