"""Runs on conversations that share sequences equal a plain loop that takes each conversation by itself; resumed runs,
refusals, and the command line of a user."""

import functools
import itertools
import json
import tempfile
from pathlib import Path

import pytest
import torch

from tests import workers
from tests.trainer.arguments.command_line import GPU, arguments
from tests.trainer.data.small_chats import conversations, write_chats
from tests.trainer.run.run_case import BASE, joined_weights, table, train
from tests.trainer.run.test_engine import of_engine

LENGTH, SIZE, ITERATIONS, END = 256, 4, 6, 0
SFT = (
    f"--sft --sft-tokenizer-prompt-format chatml --tokenizer-type ByteLevelTokenizer --seq-length {LENGTH} "
    f"--max-position-embeddings {LENGTH} --hidden-dropout 0 --attention-dropout 0 --weight-decay 0 --lr 1e-3 "
    "--adam-eps 1e-5 --clip-grad 0.5 --split 8,2,0"
)
ROPE, PER_TOKEN, TWO_BW = "--position-embedding-type rope", "--calculate-per-token-loss", "--pipeline-schedule 2bw"
DEEP, ONE = "--pipeline-model-parallel-size 2", "--pipeline-model-parallel-size 1"
RECOMPUTED = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"


@functools.cache
def data() -> str:
    return f"--data-path {write_chats(Path(tempfile.mkdtemp()) / 'chats.jsonl', conversations())}"


# --- the oracle: no sequences, no masks, no packages of the trainer but for the model ---------------------------------


def by_hand(messages: list[dict[str, str]]) -> tuple[list[int], list[bool]]:
    """The bytes of a conversation in ChatML, and which of them are learned."""
    ids, learned = [], []
    for message in messages:
        head, text = f"<|im_start|>{message['role']}\n", f"{message['content']}<|im_end|>\n"
        is_answer = message["role"] == "assistant"
        ids += [*head.encode(), *text.encode()]
        learned += [False] * len(head) + [is_answer] * len(text)
    return [*ids, END], [*learned, learned[-1]]


def documents_in(tokens: list[int]) -> list[tuple[list[int], list[bool]]]:
    """The conversations that stand one behind the other in a sequence, whose last token none has."""
    known = {tuple(ids[:-1]): (ids, learned) for ids, learned in map(by_hand, conversations())}
    found, begin = [], 0
    while begin < len(tokens) and tokens[begin] != END:
        length = max(len(each) for each in known if tuple(tokens[begin : begin + len(each)]) == each)
        found.append(known[tuple(tokens[begin : begin + length])])
        begin += length
    return found


def one_by_one(flags: str, delay: int) -> dict:
    """Train on each conversation by itself, on one rank; the losses of a sequence's are weighed by their tokens.

    `delay`: gradients are those of the weights so many steps before.
    """
    from megatron.trainer.arguments import parse_args
    from megatron.trainer.data.conversations import build_conversations
    from megatron.trainer.data.tokenizer import build_tokenizer
    from megatron.trainer.models.core_config import transformer_config
    from megatron.trainer.models.gpt import gpt_model
    from megatron.trainer.run.pretraining import complete
    from megatron.trainer.start_up import initialize
    from tests.trainer.run.run_case import whole_weights

    args, _ = complete(parse_args(f"{BASE} {flags}".split()))
    args = initialize.set_up(args)
    training = build_conversations(args, build_tokenizer(args)).parts[0]
    plain, _ = complete(parse_args(f"{BASE} {flags.replace('--sft ', '')}".split()))
    vars(plain)["padded_vocab_size"] = 512
    model = gpt_model(plain, transformer_config(plain))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-5, weight_decay=0.0, betas=(0.9, 0.999))
    versions, losses, norms = [], [], []
    for batch in range(ITERATIONS):
        versions = [*versions, [each.detach().clone() for each in model.parameters()]][-1 - delay :]
        _show(model, versions[0])
        sequences = [
            documents_in(training[batch * SIZE + place]["tokens"].tolist()) for place in range(SIZE)
        ]
        total = sum(sum(learned[1:]) for learned in (each[1] for sequence in sequences for each in sequence))
        optimizer.zero_grad()
        sums = 0.0
        for sequence in sequences:
            number = sum(sum(learned[1:]) for _, learned in sequence)
            for ids, learned in sequence:
                tokens = torch.tensor([ids])
                found = model(tokens[:, :-1], torch.arange(len(ids) - 1)[None], None, labels=tokens[:, 1:])
                loss = (found[0] * torch.tensor(learned[1:])).sum()
                (loss / (total if args.calculate_per_token_loss else number * SIZE)).backward()
                sums += loss.item()
        losses.append(sums / total)
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        _show(model, versions[-1])
        optimizer.step()
    return {"lm_loss": losses, "grad_norm": norms, "weights": whole_weights([model])}


