"""Which samples a rank computes on, and that all see the same ones."""

import itertools
import json
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.pipeline.program.copies import Copy, Share, share_of
from megatron.trainer.arguments import parse_args, validate_args
from megatron.trainer.data.datasets import num_samples
from megatron.trainer.data.microbatches import (
    MicrobatchIterator,
    MicrobatchSampler,
    gpt_fields,
    language_model_loss,
)
from megatron.trainer.files.indexed_files import blends, parse_blend
from tests import workers
from tests.trainer.arguments.command_line import arguments, argv
from tests.trainer.data.small_data import write_dataset


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 40), st.integers(1, 3), st.integers(1, 4))
def test_replicas_share_the_samples_in_order(consumed, size, replicas):
    """The replicas' microbatches together are the samples from `consumed` on, each once and in order."""
    total = consumed + 5 * size * replicas
    options = {
        "num_samples": total + replicas * size - 1, "consumed_samples": consumed, "micro_batch_size": size,
        "num_replicas": replicas,
    }  # fmt: skip
    samplers = [list(MicrobatchSampler(share=Share((rank,), replicas), **options)) for rank in range(replicas)]
    taken = [sample for step in zip(*samplers, strict=True) for part in step for sample in part]
    assert taken == list(range(consumed, total))


def test_copies_share_the_samples_of_all_replicas():
    """A copy reads its positions of each batch, of whichever replica; validation begins again where replicas do."""
    options = {"num_samples": 33, "micro_batch_size": 2, "num_replicas": 2}
    copies = copies_of(Copy(0, (0, 2, 3)), Copy(0, (1,)))
    first, second = (list(MicrobatchSampler(consumed_samples=8, share=share, **options)) for share in copies)
    assert first == [[8, 9], [12, 13], [14, 15], [16, 17], [20, 21], [22, 23], [24, 25], [28, 29], [30, 31]]
    assert second == [[10, 11], [18, 19], [26, 27]]
    sampler = MicrobatchSampler(consumed_samples=24, share=copies[1], repeats=True, **options)
    assert list(itertools.islice(sampler, 3)) == [[26, 27], [2, 3], [10, 11]]


def copies_of(*copies: Copy) -> list[Share]:
    return [share_of(copies, number) for number in range(len(copies))]


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 100), st.integers(1, 3), st.integers(1, 4), st.integers(0, 3))
def test_validation_begins_again(consumed, size, replicas, extra):
    """A sampler that repeats never ends, stays inside the dataset, and goes on wherever it starts."""
    stride = size * replicas
    options = {
        "num_samples": 4 * stride + min(extra, stride - 1), "micro_batch_size": size, "num_replicas": replicas,
        "share": Share((replicas - 1,), replicas), "repeats": True,
    }  # fmt: skip
    taken = list(itertools.islice(MicrobatchSampler(consumed_samples=consumed * stride, **options), 12))
    assert len(taken) == 12 and all(0 <= sample < options["num_samples"] for part in taken for sample in part)
    assert taken[:4] == taken[4:8] and len({sample for part in taken[:4] for sample in part}) == 4 * size
    later = MicrobatchSampler(consumed_samples=(consumed + 3) * stride, **options)
    assert list(itertools.islice(later, 9)) == taken[3:]


@settings(max_examples=100, deadline=None)
@given(st.data(), st.integers(1, 3), st.integers(1, 4), st.integers(1, 4), st.integers(0, 9), st.booleans())
def test_shares_are_the_samples_of_all_replicas_in_order(data, size, replicas, rounds, begun, repeats):
    """However the microbatches of a batch are shared out: each one is taken once, and is the one that a replica would
    take there, from the rest of a dataset on, and again from its beginning where it repeats."""
    batch, stride = rounds * replicas, size * replicas
    consumed = begun * rounds * stride
    options = {
        "num_samples": data.draw(st.integers(stride, 6 * stride + size)) + (0 if repeats else consumed),
        "consumed_samples": consumed, "micro_batch_size": size, "repeats": repeats,
    }  # fmt: skip
    owners = data.draw(st.lists(st.integers(0, replicas - 1), min_size=batch, max_size=batch))
    positions = {owner: tuple(at for at in range(batch) if owners[at] == owner) for owner in set(owners)}
    shares = {
        owner: iter(MicrobatchSampler(num_replicas=replicas, share=Share(taken, batch), **options))
        for owner, taken in positions.items()
    }
    end = options["num_samples"] // stride * stride
    for at in range(3 * batch):  # more than the dataset has, where it ends
        first = consumed + at * size
        first = first % end if repeats else first
        expected = list(range(first, first + size)) if first < end else None
        assert next(shares[owners[at % batch]], None) == expected
        if expected is None:
            assert not repeats and at % replicas == 0
            break


