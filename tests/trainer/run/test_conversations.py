"""Runs on conversations that share sequences equal a plain loop that takes each conversation by itself; resumed runs,
refusals, and the command line of a user."""

import functools
import json
import os
import subprocess
import tempfile
from itertools import chain
from pathlib import Path

import pytest
import torch

from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler, MTPLossLoggingHelper
from tests import workers
from tests.pipeline.runtime.stages.megatron.megatron_model import NORMS_OF_ENGINE
from tests.trainer.arguments.bert_command_line import bert_arguments
from tests.trainer.arguments.command_line import GPU, arguments
from tests.trainer.data.small_chats import conversations, write_chats
from tests.trainer.run.run_case import BASE, ROOT, joined_weights, table, train
from tests.trainer.run.test_engine import ENGINE, as_on_a_gpu, of_engine

LENGTH, SIZE, ITERATIONS, END = 256, 4, 6, 0
SFT = (
    f"--sft --sft-tokenizer-prompt-format chatml --tokenizer-type ByteLevelTokenizer --seq-length {LENGTH} "
    f"--max-position-embeddings {LENGTH} --hidden-dropout 0 --attention-dropout 0 --weight-decay 0 --lr 1e-3 "
    "--adam-eps 1e-5 --clip-grad 0.5 --split 8,2,0"
)
ROPE, PER_TOKEN, TWO_BW = "--position-embedding-type rope", "--calculate-per-token-loss", "--pipeline-schedule 2bw"
DEEP, ONE = "--pipeline-model-parallel-size 2", "--pipeline-model-parallel-size 1"
LATENTS = (
    "--multi-latent-attention --kv-lora-rank 16 --q-lora-rank 24 --qk-head-dim 8 --qk-pos-emb-head-dim 4 "
    "--v-head-dim 8 --position-embedding-type rope --disable-bias-linear --normalization RMSNorm"
)
EXACT = "--clip-grad 0 --untie-embeddings-and-output-weights"  # in FP8 a last bit may be another rounding
FP8 = f"{EXACT} --fp8-format hybrid --fp8-amax-history-len 64 --fp8-amax-compute-algo max"
FURTHER = "--mtp-num-layers 1 --mtp-loss-scaling-factor 0.5"
WINDOW = "--window-size 12,0 --window-attn-skip-freq 2"
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
    versions, losses, further_losses, norms = [], [], [], []
    for batch in range(ITERATIONS):
        versions = [*versions, [each.detach().clone() for each in model.parameters()]][-1 - delay :]
        _show(model, versions[0])
        sequences = [documents_in(training[batch * SIZE + place]["tokens"].tolist()) for place in range(SIZE)]
        total = sum(sum(learned[1:]) for learned in (each[1] for sequence in sequences for each in sequence))
        optimizer.zero_grad()
        model.set_is_first_microbatch()  # in FP8, weights are cast for it
        sums = further = 0.0
        for sequence in sequences:
            number = sum(sum(learned[1:]) for _, learned in sequence)
            divisor = 1 if args.calculate_per_token_loss else number * SIZE
            if plain.fp8 is not None:
                sums += _learn_together(model, sequence, divisor)
                continue
            of_further = sum(sum(learned[2:]) for _, learned in sequence)
            for ids, learned in sequence:
                part = sum(learned[2:]) / of_further
                weight = 1 if args.calculate_per_token_loss else part / SIZE
                loss, mean = _learn(model, ids, learned, divisor, weight)
                sums, further = sums + loss, further + mean * part / SIZE
        for parameter in model.parameters() if args.calculate_per_token_loss else ():
            parameter.grad /= total
        losses.append(sums / total)
        further_losses.append(further)
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip_grad or torch.inf).item())
        _show(model, versions[-1])
        optimizer.step()
    numbers = {"lm_loss": losses, "grad_norm": norms} | ({"mtp_1_loss": further_losses} if plain.mtp_num_layers else {})
    return {"numbers": numbers, "weights": whole_weights([model])}


def _learn(
    model: torch.nn.Module, ids: list[int], learned: list[bool], divisor: int, part: float
) -> tuple[float, float]:
    """The backward of the losses of a conversation over `divisor`, and of the mean (or sum) of its further tokens'
    times `part`. Returns the sum of the losses, and that mean."""
    MTPLossAutoScaler.set_loss_scale(torch.tensor(part))
    tokens, mask = torch.tensor([ids]), torch.tensor([learned[1:]]).float()
    found = model(tokens[:, :-1], torch.arange(len(ids) - 1)[None], None, labels=tokens[:, 1:], loss_mask=mask)
    loss = (found * mask).sum()
    (loss / divisor).backward()
    return loss.item(), sum(MTPLossLoggingHelper.tracker.pop("values", torch.zeros(1)).tolist())


