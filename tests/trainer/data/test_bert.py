"""BERT's samples and losses: every stage sees the same ones, and what counts how much."""

import math

import pytest
import torch

from megatron import backend

backend.install()

from megatron.trainer.data.masked import bert_inputs, bert_loss
from tests import workers
from tests.trainer.arguments.bert_command_line import (
    bert_arguments,
    data_flags,
    random_documents,
    write_sentences,
    write_vocabulary,
)
from tests.trainer.data.small_data import write_dataset


def test_a_microbatch_is_a_mean_over_its_masked_tokens_and_orders():
    """By hand: two samples with 1 and 3 masked tokens weigh 1 to 3; the order's loss is a mean over both samples."""
    losses = torch.tensor([[2.0, 9.0, 9.0, 9.0], [4.0, 6.0, 8.0, 9.0]], requires_grad=True)
    mask = torch.tensor([[1.0, 0, 0, 0], [1, 1, 1, 0]])
    logits = torch.tensor([[0.0, 0.0], [math.log(3.0), 0.0]])
    loss, numbers = bert_loss(mask, torch.tensor([1, 0]), (losses, logits))
    order = (math.log(2.0) + math.log(4 / 3)) / 2
    assert numbers["lm loss"].tolist() == [5.0, 1.0] and numbers["sop loss"].item() == pytest.approx(order)
    assert loss.item() == pytest.approx(5.0 + order)
    loss.backward()
    assert losses.grad.tolist() == (mask / 4).tolist()
    alone, numbers = bert_loss(mask, None, (losses, None))
    assert alone.item() == 5.0 and list(numbers) == ["lm loss"]
    weighted, weight, numbers = bert_loss(mask, torch.tensor([1, 0]), (losses, logits), per_token=True)
    assert weight == 4 and weighted.item() == pytest.approx(4 * loss.item())
    assert numbers["lm loss"].tolist() == [20.0, 4.0] and numbers["sop loss"].tolist() == pytest.approx([4 * order, 4])


def test_a_microbatch_without_masked_tokens_counts_for_nothing():
    """Neither a division by zero nor a zero in the reported mean."""
    loss, numbers = bert_loss(torch.zeros(1, 3), None, (torch.ones(1, 3), None))
    assert loss.item() == 0.0 and numbers["lm loss"].tolist() == [0.0, 0.0]
    loss, weight, _ = bert_loss(torch.zeros(1, 3), None, (torch.ones(1, 3), None), per_token=True)
    assert loss.item() == weight.item() == 0.0


def test_what_a_stage_lacks_is_not_made_up():
    """A middle stage has a mask only, and nothing stands for its tokens."""
    mask = torch.ones(1, 3, dtype=torch.int64)
    inputs = bert_inputs({"padding_mask": mask})
    assert inputs["input_ids"] is None and inputs["attention_mask"] is mask
    assert inputs["lm_labels"] is None and inputs["tokentype_ids"] is None


def read_case(flags: str, steps: int = 4, consumed: int = 0) -> list[dict[str, torch.Tensor]]:
    """The first microbatches that this rank gets."""
    from megatron.core import parallel_state
    from megatron.trainer.data.masked import bert_fields, build_bert_datasets
    from megatron.trainer.data.microbatches import MicrobatchIterator
    from megatron.trainer.data.tokenizer import build_tokenizer, vocab_size

    args = bert_arguments(flags, world_size=torch.distributed.get_world_size())
    parallel_state.initialize_model_parallel(args.tensor_model_parallel_size, args.pipeline_model_parallel_size)
    try:
        tokenizer = build_tokenizer(args)
        iterator = MicrobatchIterator(
            args, build_bert_datasets(args, tokenizer).parts[0], fields=bert_fields(args), name="training",
            consumed_samples=consumed, vocab_size=vocab_size(args, tokenizer),
            stage=parallel_state.get_pipeline_model_parallel_rank(), num_stages=args.pipeline_model_parallel_size,
        )  # fmt: skip
        return [{name: tensor.clone() for name, tensor in next(iterator).items()} for _ in range(steps)]
    finally:
        parallel_state.destroy_model_parallel()


def read(num_ranks: int, flags: str = "", **options) -> list:
    flags = f"{data_flags()} --num-workers 0 {flags}"
    return workers.run(num_ranks, "tests.trainer.data.test_bert:read_case", flags=flags, **options)


@pytest.fixture(scope="module")
def single():
    """The microbatches of one process, with all fields."""
    (found,) = read(1, "--micro-batch-size 2", steps=8)
    return found


