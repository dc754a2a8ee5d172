"""Microbatches of several lengths: what they train is what rows padded to one length train."""

import json

import pytest
import torch
import transformers
from torch import nn

from megatron.capture.randomness import Draw
from megatron.finetuning.arguments import parse_args
from megatron.finetuning.data.lengths import Lengths, order_of
from megatron.finetuning.pretrained import capture_model
from megatron.finetuning.samples import read_data
from tests.finetuning import cases, tiny
from tests.finetuning.test_replicas import close
from tests.finetuning.test_runs import CLASSES, run, same

PADDED = ["--pad_to_multiple_of", 3]
GROUPED = [*PADDED, "--group_by_length"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("lengths")


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("task", "schedule", "ranks", "argv"),
    [
        ("chat", "2bw", (0, 1), ["--gradient_accumulation_steps", 2, "--dataloader_drop_last"]),
        (CLASSES, "flush", (0,), ["--gradient_accumulation_steps", 2]),
        ("text-to-text", "flush", (0, 1, 0, 1), ["--gradient_accumulation_steps", 2]),
        ("text-to-text", "ftpipe", (0, 1, 0, 1), []),
        ("chat", "l2l", None, ["--gradient_accumulation_steps", 2]),
        ("token-classification", "flush", (0, 1), ["--gradient_accumulation_steps", 2]),
    ],
)
def test_shorter_rows_train_what_full_ones_train(folder, task, schedule, ranks, argv):
    argv = [*argv, "--pipeline_schedule", schedule, "--num_train_epochs", 2, "--optim", "sgd", "--learning_rate", 0.1]
    argv += ["--validation_file", tiny.data_file(folder, task, num_samples=7, seed=3), "--do_train", "--do_eval"]
    name, outcomes = f"{task}-{schedule}", []
    for number, more in enumerate(([], PADDED)):
        cut = [] if ranks is None else ["--partition", cases.partition(folder, task, ranks, *more)]
        outcomes.append(
            run(folder, f"{name}-{number}", *argv, *more, *cut, task=task, ranks=2 if ranks is None else max(ranks) + 1)
        )
    full, shorter = outcomes
    close(shorter, full)
    # Losses, and the metrics of an evaluation of 7 rows, whose microbatches have several widths, too.
    values = [{name: value for name, value in each.evaluation().items() if "time" not in name} for each in outcomes]
    assert values[1] == pytest.approx(values[0], rel=1e-6)
    if schedule == "flush":
        close(shorter, cases.plain(folder, task, argv=[*argv, *PADDED]))


@pytest.mark.full
def test_a_run_goes_on_in_the_same_order_of_lengths(folder):
    """Rows of similar lengths together, two replicas with microbatches of different shapes at a time: what one process
    trains. Resumed from its checkpoint, the run has the same numbers to the last bit; with other padding it is refused.
    """
    argv = ["--pipeline_schedule", "flush", "--num_train_epochs", 2, "--save_steps", 2, *GROUPED, "--optim", "sgd"]
    argv += ["--learning_rate", 0.1, "--data_cache", folder / "cache"]
    whole = cases.plain(folder, "text-to-text", argv=[*argv, "--gradient_accumulation_steps", 2])
    argv += ["--partition", cases.partition(folder, "text-to-text", (0, 1), *GROUPED), "--data_parallel_size", 2]
    found = run(folder, "whole", *argv, task="text-to-text", ranks=4)
    close(found, whole)
    argv += ["--resume_from_checkpoint", folder / "whole" / "checkpoint-2"]
    rest = run(folder, "rest", *argv, task="text-to-text", ranks=4)
    assert rest.losses == found.losses[2:] and len(rest.losses) > 1
    same(rest, found)
    argv[argv.index("--pad_to_multiple_of") + 1] = 4
    with pytest.raises(Exception, match="another --pad_to_multiple_of"):
        run(folder, "other", *argv, task="text-to-text", ranks=4)