def _learn_together(model: torch.nn.Module, sequence: list[tuple[list[int], list[bool]]], divisor: int) -> float:
    """The same of the conversations of a sequence and its padding in one tensor, of which FP8 takes the scale."""
    documents = [(ids[:-1], ids[1:], learned[1:]) for ids, learned in sequence]
    if (padding := LENGTH - sum(len(ids) for ids, _, _ in documents)) > 0:
        documents.append(([END] * padding, [END] * padding, [False] * padding))
    tokens, labels, mask = (torch.tensor([[*chain(*part)]]) for part in zip(*documents, strict=True))
    borders = torch.tensor([0, *(len(ids) for ids, _, _ in documents)], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    longest = max(len(ids) for ids, _, _ in documents)
    packed = PackedSeqParams("thd", borders, borders, max_seqlen_q=longest, max_seqlen_kv=longest)
    loss = (model(tokens, tokens, None, labels=labels, packed_seq_params=packed) * mask).sum()
    (loss / divisor).backward()
    return loss.item()


def _show(model: torch.nn.Module, version: list[torch.Tensor]) -> None:
    for parameter, value in zip(model.parameters(), version, strict=True):
        parameter.data.copy_(value)


def of_engines_layers(**options) -> dict:
    """`one_by_one` with Transformer Engine's layers; weights have the names of local ones."""
    with as_on_a_gpu():
        found = one_by_one(**options)
    for inside, alone in NORMS_OF_ENGINE.items():
        found["weights"] = {name.replace(inside, alone): each for name, each in found["weights"].items()}
    return found


@functools.cache
def oracle(flags: str, delay: int, *, with_engine: bool = False) -> dict:
    case, device, more = (
        ("of_engines_layers", "engine", f"{ENGINE} --no-rope-fusion") if with_engine else ("one_by_one", "cpu", "")
    )
    flags = f"{SFT} {flags} {more} {ONE} {data()}"
    return workers.run(1, f"{__name__}:{case}", flags=flags, delay=delay, device=device)[0]


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
    "engine, 2bw, delayed scaling": (of_engine, 2, f"{ROPE} {FP8}", f"{TWO_BW} {DEEP}"),
    "engine, 2bw, further tokens, windows": (
        of_engine, 2, f"{ROPE} {FURTHER} {WINDOW}", f"{TWO_BW} {DEEP}"
    ),
    "windows, further tokens, per token": (train, 2, f"{ROPE} {FURTHER} {WINDOW} {PER_TOKEN}", DEEP),
    "engine, tensorwise": (of_engine, 2, f"{ROPE} --fp8-format hybrid --fp8-recipe tensorwise {EXACT}", DEEP),
    "moved activations": (train, 4, "", "--pipeline-model-parallel-size 4 --pipeline-schedule bpipe"),
    "weights on the host": (train, 1, f"{ROPE} {PER_TOKEN}", f"{ONE} --pipeline-schedule l2l"),
    "experts": (
        train, 2, f"{ROPE} --num-experts 4 --moe-router-load-balancing-type none --disable-bias-linear", DEEP,
    ),
    "latents": (train, 2, LATENTS, DEEP),
    "engine, latents, 2bw": (of_engine, 2, f"{LATENTS} --rope-type yarn", f"{DEEP} {TWO_BW}"),
    "core attention recomputed": (
        train, 1, ROPE, "--recompute-granularity selective --recompute-modules core_attn",
    ),
}  # fmt: skip


@pytest.mark.full
@table(("of", "ranks", "model", "cut"), RUNS, usual=3)
def test_training_equals_a_loop_over_conversations(of, ranks, model, cut):
    """Losses, norms and weights after every batch, in whatever layers and cuts."""
    results = of(ranks, f"{SFT} {model} {cut} {data()}")
    expected = oracle(model, int(TWO_BW in cut), with_engine="--fp8" in model)
    records = [record for record in results[-1]["records"] if "lm_loss" in record]
    assert len(records) == ITERATIONS
    for name, values in expected["numbers"].items():
        tolerance = 1e-6 if name == "grad_norm" else 2e-7
        assert [record[name] for record in records] == pytest.approx(values, rel=tolerance, abs=0.0), name
    found = joined_weights(results)
    for name, tensor in expected["weights"].items():
        torch.testing.assert_close(found[name], tensor, rtol=0.0, atol=5e-7, msg=lambda text, n=name: n + text)