def opened(args, **options) -> MicrobatchIterator:
    """The training data's iterator."""
    from megatron.trainer.data.datasets import build_datasets
    from megatron.trainer.data.tokenizer import build_tokenizer

    options = {"consumed_samples": 0, **options}
    data = build_datasets(args, build_tokenizer(args)).parts[0]
    return MicrobatchIterator(args, data, fields=gpt_fields(args), name="training", vocab_size=101, **options)


def loading_processes_case(flags: str) -> tuple[bool, int]:
    """(the next microbatch comes although all loading processes got SIGTERM, those that outlive `close`)."""
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel()
    iterator = opened(arguments(flags, without="--mock-data"))
    processes = iterator.loader._workers
    for process in processes:
        os.kill(process.pid, signal.SIGTERM)
    came = [set(next(iterator)) for _ in range(12)]
    iterator.close()
    return len(processes) == 2 and all(came), sum(process.is_alive() for process in processes)


@pytest.mark.full
def test_sigterm_is_no_business_of_loading_processes(tmp_path):
    """A launcher signals whole process groups: data keep coming, and the processes end with their iterator."""
    flags = f"--data-path {write_dataset(tmp_path / 'text')} --num-workers 2"
    assert workers.run(1, "tests.trainer.data.test_microbatches:loading_processes_case", flags=flags) == [(True, 0)]


def cut_case(flags: str, prefix: str) -> list[str]:
    """What is said where the data are cut short under a run, in loading processes and without, and where sample indices
    are cut before the next one."""
    from megatron.core import parallel_state
    from megatron.trainer.data.masked import BertDataset

    said, binary = [], Path(f"{prefix}.bin")
    parallel_state.initialize_model_parallel()

    def note(attempt: Callable[[], object]) -> None:
        try:
            attempt()
        except ValueError as error:
            said.append(str(error))

    for num_workers in (0, 1):
        args, whole = arguments(f"{flags} --num-workers {num_workers}", without="--mock-data"), binary.read_bytes()
        iterator = opened(args)
        of_bert = BertDataset.build_low_level_dataset(prefix, None)
        next(iterator)
        os.truncate(binary, 10)
        note(lambda iterator=iterator: [next(iterator) for _ in range(9)])
        note(lambda of_bert=of_bert: of_bert[30])
        iterator.close()
        binary.write_bytes(whole)
    (indices,) = Path(prefix).rglob("*GPTDataset-train-shuffle_index.npy")
    os.truncate(indices, indices.stat().st_size - 8)
    note(lambda: opened(args))
    return said


def test_data_that_are_cut_short_under_a_run_are_named(tmp_path):
    """Not by zeros, what the memory held before, or a bus error: the .bin with both sizes, at the first read that it is
    too short for; and sample indices that megatron.core kept."""
    prefix = write_dataset(tmp_path / "text")
    ((*of_bin, of_cache),) = workers.run(
        1, "tests.trainer.data.test_microbatches:cut_case", flags=f"--data-path {prefix}", prefix=prefix
    )
    assert len(of_bin) == 4
    for sentence in of_bin:
        assert re.fullmatch(
            rf"data file {prefix}\.bin was cut short while the run read it: it has 10 bytes, and \d+ are wanted; run "
            r"tools/preprocess_data\.py again, and go on from the last checkpoint",
            sentence,
        )
    assert re.fullmatch(
        r"sample indices .*shuffle_index\.npy are truncated: \d+ of \d+ bytes; remove that file, and they are made "
        "anew",
        of_cache,
    )


def test_blend_words():
    """One prefix, prefixes without weights, and weights with prefixes are told apart as in Megatron-LM."""
    assert parse_blend(["a"]) == (["a"], None)
    assert parse_blend(["a", "b"]) == (["a", "b"], None)
    assert parse_blend(["0.3", "a", "0.7", "b"]) == (["a", "b"], [0.3, 0.7])
    assert parse_blend(None) is None
    assert parse_blend(["0", "a", "1", "b", "0.0", "c"]) == (["b"], [1.0])


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("-1 a 1 b", "a the weight -1, which is negative; give"),
        ("1 a nan b", "b the weight nan, which is no finite number; give"),
        ("1 a inf b", "b the weight inf, which is no finite number; give"),
        ("0 a 0.0 b", "every prefix the weight 0, so there is nothing to read; weigh one above 0"),
    ],
)
@pytest.mark.parametrize("source", ["--data-path", "--data-args-path", "--per-split-data-args-path"])
def test_weights_that_are_none_are_refused_with_a_reason(tmp_path, source, words, reason):
    """By the flags alone, wherever the weights stand."""
    file = tmp_path / "blend"
    file.write_text(json.dumps({"train": words.split()}) if "split" in source else words)
    value = words if source == "--data-path" else file
    with pytest.raises(ValueError, match=rf"^{source}.* gives {reason}"):
        arguments(f"{source} {value}", without="--mock-data")


