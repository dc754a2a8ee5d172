"""The part `one_stage` as far as a CPU goes."""

import pytest

from tests import workers

REHEARSE = "tests.benchmarks.gpu_hour.part_cases:rehearse"


@pytest.fixture(scope="module")
def found() -> dict:
    [found] = workers.run(1, REHEARSE, part="one_stage")
    return found


@pytest.mark.parametrize("size", ["small", "large"])
def test_losses_are_those_of_loops(found, size):
    """flush has all bits of a plain loop and of megatron.core, 2bw those of a loop that is one version late, and the
    two loops are not the same."""
    figures = found["figures"]
    for pair in ("flush_and_loop", "megatron_core_and_loop", "2bw_and_loop_one_late"):
        assert figures[f"{size}_largest_difference_of_{pair}"] == 0.0
    late, prompt = figures[f"{size}_losses_of_loop_one_late"], figures[f"{size}_losses_of_loop"]
    assert len(late) == len(prompt) == 4
    assert late[:2] == prompt[:2] or late[0] == prompt[0]
    assert late[-1] != prompt[-1]


@pytest.mark.parametrize("size", ["small", "large"])
def test_every_contender_has_a_time_in_each_round(found, size):
    """Ratios are of the same rounds, and tokens/s go with the seconds."""
    figures = found["figures"]
    for name in ("flush", "2bw", "loop", "megatron_core"):
        seconds = figures[f"{size}_{name}_seconds_per_batch"]
        assert len(seconds) == 2 and min(seconds) > 0
        assert figures[f"{size}_{name}_tokens_per_second"] == pytest.approx([2 * 2 * 16 / each for each in seconds])
    ratio = figures[f"{size}_ratio_of_flush_over_loop"]
    pairs = zip(figures[f"{size}_flush_seconds_per_batch"], figures[f"{size}_loop_seconds_per_batch"], strict=True)
    assert ratio == pytest.approx([a / b for a, b in pairs])
    assert found["rehearsal"] and figures["product_flop_per_second"]


@pytest.mark.full
def test_without_memory_in_the_middle_of_a_batch_the_others_go_on():
    """That is said, the engines and their threads are gone, so that their memory is free, and the next size has its
    figures."""
    [(found, num_engines, threads)] = workers.run(1, "tests.benchmarks.gpu_hour.part_cases:stage_without_memory")
    assert (num_engines, threads) == (0, [])
    assert any(line.startswith("small layers: out of memory") for line in found["lines"])
    assert "small_losses_of_flush" in found["figures"] and "small_flush_seconds_per_batch" not in found["figures"]
    assert "large_flush_seconds_per_batch" in found["figures"]


def test_operations_are_counted_as_in_training():
    [counted] = workers.run(1, "tests.benchmarks.gpu_hour.test_one_stage:_operations")
    assert counted[0] == pytest.approx(counted[1], rel=1e-12)


def _operations() -> tuple[float, float]:
    from benchmarks.gpu_hour.one_device import SIZES, flops_per_token
    from megatron.trainer.report.metrics import flops_per_sample
    from tests.trainer.arguments.command_line import configuration

    model = {**SIZES["large"], "vocab_size": 8192}
    args = configuration(
        f"--num-layers {model['layers']} --hidden-size {model['hidden_size']} --num-attention-heads {model['heads']} "
        f"--seq-length {model['seq_length']} --max-position-embeddings {model['seq_length']} --micro-batch-size 1 "
        "--train-iters 1 --lr 1e-3 --mock-data --tokenizer-type NullTokenizer --vocab-size 8191".split(),
        padded_vocab_size=8192,
    )
    return flops_per_token(model) * model["seq_length"], flops_per_sample(args)