@pytest.mark.full
def test_a_resumed_run_goes_on_bit_for_bit_in_the_next_epoch(tmp_path):
    """With dropout, evaluations and two versions of the weights; the order of an epoch is its own."""
    flags = f"{SFT} {ROPE} {TWO_BW} {DEEP} --hidden-dropout 0.1 --eval-iters 1 --eval-interval 3 {data()}"
    whole = train(2, flags)
    [note] = [line for line in whole[-1]["lines"] if "conversations for training" in line]
    assert note.startswith("note: 32 conversations for training in 22 sequences of 256 tokens, ")  # of 24 in the run
    assert note.endswith("; of all splits 0 longer ones are cut, and 0 without an answer within --seq-length left out")
    train(2, f"{flags} --save {tmp_path} --exit-interval 3")
    resumed = train(2, f"{flags} --load {tmp_path}")
    for name, first in (("lm_loss", 3), ("grad_norm", 3), ("validation_loss", 1)):
        expected, found = (
            [each[name] for each in result[-1]["records"] if name in each] for result in (whole, resumed)
        )
        assert len(expected) > first and found == expected[first:], name
    for name, tensor in joined_weights(whole).items():
        assert torch.equal(joined_weights(resumed)[name], tensor)


def test_files_with_weights_and_files_of_their_own(tmp_path):
    """Blends and data per split are those of other data; each split packs its own lines."""
    paths = [write_chats(tmp_path / f"{seed}.jsonl", conversations(12, seed=seed)) for seed in (1, 2, 3)]
    blend = f"--train-data-path 0.75 {paths[0]} 0.25 {paths[1]} --valid-data-path {paths[2]}"
    flags = f"{SFT} {blend} --eval-iters 2 --eval-interval 6 --data-cache-path {tmp_path}/cache"
    [result] = train(1, flags.replace("--split 8,2,0", ""))
    assert any("note: 24 conversations for training in " in line for line in result["lines"])
    assert sum("validation_loss" in record for record in result["records"]) == 1


BYTES = "--tokenizer-type ByteLevelTokenizer"
REFUSED = [
    ("--sft --mock-data", BYTES, "--mock-data: there are no synthetic conversations; give --data-path"),
    ("--micro-batch-size 2", BYTES, "--micro-batch-size 2: a sequence of --sft holds all conversations that fit"),
    ("--context-parallel-size 2", BYTES, "--context-parallel-size 2: --sft does not cut conversations into parts"),
    ("--reset-attention-mask", BYTES, "--reset-attention-mask: under --sft conversations of a sequence never see"),
    ("--reset-position-ids", BYTES, "--reset-position-ids: under --sft conversations of a sequence never see"),
    ("--eod-mask-loss", BYTES, "--eod-mask-loss: under --sft the token that ends a conversation is a part of its"),
    ("", "--tokenizer-type NullTokenizer", "--tokenizer-type NullTokenizer does not read conversations; use Hugging"),
]  # fmt: skip


@pytest.mark.parametrize(("flags", "tokenizer", "reason"), REFUSED)
def test_what_is_refused(flags, tokenizer, reason):
    source = "" if "--mock-data" in flags else "--data-path chats.jsonl"
    with pytest.raises(ValueError) as refused:
        arguments(f"--sft {source} {flags} {tokenizer}", without="--mock-data --tokenizer-type", world_size=2)
    assert reason in str(refused.value)


def test_what_belongs_to_conversations_needs_them():
    with pytest.raises(ValueError, match="--tokenizer-type SFTTokenizer is that of --sft; add it, or use Hugging"):
        arguments("--tokenizer-type SFTTokenizer --tokenizer-model folder")
    with pytest.raises(ValueError, match=r"--sft belongs to pretrain_gpt\.py; leave it out"):
        bert_arguments("--sft")


def test_kernels_that_would_not_see_documents_are_off():
    """Apex's softmax reads no mask, and megatron.core does not tell Transformer Engine's packed rope to interleave."""
    flags = f"--sft --data-path chats.jsonl --tokenizer-type SFTTokenizer --tokenizer-model folder {ROPE} --bf16"
    plain, *others = (
        arguments(f"{flags}{more}", without="--mock-data --tokenizer-type", platform=GPU)
        for more in ("", " --rotary-interleaved", " --multi-latent-attention")
    )
    assert plain.transformer_impl == "transformer_engine" and plain.tokenizer_type == "HuggingFaceTokenizer"
    assert not plain.masked_softmax_fusion and plain.apply_rope_fusion
    assert not any(each.apply_rope_fusion for each in others)


@pytest.mark.full
def test_a_users_command_line_trains(tmp_path):
    """The example makes its conversations, and trains on two ranks."""
    subprocess.run(
        ["bash", "examples/conversations.sh"], cwd=ROOT, check=True, timeout=240, capture_output=True,
        env={**os.environ, "OUTPUT": str(tmp_path), "ITERATIONS": "6", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    records = list(map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines()))
    losses = [record["lm_loss"] for record in records if "lm_loss" in record]
    assert len(losses) == 6 and losses[-1] < losses[0]
    assert any("validation_loss" in record for record in records) and (tmp_path / "checkpoints").is_dir()