class ByLength(nn.Module):
    """Another computation for texts of eight tokens or fewer."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(44, 4)

    def forward(self, input_ids, attention_mask):
        hidden = self.embed(input_ids) * attention_mask[..., None]
        return {"loss": hidden.mean() if input_ids.shape[1] > 8 else hidden.sum()}


def batch_of(rows: int, tokens: int, *, labels: bool = True) -> dict[str, torch.Tensor]:
    ids, mask = torch.randint(4, 44, (rows, tokens)), torch.ones(rows, tokens, dtype=torch.int64)
    mask[1::2, tokens // 2 :] = 0
    made = {"input_ids": ids * mask, "attention_mask": mask}
    return {**made, "labels": ids.masked_fill(mask == 0, -100)} if labels else made


def lengths_up_to(longest: int, *, multiple: int) -> Lengths:
    names = dict.fromkeys(("input_ids", "attention_mask", "labels"), 0)
    return Lengths(torch.arange(2, longest + 1)[:, None], names, (longest,), multiple=multiple)


def test_a_graph_for_some_lengths_is_refused():
    batch = batch_of(2, 12, labels=False)
    for lengths, is_right in ((lengths_up_to(12, multiple=9), True), (lengths_up_to(12, multiple=4), False)):
        if is_right:
            assert capture_model(ByLength(), batch, (), lengths=[lengths]).refused_shapes(batch) is None
            continue
        with pytest.raises(ValueError, match=r"of ByLength is another for 4 tokens than for 12 .*--pad_to_multiple_of"):
            capture_model(ByLength(), batch, (), lengths=[lengths])


_SHAPE = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
_GROUPS = {"num_key_value_heads": 1, "head_dim": 8, "pad_token_id": 0}
KINDS = {
    "LlamaForCausalLM": transformers.LlamaConfig(vocab_size=44, **_SHAPE),
    "Qwen3ForCausalLM": transformers.Qwen3Config(vocab_size=44, **_SHAPE, **_GROUPS),
    "MistralForCausalLM": transformers.MistralConfig(vocab_size=44, **_SHAPE, **_GROUPS, sliding_window=8),
    "Gemma2ForCausalLM": transformers.Gemma2Config(vocab_size=44, **_SHAPE, **_GROUPS, sliding_window=8),
    "GPT2LMHeadModel": transformers.GPT2Config(vocab_size=44, n_embd=16, n_layer=2, n_head=2, n_positions=64),
    "BertForTokenClassification": transformers.BertConfig(vocab_size=44, **_SHAPE, num_labels=44),
}


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_models_take_all_lengths(kind):
    """One graph has the losses of transformers for each length, to the last bit."""
    torch.manual_seed(0)
    model = getattr(transformers, kind)(KINDS[kind]).eval()
    lengths = lengths_up_to(40, multiple=5)
    captured = capture_model(model, batch_of(3, 40), (), lengths=[lengths])
    for (tokens,) in lengths.all_widths():
        batch = batch_of(4, tokens)
        loss, _ = captured.run(batch, Draw(0, 0, training=False) if captured.num_random else None)
        assert torch.equal(loss, model(**batch).loss), tokens


def test_a_model_without_a_graph_for_several_lengths_is_refused():
    model = transformers.MambaForCausalLM(transformers.MambaConfig(vocab_size=44, hidden_size=16, num_hidden_layers=1))
    with pytest.raises(ValueError, match=r"the graph of MambaForCausalLM cannot take sequences of several lengths"):
        capture_model(model, batch_of(2, 12), (), lengths=[lengths_up_to(12, multiple=4)])


def test_widths_hold_the_longest_row():
    of_rows = torch.tensor([[1, 4], [5, 1], [12, 2], [8, 3]])
    lengths = Lengths(of_rows, {"input_ids": 0, "labels": 1}, (12, 6), multiple=5)
    assert [lengths.widths(rows) for rows in ([0], [0, 1], [3], [2, 0])] == [(5, 5), (5, 5), (10, 5), (12, 5)]
    assert lengths.all_widths() == [(5, 5), (10, 5), (12, 5)]
    assert Lengths(of_rows, {}, (12, 6), multiple=1).widths([0]) == (2, 4)  # a width of 1 would be a constant
    batch = lengths.cut({"input_ids": torch.ones(2, 12), "labels": torch.ones(2, 6), "label": torch.ones(2)}, (10, 5))
    assert [tuple(tensor.shape) for tensor in batch.values()] == [(2, 10), (2, 5), (2,)]
    assert lengths.share([[0, 1], [2]]) == (2 * 10 + 17) / (3 * 18)
    assert Lengths(of_rows, {}, (12, 6)).widths([0]) == (12, 6)


def test_rows_of_similar_lengths_make_a_batch():
    lengths = torch.randint(1, 100, (400,), generator=torch.Generator().manual_seed(1))
    order = order_of(lengths, 8, seed=3)
    assert sorted(order) == list(range(400)) and order == order_of(lengths, 8, seed=3) != order_of(lengths, 8, seed=4)

    def spread(rows: list[int]) -> float:
        return lengths[rows].view(-1, 8).float().std(1).mean().item()

    assert spread(order) < 0.2 * spread(list(range(400)))


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        ("question-answering --pad_to_multiple_of 8", "--pad_to_multiple_of 8 is for --task .* not depend on padding"),
        ("image-classification --group_by_length", "--group_by_length is for --task text-to-text"),
        ("causal-lm --pad_to_multiple_of 8", "with --task causal-lm without --no_group_texts all rows are full"),
        ("chat --packing --pad_to_multiple_of 8", "with --packing all rows are full"),
        ("chat --packing --data_cache c", "--data_cache c takes rows one after another, and --packing chooses"),
        ("image-classification --data_cache c", "--data_cache c is for --task text-to-text"),
    ],
)
def test_sentences(argv, sentence):
    least = ["--model_name_or_path", "m", "--train_file", "t.jsonl", "--output_dir", "o", "--task"]
    with pytest.raises(ValueError, match=sentence):
        parse_args([*least, *argv.split()])


def test_padding_before_the_tokens_is_refused(tmp_path):
    argv = ["--no_group_texts", "--pad_to_multiple_of", 4]
    args = tiny.arguments(tmp_path, "causal-lm", *argv)
    config = tmp_path / "causal-lm-0.0" / "tokenizer_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "padding_side": "left"}))
    with pytest.raises(ValueError, match="padding behind the tokens, and the tokenizer puts it before them"):
        read_data(args)