def test_samples_are_padded_and_masked(single):
    """Samples differ in length; what is padding has mask 0, type 0 and no label, and every sample has masked tokens."""
    lengths = torch.cat([batch["padding_mask"].sum(1) for batch in single])
    assert len(lengths.unique()) > 4 and lengths.max() <= 32
    for batch in single:
        padding, masked = batch["padding_mask"] == 0, batch["loss_mask"] == 1
        assert not batch["types"][padding].any() and not batch["text"][padding].any() and not (padding & masked).any()
        assert (batch["labels"][masked] >= 5).all() and (batch["labels"][~masked] == -1).all()
        assert (masked.sum(1) >= 1).all() and (batch["text"][:, 0] == 2).all()
        assert batch["loss_mask"].dtype is torch.float32 and batch["is_random"].shape == (2,)
    assert any((batch["text"] == 4).any() for batch in single)


def test_every_stage_and_tensor_rank_sees_the_same_samples(single):
    """Each of four stages has the padding's mask of the same samples, the first the tokens, the last the labels; both
    tensor ranks have all. Processes agree on the random tokens, too."""
    stages = read(4, "--micro-batch-size 2 --pipeline-model-parallel-size 4", steps=8)
    names = [set(stage[0]) for stage in stages]
    ends = {"text", "types", "padding_mask"}, {"labels", "loss_mask", "is_random", "padding_mask"}
    assert names == [ends[0], {"padding_mask"}, {"padding_mask"}, ends[1]]
    tensors = read(2, "--micro-batch-size 2 --tensor-model-parallel-size 2", steps=8)
    for rank in (*stages, *tensors):
        for ours, theirs in zip(rank, single, strict=True):
            assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())


def test_replicas_and_resume_take_the_samples_of_one_run(single):
    """Two replicas take the single run's microbatches in turn; a run resumed after four goes on with the fifth."""
    for number, rank in enumerate(read(2, "--micro-batch-size 2")):
        for step, batch in enumerate(rank):
            assert all(torch.equal(batch[name], single[2 * step + number][name]) for name in batch)
    (resumed,) = read(1, "--micro-batch-size 2", steps=2, consumed=8)
    assert all(torch.equal(resumed[step]["text"], single[4 + step]["text"]) for step in range(2))


def test_without_the_binary_head_a_sample_is_one_segment():
    """No types and no orders, and a document of one sentence is enough."""
    (found,) = read(1, "--bert-no-binary-head")
    assert set(found[0]) == {"text", "padding_mask", "labels", "loss_mask"}
    assert ((found[0]["text"] == 3).sum(1) == 1).all()


def error_case(flags: str) -> str:
    """The error of a process that reads one microbatch."""
    try:
        read_case(flags, steps=1)
    except ValueError as error:
        return str(error)
    return "none"


def test_data_without_samples(tmp_path):
    """Documents of single or of too long sentences would be searched for ever: they are an error with a remedy. So is
    text of another vocabulary."""
    vocabulary = write_vocabulary(tmp_path / "vocab.txt")

    def message(prefix: str, flags: str = "") -> str:
        flags = f"--data-path {prefix} --vocab-file {vocabulary} --num-workers 0 {flags}"
        return workers.run(1, "tests.trainer.data.test_bert:error_case", flags=flags)[0]

    whole = write_dataset(tmp_path / "whole", vocab=60)
    assert "no document of at least 2 sentences of at most 512 tokens for the training split; preprocess with" in (
        message(whole)
    )
    long = write_sentences(tmp_path / "long", [[600, 5]] * 9)
    assert "no document of at least 1 sentence of" in message(long, "--bert-no-binary-head --split 1,0,0")
    late = write_sentences(tmp_path / "late", [[5, 5]] * 5 + [[9]] * 5)
    assert "for the validation split" in message(late, "--split 5,5,0")
    other = write_sentences(tmp_path / "other", random_documents(20))
    assert f"in {other} is not in the vocabulary; use the tokenizer" in message(
        other, f"--vocab-file {_tiny_vocabulary(tmp_path)}"
    )


def _tiny_vocabulary(folder) -> str:
    (folder / "tiny.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\na\nb\n")
    return str(folder / "tiny.txt")


@pytest.mark.parametrize(
    "flags, message",
    [
        ("--tokenizer-type ByteLevelTokenizer", r"ByteLevelTokenizer has no .*\[MASK\].*; use BertWordPieceLowerCase"),
        ("--vocab-file {last}", r"has \[PAD\] as 5, but megatron.core pads samples of BERT with 0"),
    ],
)
def test_tokenizers_that_do_not_fit(tmp_path, flags, message):
    """A tokenizer without BERT's marks, or with padding that megatron.core would take for text, is refused."""
    from megatron.trainer.data.masked import build_bert_datasets
    from megatron.trainer.data.tokenizer import build_tokenizer

    (tmp_path / "last.txt").write_text("a\n[UNK]\n[CLS]\n[SEP]\n[MASK]\n[PAD]\n")
    args = bert_arguments(flags.format(last=tmp_path / "last.txt"))
    with pytest.raises(ValueError, match=message):
        build_bert_datasets(args, build_tokenizer(args))
