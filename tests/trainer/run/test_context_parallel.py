"""Runs whose ranks share sequences, and runs whose loss is a mean over tokens: the same numbers however the job is cut,
checkpoints, refusals."""

import functools

import pytest
import torch

from megatron.trainer.arguments import parse_args, resolve_platform, validate_args
from tests.trainer.arguments.bert_command_line import bert_arguments
from tests.trainer.arguments.command_line import CPU, GPU, arguments, argv
from tests.trainer.data.small_data import write_dataset
from tests.trainer.run.run_case import joined_weights, table, train
from tests.trainer.run.test_attention import LATENT, SINKS

SMOOTH = "--hidden-dropout 0 --attention-dropout 0 --lr 1e-3 --adam-eps 1e-5 --clip-grad 0.5"
TWO_BW = "--pipeline-schedule 2bw"
SHARED, HEADS = "--context-parallel-size 2", "--context-parallel-size 2 --cp-comm-type a2a"
DEEP, ONE = "--pipeline-model-parallel-size 2", "--pipeline-model-parallel-size 1"
ENDS = "--eod-mask-loss --reset-attention-mask --reset-position-ids"
UNTIED = "--untie-embeddings-and-output-weights"
EXPERTS = f"--num-experts 4 --moe-aux-loss-coeff 1e-1 --moe-z-loss-coeff 1e-2 --disable-bias-linear {UNTIED}"
FURTHER = "--mtp-num-layers 2 --mtp-loss-scaling-factor 0.5 --position-embedding-type rope"
DEEPSEEK = f"{LATENT} {EXPERTS} --moe-layer-freq [0]*1+[1]*3 --moe-router-load-balancing-type seq_aux_loss {FURTHER}"
MUON = "--optimizer muon --muon-fp32-matmul-prec high"
PREDICTED = "--2bw-provisional uniform --2bw-provisional-microbatches 1"


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> str:
    """Flags of data in which every ninth token ends a document, so that masks of loss and attention matter."""
    prefix = write_dataset(tmp_path_factory.mktemp("data") / "text", documents=60, vocab=9)
    return f"--data-path {prefix} --split 8,1,1 --vocab-size 8"


def numbers(results: list[dict]) -> dict[str, list[float]]:
    records = [record for record in results[-1]["records"] if "lm_loss" in record or "validation_loss" in record]
    names = {name for record in records for name in record if "loss" in name and "scale" not in name} | {"grad_norm"}
    return {name: [record[name] for record in records if name in record] for name in names}


@functools.cache
def on_one_rank(flags: str) -> list[dict]:
    return train(1, f"{SMOOTH} {flags}")


def check(results: list[dict], expected: list[dict], *, tolerance: float = 1e-7) -> None:
    ours, theirs = numbers(results), numbers(expected)
    assert ours.keys() == theirs.keys() and len(theirs["lm_loss"]) == 6
    for name, values in theirs.items():
        is_of_tokens = name in ("lm_loss", "validation_loss")
        assert ours[name] == pytest.approx(values, rel=tolerance if is_of_tokens else 2e-6, abs=0.0), name
    one, other = joined_weights(expected), joined_weights(results)
    assert other.keys() - one.keys() <= {"output_layer.weight"}  # the last stage's copy of a tied embedding
    for name, tensor in one.items():
        torch.testing.assert_close(other[name], tensor, rtol=0.0, atol=2e-6, msg=lambda text, n=name: n + text)


