"""The flags of a script, without what a configuration decides."""

from megatron.trainer.arguments import parse_args
from megatron.trainer.plan.model_argv import model_argv

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