def test_a_weight_of_zero_leaves_its_data_out(tmp_path):
    """With a note, and the samples are those of the others alone."""
    one, other = (write_dataset(tmp_path / name, seed=seed) for seed, name in enumerate("ab"))
    args = parse_args(argv(f"--data-path 0 {one} 1 {other}", without="--mock-data"))
    assert validate_args(args, world_size=1) == [f"nothing is read of {one}: --data-path gives the weight 0"]
    each = (f"0 {one} 1 {other}", f"1 {other}")
    found, alone = (read(1, f"--num-workers 0 --data-path {blend}")[0] for blend in each)
    assert all(torch.equal(found[step][key], alone[step][key]) for step in range(3) for key in found[step])


def test_sources(tmp_path):
    """The four ways to name data give a blend, or one per split."""
    (tmp_path / "list").write_text("0.5 a\n0.5 b\n")
    (tmp_path / "splits").write_text('{"train": ["a"], "valid": ["b"]}')

    def found(flags):
        return blends(arguments(flags, without="--mock-data"))

    assert found("--data-path a") == ((["a"], None), None)
    assert found(f"--data-args-path {tmp_path}/list") == ((["a", "b"], [0.5, 0.5]), None)
    assert found(f"--per-split-data-args-path {tmp_path}/splits") == (None, [(["a"], None), (["b"], None), None])
    assert found("--train-data-path a --valid-data-path b") == (None, [(["a"], None), (["b"], None), None])
    assert blends(arguments()) == (None, None)


def test_sample_counts():
    """Training takes the run's samples, validation one evaluation more than intervals, test one evaluation."""
    args = arguments("--eval-iters 3 --eval-interval 4")
    assert num_samples(args) == [80, 3 * 3 * 8, 3 * 8]


def read_case(
    flags: str, consumed: int, steps: int, chunk: int = 0, share: Share | None = None
) -> list[dict[str, torch.Tensor]]:
    """The first microbatches that a stage of this rank gets: `chunk`, counted from 0."""
    from megatron.core import parallel_state
    from megatron.trainer.start_up import initialize

    args = arguments(flags, without="--mock-data", world_size=torch.distributed.get_world_size())
    args = initialize.set_up(args)
    schedule = args.schedule
    try:
        before = torch.get_rng_state()
        stage = schedule.stages_of(parallel_state.get_pipeline_model_parallel_rank())[chunk]
        iterator = opened(args, consumed_samples=consumed, stage=stage, num_stages=schedule.num_stages, share=share)
        found = [{key: value.clone() for key, value in next(iterator).items()} for _ in range(steps)]
        assert torch.equal(before, torch.get_rng_state()), "loading data drew from the global generator"
        return found
    finally:
        parallel_state.destroy_model_parallel()


def read(num_ranks: int, flags: str, *, consumed: int = 0, steps: int = 3, **options) -> list:
    case = "tests.trainer.data.test_microbatches:read_case"
    return workers.run(num_ranks, case, flags=flags, consumed=consumed, steps=steps, **options)


def test_every_stage_and_tensor_rank_sees_the_same_samples(tmp_path):
    """First and last stage, and both tensor ranks, get the same samples; a middle stage gets none."""
    prefix = write_dataset(tmp_path / "text")
    flags = f"--data-path {prefix} --num-workers 0"
    (single,) = read(1, flags)
    stages = read(4, f"{flags} --pipeline-model-parallel-size 4")
    assert set(stages[0][0]) == {"tokens", "position_ids"} and set(stages[3][0]) == {"labels", "loss_mask"}
    assert stages[1] == stages[2] == [{}, {}, {}]
    for step in range(3):
        for key, tensor in single[step].items():
            owner = stages[0] if key in stages[0][0] else stages[3]
            assert torch.equal(owner[step][key], tensor)
        assert torch.equal(single[step]["tokens"][:, 1:], single[step]["labels"][:, :-1])
    for rank in read(2, f"{flags} --tensor-model-parallel-size 2"):
        for step in range(3):
            assert all(torch.equal(rank[step][key], single[step][key]) for key in single[step])