CUTS = {
    "2bw, evaluations": (
        4, f"{TWO_BW} --position-embedding-type rope --eval-iters 1 --eval-interval 3",
        f"{DEEP} {SHARED} --use-distributed-optimizer",
    ),
    "masks, heads": (2, f"{TWO_BW} {ENDS}", f"{ONE} {HEADS}"),
    "DeepSeek's, masks, per token": (
        4, f"{TWO_BW} {ENDS} --calculate-per-token-loss {DEEPSEEK}", f"{DEEP} {SHARED}"
    ),
    "masks, per token": (4, f"{TWO_BW} {ENDS} --calculate-per-token-loss", f"{DEEP} {SHARED}"),
    "masks, per token, experts": (4, f"{ENDS} --calculate-per-token-loss {EXPERTS}", f"{DEEP} {SHARED}"),
    "masks": (2, f"{ENDS}", f"{ONE} {SHARED}"),
    "experts": (4, f"{TWO_BW} {EXPERTS}", f"{DEEP} {SHARED}"),
    "replicas": (4, TWO_BW, f"{ONE} {SHARED}"),
    "replicas, per token": (4, f"{TWO_BW} {ENDS} --calculate-per-token-loss", f"{ONE} {SHARED}"),
    "l2l": (2, "--pipeline-schedule l2l", f"{ONE} {SHARED}"),
    "l2l, per token": (2, f"--pipeline-schedule l2l {ENDS} --calculate-per-token-loss", f"{ONE} {SHARED}"),
    "Muon": (2, f"{TWO_BW} {MUON}", f"{ONE} {SHARED} --use-distributed-optimizer"),
    "recomputed": (4, f"{TWO_BW} --recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
                   f"{DEEP} {HEADS}"),
    "balanced": (8, "--pipeline-schedule bpipe", f"--pipeline-model-parallel-size 4 {SHARED}"),
    "latents, heads": (4, f"{TWO_BW} {LATENT} --rope-type rope", f"{DEEP} {HEADS}"),
    "GPT-OSS": (4, f"{TWO_BW} {SINKS} {EXPERTS} --eval-iters 1 --eval-interval 3", f"{DEEP} {SHARED}"),
    "GPT-OSS, heads": (2, f"{TWO_BW} {SINKS}", f"{ONE} {HEADS} --use-distributed-optimizer"),
    "further tokens, l2l": (2, f"{UNTIED} {FURTHER} --pipeline-schedule l2l", f"{ONE} {SHARED}"),
    "further tokens, recomputed, tied": (
        4, f"{TWO_BW} {FURTHER} --recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
        f"{DEEP} {HEADS}",
    ),
    "further tokens on a stage of their own": (
        8, f"{TWO_BW} {UNTIED} {FURTHER} {ENDS}",
        f"--pipeline-model-parallel-size 4 --pipeline-model-parallel-layout Et|t*3|mm|L {SHARED}",
    ),
    "further tokens, zbv": (4, f"{UNTIED} {FURTHER}", f"{DEEP} {SHARED} --pipeline-schedule zbv"),
    "predicted": (4, f"{TWO_BW} {PREDICTED}", f"{DEEP} {SHARED} --2bw-provisional-reduce"),
}  # fmt: skip


@table(("ranks", "flags", "cut"), CUTS, usual=1)
def test_numbers_do_not_depend_on_the_cut(data, ranks, flags, cut):
    """Losses, norms, validation losses and weights are those of one rank with whole sequences."""
    check(train(ranks, f"{SMOOTH} {flags} {data} {cut}"), on_one_rank(f"{flags} {data}"))


@pytest.mark.full
@pytest.mark.parametrize(
    "flags", [pytest.param("--use-distributed-optimizer", marks=pytest.mark.full), "--2bw-provisional stage"]
)
def test_dropout_of_a_resumed_run_is_that_of_a_whole_one(tmp_path, flags):
    """Bit for bit, also where each rank predicts weights from its own gradients; masks are not those of one rank."""
    flags = f"{TWO_BW} {flags} {ONE} {SHARED}"
    whole = train(2, flags)
    train(2, f"{flags} --save {tmp_path} --exit-interval 3")
    resumed = train(2, f"{flags} --load {tmp_path}")
    assert numbers(resumed)["lm_loss"] == numbers(whole)["lm_loss"][3:]
    for name, tensor in joined_weights(whole).items():
        assert torch.equal(joined_weights(resumed)[name], tensor)
    assert numbers(whole)["lm_loss"][0] != numbers(train(1, f"{TWO_BW} {ONE}"))["lm_loss"][0]