def _show(model: torch.nn.Module, version: list[torch.Tensor]) -> None:
    for parameter, value in zip(model.parameters(), version, strict=True):
        parameter.data.copy_(value)


@functools.cache
def oracle(flags: str, delay: int) -> dict:
    return workers.run(1, f"{__name__}:one_by_one", flags=f"{SFT} {flags} {ONE} {data()}", delay=delay)[0]


# --- runs -------------------------------------------------------------------------------------------------------------

RUNS = {
    "learned positions": (train, 1, "", ""),
    "2bw, rope, per token, recomputed": (train, 2, f"{ROPE} {PER_TOKEN}", f"{TWO_BW} {DEEP} {RECOMPUTED}"),
    "engine, interleaved, fused rope": (
        of_engine, 2, f"{ROPE} {PER_TOKEN}", f"{DEEP} --num-virtual-stages-per-pipeline-rank 2",
    ),
    "replicas, tensor ranks": (
        train, 4, "", f"{ONE} --use-distributed-optimizer --tensor-model-parallel-size 2 --sequence-parallel",
    ),
    "engine, 2bw, tensor ranks": (
        of_engine, 4, "", f"{TWO_BW} {DEEP} --tensor-model-parallel-size 2 --sequence-parallel",
    ),
    "engine, recomputed": (of_engine, 1, "", RECOMPUTED),
    "replicas, 2bw, per token": (train, 4, f"{ROPE} {PER_TOKEN}", f"{TWO_BW} {DEEP} --use-distributed-optimizer"),
    "engine, replicas, per token": (of_engine, 2, f"{ROPE} {PER_TOKEN}", f"{ONE} --use-distributed-optimizer"),
    "interleaved rope, zb-h1, heads in groups": (
        train, 2, f"{ROPE} --rotary-interleaved --group-query-attention --num-query-groups 2",
        f"{DEEP} --pipeline-schedule zb-h1",
    ),
    "engine, interleaved rope": (of_engine, 1, f"{ROPE} --rotary-interleaved", ""),
    "YaRN, recomputed pipeline": (train, 2, "--position-embedding-type yarn", f"{DEEP} --pipeline-recompute"),
    "core attention recomputed": (
        train, 1, ROPE, "--recompute-granularity selective --recompute-modules core_attn",
    ),
}  # fmt: skip


@table(("of", "ranks", "model", "cut"), RUNS, usual=4)
def test_training_equals_a_loop_over_conversations(of, ranks, model, cut):
    """Losses, norms and weights after every batch, in whatever layers and cuts."""
    results, expected = of(ranks, f"{SFT} {model} {cut} {data()}"), oracle(model, int(TWO_BW in cut))
    records = [record for record in results[-1]["records"] if "lm_loss" in record]
    assert len(records) == ITERATIONS
    for name, tolerance in (("lm_loss", 1e-6), ("grad_norm", 5e-6)):
        assert [record[name] for record in records] == pytest.approx(expected[name], rel=tolerance, abs=0.0), name
    found = joined_weights(results)
    for name, tensor in expected["weights"].items():
        torch.testing.assert_close(found[name], tensor, rtol=0.0, atol=5e-6, msg=lambda text, n=name: n + text)