def test_replicas_and_resume_take_the_samples_of_one_run(tmp_path):
    """Two replicas take the single run's samples in turn; a resumed run goes on exactly; workers change nothing."""
    prefix = write_dataset(tmp_path / "text")
    flags = f"--data-path {prefix} --num-workers 0"
    (single,) = read(1, flags, steps=6)
    replicas = read(2, flags)
    for step in range(3):
        for rank in range(2):
            assert torch.equal(replicas[rank][step]["tokens"], single[2 * step + rank]["tokens"])
    (resumed,) = read(1, f"--data-path {prefix} --num-workers 1", consumed=4, steps=2)
    assert all(torch.equal(resumed[step]["tokens"], single[4 + step]["tokens"]) for step in range(2))


def test_a_copy_reads_the_samples_of_other_replicas_too(tmp_path):
    """Two ranks, of which each would read every second microbatch, read three of four, and one of four."""
    prefix = write_dataset(tmp_path / "text")
    flags = f"--data-path {prefix} --num-workers 0"
    (single,) = read(1, flags, steps=8)
    shares = copies_of(Copy(0, (0, 2, 3)), Copy(0, (1,)))
    for share in shares:
        for rank in read(2, flags, steps=2, share=share):
            for step in range(2):
                assert torch.equal(rank[step]["tokens"], single[share.position_of(step)]["tokens"])


def test_attention_masks_reach_every_stage(tmp_path):
    """With --reset-attention-mask a middle stage gets the masks, too; without, no stage makes any."""
    prefix = write_dataset(tmp_path / "text")
    flags = f"--data-path {prefix} --num-workers 0 --reset-attention-mask --pipeline-model-parallel-size 4"
    stages = read(4, flags, steps=1)
    masks = [stage[0]["attention_mask"] for stage in stages]
    assert masks[0].shape == (1, 1, 32, 32) and masks[0].dtype is torch.bool
    assert all(torch.equal(mask, masks[0]) for mask in masks)
    virtual = flags.replace("size 4", "size 2 --num-virtual-stages-per-pipeline-rank 2")
    for chunk in range(2):
        assert all(torch.equal(one[0]["attention_mask"], masks[0]) for one in read(2, virtual, steps=1, chunk=chunk))


def test_token_beyond_the_vocabulary_is_named(tmp_path):
    """An id that the embedding has no row for is an error with the id, before it reaches the model."""
    prefix = write_dataset(tmp_path / "text", vocab=5000)
    with pytest.raises(workers.WorkerError, match=r"token id \d+ in the training data .* beyond the vocabulary of 101"):
        read(1, f"--data-path {prefix} --num-workers 0", steps=1)


def test_cache_that_cannot_be_written(tmp_path):
    """Sample indices that cannot be kept, where the flag says or beside the data, are an error with the remedy."""
    prefix = write_dataset(tmp_path / "text")
    (tmp_path / "text").write_text("")  # the default is a folder in this place
    flags = f"--data-path {prefix} --num-workers 0"
    for flag, message in (
        (f"--data-cache-path {prefix}/new", "--data-cache-path .*text/new cannot be written: Not a directory"),
        ("", "the sample indices cannot be written: .*Not a directory.* with --data-cache-path"),
    ):
        with pytest.raises(workers.WorkerError, match=f"ValueError: {message}"):
            read(1, f"{flags} {flag}", steps=1)


def test_a_split_without_documents(tmp_path):
    """Three documents leave none for validation: the run goes on without; no training document is an error."""
    prefix = write_dataset(tmp_path / "text", documents=3)
    read(1, f"--data-path {prefix} --num-workers 0", steps=1)
    with pytest.raises(workers.WorkerError, match="the training split has no documents"):
        read(1, f"--data-path {prefix} --num-workers 0 --split 0,1,1", steps=1)


def test_blend_without_weights_that_is_too_short(tmp_path):
    """A blend without weights is one epoch; a longer run is told so at the start."""
    one, two = (write_dataset(tmp_path / name, documents=12) for name in ("one", "two"))
    with pytest.raises(workers.WorkerError, match=r"the training data holds .* give the parts of the blend weights"):
        read(1, f"--data-path {one} {two} --split 1,1,1 --num-workers 0 --train-iters 1000", steps=1)
    read(1, f"--data-path 0.5 {one} 0.5 {two} --split 1,1,1 --num-workers 0 --train-iters 1000", steps=1)


def test_loss_is_a_mean_over_the_tokens_that_count():
    """Masked tokens count neither in the sum nor in the number of tokens."""
    mask = torch.tensor([[1.0, 0.0, 1.0]])
    total, tokens, report = language_model_loss(mask, torch.tensor([[1.0, 100.0, 2.0]]))
    assert total.item() == 3.0 and tokens.item() == 2
    assert report["lm loss"].tolist() == [3.0, 2.0]
