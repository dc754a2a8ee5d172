"""finetune_bert.py from flags to losses: one result however the job is cut, from a BERT of pretrain_bert.py."""

import argparse

import pytest
import torch

from megatron.pipeline.runtime.failure.errors import CheckpointError
from megatron.trainer.checkpoint.arguments import check_same_model
from tests.trainer.arguments.bert_command_line import data_flags as pretraining_data
from tests.trainer.run.run_case import joined_weights, train
from tests.trainer.run.text_helper import SHAPE, text_arguments, texts, train_texts, write_texts

PRETRAINING = (
    f"{SHAPE} --num-workers 0 --eval-iters 0 --train-iters 2 --lr 1e-2 --micro-batch-size 2 --global-batch-size 8 "
    "--log-interval 1"
)


@pytest.mark.parametrize("head", ["", pytest.param("--bert-no-binary-head", marks=pytest.mark.full)])
def test_the_body_is_the_pretrained_one(tmp_path, head):
    """At other degrees: embedding, layers, final norm, the pooler where there is one, bit by bit. The head is new."""
    learned = joined_weights(
        train(2, f"{pretraining_data()} {head} --save {tmp_path}", program="pretrain_bert", base=PRETRAINING)
    )
    flags = f"--pretrained-checkpoint {tmp_path} --skip-train {head} --pipeline-schedule 2bw"
    found = joined_weights(train_texts(4, f"{flags} --pipeline-model-parallel-size 4"))
    drawn = joined_weights(train_texts(1, f"--skip-train {head}"))
    new = {name for name in found if name.startswith("classification_head.") or (head and name.startswith("pooler."))}
    assert new and found.keys() - new == {
        name for name in learned if name.split(".")[0] in ("embedding", "encoder", "pooler")
    }
    for name, tensor in found.items():
        assert torch.equal(tensor, drawn[name] if name in new else learned[name]), name
    assert any(not torch.equal(drawn[name], learned[name]) for name in found.keys() - new)


@pytest.mark.full
def test_it_learns_what_the_texts_say():
    """Two words tell the class: after 40 batches all validation samples are right."""
    records = train_texts(1, "--train-iters 40 --eval-interval 40 --lr 3e-3 --hidden-dropout 0")[0]["records"]
    assert records[-1]["validation_accuracy"] == 1.0


def test_padding_changes_nothing():
    """The same texts with more padding have the same logits, and another token behind the end is not seen."""
    from tests import workers

    (difference,) = workers.run(1, "tests.trainer.run.test_texts:padding_case")
    assert 0 <= difference < 1e-6


def padding_case() -> float:
    """The largest difference of logits between samples with and without more padding."""
    from megatron.core import parallel_state
    from megatron.trainer.models import core_config
    from megatron.trainer.models.classifiers import BertClassifier

    parallel_state.initialize_model_parallel()
    try:
        args = text_arguments()
        text = torch.randint(5, 60, (3, 12), generator=torch.Generator().manual_seed(1))
        mask = (torch.arange(12) < torch.tensor([4, 7, 5])[:, None]).long()
        model = BertClassifier.build(args, core_config.transformer_config(args)).eval()
        with torch.no_grad():
            long, short = model(text, mask), model(text[:, :7], mask[:, :7])
            other = model(torch.where(mask == 1, text, 9), mask)
        return max((long - short).abs().max().item(), (long - other).abs().max().item())
    finally:
        parallel_state.destroy_model_parallel()


@pytest.mark.parametrize(
    "flags, message",
    [
        ("--num-classes 1", r"--num-classes 1 is less than the 2 classes of .*: bad, good; give at least 2"),
        ("--seq-length 2", r"--seq-length 2 has no room for \[CLS\]"),
        ("--normalization RMSNorm", r"--normalization RMSNorm: the head of megatron.core's BERT"),
        ("--mask-prob 0.1", r"--mask-prob belongs to pretrain_bert.py"),
        ("--img-h 8", r"--img-h belongs to pretrain_vision_classify.py"),
        ("--data-path a", r"--data-path and --train-data-path exclude each other"),
        ("--train-data none.jsonl", r"file none.jsonl does not exist"),
    ],
)
def test_what_does_not_fit_is_refused(flags, message):
    """In a sentence, before anything is built."""
    with pytest.raises(ValueError, match=message) as caught:
        text_arguments(flags)
    assert "\n" not in str(caught.value)


def test_classes_come_from_the_training_data(tmp_path):
    """One class is none to tell apart; one that only the validation data have is named on all ranks."""
    assert text_arguments().class_names == ["bad", "good"]
    assert text_arguments("--num-classes 5").num_classes == 5
    one = write_texts(tmp_path / "one.jsonl", [{"text": "w1", "label": "x"}])
    with pytest.raises(ValueError, match=r"one\.jsonl has one class, x, so there is nothing to tell apart"):
        text_arguments(f"--train-data {one}")
    with pytest.raises(Exception, match=r"one\.jsonl has the class x, which the training data have not"):
        train_texts(4, f"--valid-data {one}")


def test_checkpoints_say_which_classes_they_tell():
    """A run goes on with its own classes only; a new head may have others. A BERT without a head is no such model."""
    here, there = text_arguments(), argparse.Namespace(**vars(text_arguments()))
    check_same_model(here, there, "DIR")
    there.class_names = ["bad", "better"]
    with pytest.raises(CheckpointError, match=r"DIR tells other classes: class_names is \['bad', 'better'\] there"):
        check_same_model(here, there, "DIR")
    there.class_names, there.num_classes = ["a", "b", "c"], 3
    check_same_model(here, there, "DIR", body_only=True)
    there.architecture, there.untie_embeddings_and_output_weights = "bert", False
    check_same_model(here, there, "DIR", body_only=True)
    with pytest.raises(CheckpointError, match=r"holds a BERT, and this .* BERT that tells classes.*--pretrained-check"):
        check_same_model(here, there, "DIR")
    there.bert_binary_head = False
    with pytest.raises(CheckpointError, match=r"bert_binary_head is False there and True here\. Pass --bert-no-binary"):
        check_same_model(here, there, "DIR", body_only=True)
    there.architecture = "vit"
    with pytest.raises(CheckpointError, match=r"holds a ViT"):
        check_same_model(here, there, "DIR", body_only=True)


def test_samples_have_identities():
    """The number of a sample is its line, and it stands for the same tokens in every epoch."""
    from megatron.trainer.data.classification import EpochSamples, TextSamples
    from megatron.trainer.data.tokenizer import build_tokenizer

    args = text_arguments()
    tokenizer, samples = build_tokenizer(args), [(each["text"], each["label"]) for each in texts(5)]
    data = EpochSamples(TextSamples(samples, tokenizer, length=12, classes=["bad", "good"]), seed=1, length=10)
    assert sorted(data.sample_id(index) for index in range(5)) == list(range(5))
    for index in range(10):
        number = data.sample_id(index)
        words = tokenizer.tokenize(samples[number][0])[:10]
        found = data[index]
        assert found["text"].tolist() == ([tokenizer.cls, *words, tokenizer.sep] + [tokenizer.pad] * 12)[:12]
        assert found["padding_mask"].sum() == len(words) + 2 and found["labels"] == (samples[number][1] == "good")
