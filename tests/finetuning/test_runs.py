"""Whole runs of `finetune.py`'s job: what they train, what they write, and where they go on."""

import json
import math
import re
from pathlib import Path

import pytest
import torch

from megatron.finetuning.checkpoint import SavedProgress
from megatron.finetuning.samples import read_data
from tests import workers
from tests.finetuning import cases, tiny

CASES = "tests.finetuning.cases"
CLASSES = "sequence-classification"
EVALUATED = ["--do_train", "--do_eval", "--num_train_epochs", 2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


def run(folder: Path, name: str, *argv: object, task: str = CLASSES, ranks: int = 2, **options: object):
    outcome, *_ = workers.run(
        ranks, f"{CASES}:finetune", folder=folder, task=task, argv=tuple(map(str, argv)), name=name, **options
    )
    return outcome


def same(one: cases.Outcome, other: cases.Outcome, *, exactly: bool = True) -> None:
    assert one.weights.keys() == other.weights.keys()
    for name, weights in one.weights.items():
        if exactly:
            assert torch.equal(weights, other.weights[name]), name
        else:
            torch.testing.assert_close(weights, other.weights[name], rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("task", "schedule", "argv"),
    [
        (CLASSES, "flush", ["--gradient_accumulation_steps", 4, "--max_grad_norm", 0.1, "--weight_decay", 0.1]),
        ("text-to-text", "gpipe", ["--optim", "sgd", "--learning_rate", 0.1, "--gradient_accumulation_steps", 2]),
        ("causal-lm", "flush", ["--optim", "adafactor", "--learning_rate", 0.01]),
        ("image-classification", "flush", ["--warmup_steps", 3]),
        ("masked-lm", "flush", ["--gradient_accumulation_steps", 3]),
        ("regression", "flush", ["--gradient_accumulation_steps", 3]),
        ("multiple-choice", "gpipe", ["--gradient_accumulation_steps", 2, "--adam_epsilon", 1e-5]),
        ("audio-classification", "flush", ["--weight_decay", 0.1]),
        ("ctc", "gpipe", ["--gradient_accumulation_steps", 3]),
        ("speech-to-text", "flush", ["--gradient_accumulation_steps", 2]),
        # What shifts all logits changes no loss: the large epsilon lets the noise of its gradients stay noise.
        ("contrastive-image-text", "flush", ["--dataloader_drop_last", "--adam_epsilon", 1e-5]),
        ("image-text-to-text", "flush", ["--gradient_accumulation_steps", 2]),
        ("question-answering", "gpipe", ["--optim", "adam", "--adam_epsilon", 1e-5]),
    ],
)
def test_two_ranks_train_what_one_process_trains(folder, task, schedule, argv):
    """Two stages on each rank, a short last microbatch and a short last batch, clipping, weight decay."""
    argv = [*argv, "--num_train_epochs", 2, "--lr_scheduler_type", "cosine", "--pipeline_schedule", schedule]
    expected = cases.plain(folder, task, argv=argv)
    cut = cases.partition(folder, task, (0, 1, 0, 1))
    found = run(folder, f"{task}-{schedule}", *argv, "--partition", cut, task=task)
    assert len(set(expected.losses)) == len(expected.losses) > 2
    assert found.losses == pytest.approx(expected.losses, rel=1e-5)
    assert [line["learning_rate"] for line in found.lines] == [line["learning_rate"] for line in expected.lines]
    same(found, expected, exactly=False)


@pytest.mark.full
@pytest.mark.parametrize("kind", ["paligemma", "gemma3"])
def test_models_that_attend_by_the_types_of_tokens_train_what_one_process_trains(folder, kind):
    """Gemma 3 and PaliGemma: prompts of several lengths, so that padding differs, and a short last batch."""
    task = "image-text-to-text"
    argv = ["--model_name_or_path", tiny.typed_folder(folder, kind), "--max_seq_length", 24, "--num_train_epochs", 1]
    argv += ["--gradient_accumulation_steps", 2, "--learning_rate", 0.01, "--pipeline_schedule", "flush"]
    argv += ["--adam_epsilon", 1e-4]
    expected = cases.plain(folder, task, argv=argv)
    cut = cases.partition(folder, task, (0, 1, 0, 1), *argv)
    found = run(folder, kind, *argv, "--partition", cut, task=task)
    assert len(set(expected.losses)) == 4 and found.losses == pytest.approx(expected.losses, rel=1e-5)
    same(found, expected, exactly=False)


@pytest.mark.full
def test_hidden_tokens_go_on(folder):
    """Masked language modelling on one rank: the losses of plain transformers, and a resumed run hides what the whole
    run hides, to the last bit; an evaluation hides the same tokens each time."""
    file = tiny.data_file(folder, "masked-lm")
    argv = [*EVALUATED, "--validation_file", file, "--pipeline_schedule", "flush", "--save_steps", 4, "--eval_steps", 7]
    argv += ["--learning_rate", 0.01, "--partition", cases.partition(folder, "masked-lm", (0,))]
    expected = cases.plain(folder, "masked-lm", argv=argv)
    whole = run(folder, "hidden", *argv, "--eval_strategy", "steps", task="masked-lm", ranks=1)
    assert len(whole.losses) == 14 and whole.losses == pytest.approx(expected.losses, rel=1e-5)
    checkpoint = folder / "hidden" / "checkpoint-8"
    rest = run(folder, "hidden-rest", *argv, "--resume_from_checkpoint", checkpoint, task="masked-lm", ranks=1)
    assert rest.losses == whole.losses[8:]
    same(whole, rest)
    with pytest.raises(workers.WorkerError, match=r"another --mlm_probability \(None\) than this run's \(0\.5\); give"):
        run(folder, "hidden-other", *argv, "--resume_from_checkpoint", checkpoint, "--mlm_probability", 0.5,
            task="masked-lm", ranks=1)  # fmt: skip
    rows = read_data(tiny.arguments(folder, "masked-lm", *argv)).validation
    with torch.no_grad():
        loss = cases.loaded(folder / "hidden", "masked-lm")(**rows.batch(range(20), 20)).loss.item()
    last = [line for line in whole.lines if "eval_loss" in line][-1]
    assert (last["eval_loss"], last["eval_perplexity"]) == pytest.approx((loss, math.exp(loss)), rel=1e-5)


@pytest.mark.full
@pytest.mark.parametrize("word", ["eager", pytest.param("sdpa", marks=pytest.mark.full)])
def test_either_attention_trains_what_it_trains_in_transformers(folder, word):
    argv = ["--num_train_epochs", 1, "--pipeline_schedule", "flush", "--learning_rate", 0.01]
    expected = cases.plain(folder, "chat", argv=[*argv, "--attn_implementation", word])
    other = cases.plain(folder, "chat", argv=argv)
    cut = cases.partition(folder, "chat", (0, 1), *argv, "--attn_implementation", word)
    found = run(folder, word, *argv, "--attn_implementation", word, "--partition", cut, task="chat")
    assert found.losses == pytest.approx(expected.losses, rel=1e-6)
    assert found.losses == pytest.approx(other.losses, rel=1e-5)


@pytest.mark.full
def test_packed_conversations_train_what_single_ones_train(folder):
    """Two ranks on packed rows against one process on a conversation a row; all are in each batch, where each label
    weighs the same. Then the loss and the accuracy of an evaluation."""
    argv = ["--num_train_epochs", 3, "--learning_rate", 0.01, "--pipeline_schedule", "flush", "--max_seq_length", 24]
    expected = cases.plain(folder, "chat", argv=[*argv, "--gradient_accumulation_steps", 7])
    rows = read_data(tiny.arguments(folder, "chat", *argv)).training
    argv += ["--packing", "--gradient_accumulation_steps", 5, "--validation_file", tiny.data_file(folder, "chat")]
    assert len(read_data(tiny.arguments(folder, "chat", *argv)).training) == 13
    cut = cases.partition(folder, "chat", (0, 1, 0, 1), *argv)
    found = run(folder, "packed", *argv, "--do_train", "--do_eval", "--partition", cut, task="chat")
    assert found.losses == pytest.approx(expected.losses, rel=1e-5) and len(set(found.losses)) == 3
    same(found, expected, exactly=False)
    batch = rows.batch(range(20), 20)
    with torch.no_grad():
        output = cases.loaded(folder / "packed", "chat")(**batch)
    right = rows.metrics({"logits": output.logits.argmax(-1)}, 0.0)["token_accuracy"]
    line = found.evaluation()
    assert (line["eval_loss"], line["eval_token_accuracy"]) == pytest.approx((output.loss.item(), right), rel=1e-5)


def lengths(folder: Path, task: str) -> Path:
    """Eight samples, of which every second has two words to predict, and the others nine."""
    rows = [" ".join(tiny.WORDS[at : at + (2, 9)[at % 2]]) for at in range(8)]
    names = ("source", "target") if task == "text-to-text" else ("text",)
    path = folder / f"lengths-{task}.jsonl"
    path.write_text("".join(json.dumps(dict.fromkeys(names, row)) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.mark.full
@pytest.mark.parametrize(
    ("task", "schedule", "size", "accumulation"),
    [
        ("causal-lm", "ftpipe", 3, 3),
        ("causal-lm", "flush", 8, 1),
        ("causal-lm", "flush", 1, 8),
        ("text-to-text", "gpipe", 3, 3),
        ("text-to-text", "ftpipe", 1, 8),
        ("text-to-text", "ftpipe", 3, 3),
    ],
)
def test_each_counted_label_weighs_the_same(folder, task, schedule, size, accumulation):
    """However a batch is cut, into microbatches and stages: the loss, the norm and the step of training are those of
    all counted labels, added up by hand, and so is the loss of an evaluation.
    """
    file = lengths(folder, task)
    argv = ["--train_file", file, "--validation_file", file, "--no_group_texts", "--do_train", "--do_eval"]
    argv += ["--max_steps", 1, "--optim", "sgd", "--learning_rate", 0.1, "--lr_scheduler_type", "constant"]
    argv += ["--pipeline_schedule", schedule, "--max_grad_norm", 0, "--save_strategy", "no", "--eval_steps", 1]
    model = cases.loaded(tiny.model_folder(folder, task), task)
    rows = read_data(tiny.arguments(folder, task, *argv)).training

    def loss() -> torch.Tensor:
        batch = rows.batch(range(8), 8)
        logits, labels = model(**batch).logits, batch["labels"]
        if task == "causal-lm":
            logits, labels = logits[:, :-1], labels[:, 1:]
        assert len(set((labels >= 0).sum(1).tolist())) == 2
        return -logits.log_softmax(-1).gather(-1, labels.clamp(0)[..., None])[..., 0][labels >= 0].mean()

    before = loss()
    before.backward()
    norm = torch.nn.utils.get_total_norm([each.grad for each in model.parameters()]).item()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    after = loss().item()
    cut = ["--per_device_train_batch_size", size, "--gradient_accumulation_steps", accumulation]
    partition = cases.partition(folder, task, (0, 1), *cut)
    found = run(folder, f"lengths-{task}-{schedule}-{size}", *argv, *cut, "--partition", partition, task=task)
    assert found.losses == pytest.approx([before.item()], rel=1e-6)
    assert found.lines[0]["grad_norm"] == pytest.approx(norm, rel=1e-5)
    assert found.evaluation()["eval_loss"] == pytest.approx(after, rel=1e-6)


@pytest.mark.full
@pytest.mark.parametrize(
    ("schedule", "precision"),
    [("ftpipe", []), ("flush", []), ("ftpipe", ["--bf16"]), ("ftpipe", ["--provisional_steps"])],
)
def test_ranks_do_not_matter(folder, schedule, precision):
    """With dropout, the same stages on two ranks, or all on one: the same bits, ftpipe's too."""
    precision = ["--gradient_accumulation_steps", 2, *precision]
    argv = ["--num_train_epochs", 2, "--pipeline_schedule", schedule, *precision]
    runs = [
        run(
            folder, f"places-{schedule}-{number}{''.join(map(str, precision))}", *argv, "--partition",
            cases.partition(folder, CLASSES, ranks, *precision, dropout=0.1), dropout=0.1, ranks=len(set(ranks)),
        )
        for number, ranks in enumerate([(0, 1, 1, 0), (0, 0, 0, 0)])
    ]  # fmt: skip
    assert runs[0].losses == runs[1].losses
    rates = [line["learning_rate"] for line in runs[0].lines]
    assert rates == pytest.approx([5e-5 * (1 - step / len(rates)) for step in range(len(rates))])
    same(*runs)


@pytest.mark.full
@pytest.mark.parametrize(
    ("schedule", "ranks", "precision"),
    [
        ("ftpipe", (0, 1, 0, 1), ["--bf16", "--provisional_steps"]),
        ("ftpipe", (0, 1, 0, 1), ["--bf16", "--gap_aware"]),
        ("ftpipe", (0, 1, 0, 1), ["--provisional_steps", "--optim", "adafactor"]),
        ("2bw", (0, 1), ["--bf16"]),
        ("flush", (0, 1, 0, 1), ["--bf16", "--optim", "adafactor"]),
        ("pipedream", (0, 1), []),
    ],
)
def test_a_resumed_run_is_the_run(folder, schedule, ranks, precision):
    """A run that has saved on its way, and one that goes on from what it saved: the same bits at the end."""
    precision = ["--gradient_accumulation_steps", 1 if schedule == "pipedream" else 2, *precision]
    argv = [
        "--num_train_epochs", 2, "--pipeline_schedule", schedule, "--save_steps", 3, "--partition",
        cases.partition(folder, CLASSES, ranks, *precision, dropout=0.1), "--dataloader_drop_last", *precision,
    ]  # fmt: skip
    name = "".join([schedule, *map(str, precision)])
    whole = run(folder, f"whole-{name}", *argv, dropout=0.1)
    checkpoint = folder / f"whole-{name}" / "checkpoint-3"
    rest = run(folder, f"rest-{name}", *argv, "--resume_from_checkpoint", checkpoint, dropout=0.1)
    assert rest.losses == whole.losses[3:] and len(rest.losses) >= 3
    same(whole, rest)
    assert cases.weights_of(checkpoint, CLASSES).keys() == whole.weights.keys()
    assert SavedProgress.read(checkpoint).optim.endswith("with FP32 masters") == ("--bf16" in precision)


@pytest.mark.full
def test_an_evaluation_is_the_models(folder):
    """What a run says of its last weights is what transformers finds with the folder that it wrote."""
    argv = ["--pipeline_schedule", "ftpipe", "--partition", cases.partition(folder, CLASSES, (0, 1, 0, 1))]
    validation = tiny.data_file(folder, num_samples=70, seed=3)
    found = run(folder, "evaluated", *EVALUATED, *argv, "--validation_file", validation).evaluation()
    args = tiny.arguments(folder, CLASSES, "--validation_file", validation, "--do_eval")
    rows = read_data(args).validation
    model = cases.loaded(folder / "evaluated", CLASSES).eval()
    batch = rows.batch(range(len(rows)), len(rows))
    with torch.no_grad():
        output = model(**batch)
    assert found["eval_loss"] == pytest.approx(output.loss.item(), rel=1e-5)
    assert found["eval_accuracy"] == (output.logits.argmax(-1) == batch["labels"]).double().mean().item()


@pytest.mark.full
def test_all_in_bfloat16(folder):
    """Weights, what crosses, gradients and the file are bfloat16, and the same bits on two ranks and on one."""
    argv = ["--dtype", "bfloat16", "--optim", "sgd", "--learning_rate", 0.1, "--num_train_epochs", 1]
    runs = [
        run(
            folder, f"bf16-{len(set(ranks))}", *argv, "--partition",
            cases.partition(folder, CLASSES, ranks, "--dtype", "bfloat16"), ranks=len(set(ranks)),
        )
        for ranks in ((0, 1, 1, 0), (0, 0, 0, 0))
    ]  # fmt: skip
    same(*runs)
    assert {each.dtype for name, each in runs[0].weights.items() if "position_ids" not in name} == {torch.bfloat16}


@pytest.mark.full
@pytest.mark.parametrize(
    ("task", "ranks", "accumulation"),
    [
        (CLASSES, (0, 1, 0, 1), 2),
        (CLASSES, (0,), 2),
        ("causal-lm", (0, 1), 1),
        ("text-to-text", (0, 1, 0, 1), 1),
        ("image-classification", (0, 1), 2),
    ],
)
def test_bf16_has_fp32_masters(folder, task, ranks, accumulation):
    """BF16 weights, FP32 masters from the file's FP32 values: what one process trains so. The masters are written.

    Where stages share a weight, each adds up its own part over the microbatches, in another order than one process; at
    16 bits that shows, so those batches are one microbatch.
    """
    argv = ["--bf16", "--num_train_epochs", 2, "--learning_rate", 1e-3, "--weight_decay", 0.1, "--max_grad_norm", 0]
    argv += ["--pipeline_schedule", "flush", "--gradient_accumulation_steps", accumulation, "--dataloader_drop_last"]
    cut = cases.partition(folder, task, ranks, "--bf16")
    name = f"masters-{task}-{len(ranks)}"
    found = run(folder, name, *argv, "--partition", cut, task=task, ranks=len(set(ranks)))
    expected = cases.plain(folder, task, argv=argv)
    assert found.losses == expected.losses
    for name in [each for each in found.weights if "relative_attention_bias" in each]:
        one, other = found.weights.pop(name), expected.weights.pop(name)
        torch.testing.assert_close(one, other, rtol=0, atol=2e-5)  # T5's: graphs add up its gradient in another order
    same(found, expected, exactly=task != "text-to-text")
    assert any((each != each.bfloat16()).any() for each in found.weights.values()), "what is written is rounded"
    assert {each.dtype for each in found.weights.values() if each.is_floating_point()} == {torch.float32}


@pytest.mark.full
@pytest.mark.parametrize("precision", [[], ["--bf16"]], ids=["float32", "bf16"])
def test_an_evaluation_alone(folder, precision):
    """A folder that a run wrote is evaluated, on samples of one class, as the run's own evaluation says."""
    cut = cases.partition(folder, CLASSES, (0, 1), *precision)
    validation = folder / "one.jsonl"
    lines = tiny.data_file(folder, num_samples=30, seed=4).read_text().splitlines(keepends=True)
    validation.write_text("".join(line for line in lines if "odd" in line))
    argv = ["--pipeline_schedule", "flush", "--partition", cut, "--validation_file", validation, *precision]
    trained = run(folder, "".join(["trained", *precision]), *EVALUATED, "--learning_rate", 1e-2, *argv).evaluation()
    alone = ["--do_eval", "--model_name_or_path", folder / "".join(["trained", *precision]), *argv]
    found = run(folder, "".join(["alone", *precision]), *alone).evaluation()
    assert found["eval_loss"] == trained["eval_loss"] and found["eval_accuracy"] == trained["eval_accuracy"]
    assert found["step"] == 0 and not list(folder.glob("alone*/*"))


@pytest.mark.full
def test_a_new_head_begins_alike_everywhere(folder):
    """A folder of the inner model: its tensors are found under their short names, and the head is made by the seed."""
    inner = cases.loaded(tiny.model_folder(folder), CLASSES).bert
    inner.save_pretrained(folder / "inner")
    tiny.tokenizer().save_pretrained(folder / "inner")
    outcomes = []
    for ranks in ((0, 1), (0, 0)):
        argv = ["--max_steps", 1, "--learning_rate", 0, "--model_name_or_path", folder / "inner", "--partition"]
        cut = cases.partition(folder, CLASSES, ranks)
        outcomes.append(run(folder, f"head-{ranks}", *argv, cut, ranks=len(set(ranks))))
    same(*outcomes)
    head = outcomes[0].weights["classifier.weight"]
    assert 0.005 < head.std() < 0.05 and not outcomes[0].weights["classifier.bias"].any()
    for name, weights in inner.state_dict().items():
        assert torch.equal(outcomes[0].weights[f"bert.{name}"], weights), name


def test_strategies_say_when(folder):
    """Two epochs of seven batches: evaluations with the epochs, checkpoints each three batches and at the end."""
    cut = cases.partition(folder, CLASSES, (0, 1))
    validation = tiny.data_file(folder, num_samples=5, seed=6)
    argv = ["--do_train", "--eval_strategy", "epoch", "--save_strategy", "steps", "--save_steps", 4]
    argv += ["--num_train_epochs", 2, "--validation_file", validation, "--partition", cut]
    found = run(folder, "strategies", *argv)
    assert [line["step"] for line in found.lines if "eval_loss" in line] == [7, 14]
    saved = sorted(int(each.name.split("-")[1]) for each in (folder / "strategies").glob("checkpoint-*"))
    assert saved == [4, 8, 12, 14]
    last = cases.weights_of(folder / "strategies" / "checkpoint-14", CLASSES)
    assert all(torch.equal(last[name], weights) for name, weights in found.weights.items())


@pytest.mark.full
def test_all_ranks_know_what_one_cannot_do(folder):
    """A disk that is full for one rank, and a checkpoint of which one rank's file is damaged."""
    argv = ["--partition", cases.partition(folder, CLASSES, (0, 1)), "--max_steps", 1, "--save_strategy", "steps"]
    for room in (4000, 20_000):  # of the weights, and of the optimizer's state
        full = workers.run(2, f"{CASES}:refused", folder=folder, argv=tuple(map(str, argv)), room=room)
        assert full[0] == full[1]
        told = r".*partial cannot be written by rank 1: .*File too large.*; make room, or give another --output_dir"
        assert re.fullmatch(told, full[0])
    assert not list((folder / "refused").glob("*checkpoint-*"))
    run(folder, "damaged", *argv)
    checkpoint = folder / "damaged" / "checkpoint-1"
    (checkpoint / "training-1.pt").write_text("no state")
    argv += ["--resume_from_checkpoint", checkpoint]
    found = workers.run(2, f"{CASES}:refused", folder=folder, argv=tuple(map(str, argv)))
    assert found[0] == found[1]
    assert re.fullmatch(r".*training-1\.pt cannot be read \(.*\); go on from another checkpoint", found[0])