RESUMED = {
    "shared afterwards": (1, ONE, 4, f"{DEEP} {SHARED} --use-distributed-optimizer"),
    "shared before": (4, f"{DEEP} {SHARED} --use-distributed-optimizer", 2, DEEP),
}


@table(("writers", "flags", "readers", "cut"), RESUMED, usual=1)
def test_a_checkpoint_goes_on_at_other_degrees(tmp_path, writers, flags, readers, cut):
    """Weights and moments, in both versions of 2bw."""
    train(writers, f"{SMOOTH} {TWO_BW} {flags} --save {tmp_path} --exit-interval 3")
    found = numbers(train(readers, f"{SMOOTH} {TWO_BW} --load {tmp_path} {cut}"))
    whole = numbers(on_one_rank(TWO_BW))
    assert found["lm_loss"] == pytest.approx(whole["lm_loss"][3:], rel=1e-7, abs=0.0)


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ("--context-parallel-size 3", "pipeline parallel size 1 x context parallel size 3; start a multiple of 3"),
        (f"{SHARED} --seq-length 30", "--seq-length 30 is not divisible by 4; change one of them"),
        (f"{HEADS} --group-query-attention --num-query-groups 1", "does not divide the 1 heads of keys"),
        (f"{SHARED} --cp-comm-type a2a p2p", "exchange keys and values in one way"),
        (f"{SHARED} --cp-comm-type a2a+p2p", "which is one of p2p, all_gather, a2a; give one"),
        (f"{SHARED} --rank-mapping optimized --rank-topology t.yaml", "what these ranks send; use standard"),
        (f"{SHARED} --position-embedding-type rope --rotary-percent 0.01", "channels leaves none to rotate"),
        (
            f"{SHARED} {LATENT} --yarn-original-max-position-embeddings 6",
            "embeddings 6 positions, too, which are not divisible by 4; change one of them",
        ),
        (f"{SHARED} --freeze-training", "change replicas that have whole sequences; leave them out"),
        (
            "--context-parallel-size 2 --tensor-model-parallel-size 4 --sequence-parallel --seq-length 4",
            "leaves 2 tokens, which --sequence-parallel cannot share out to 4 tensor ranks",
        ),
    ],
)
def test_what_is_refused(flags, reason):
    with pytest.raises(ValueError) as refused:
        arguments(flags, world_size=8)
    assert reason in str(refused.value)


def test_of_what_nothing_is_cut():
    """Ranks share the sequences of a GPT."""
    with pytest.raises(ValueError, match="--context-parallel-size 2: it is for GPTs"):
        bert_arguments("--context-parallel-size 2", world_size=2)


def test_the_ring_is_transformer_engines():
    """By default local layers gather, and the run says so; Transformer Engine's keep Megatron's default."""
    args = parse_args(argv(SHARED))
    validate_args(args, world_size=2)
    (note,) = [each for each in resolve_platform(args, CPU) if "cp_comm_type" in each]
    assert note == "cp_comm_type is all_gather: p2p is Transformer Engine's, and transformer_impl is local"
    assert args.cp_comm_type == ["all_gather"]
    assert arguments(SHARED, world_size=2, platform=GPU).cp_comm_type == ["p2p"]
    for flags, kinds in (
        ("--window-size 3,0", "all_gather or a2a"), ("--softmax-type off-by-one", "a2a"), (f"{HEADS} {LATENT}", "p2p"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"by {kinds}; give that, or --transformer-impl local"):
            arguments(f"{SHARED} {flags}", world_size=2, platform=GPU)
    notes = validate_args(parse_args(argv("--cp-comm-type a2a")), world_size=1)
    assert "--cp-comm-type a2a has no effect: each rank has whole sequences" in notes
