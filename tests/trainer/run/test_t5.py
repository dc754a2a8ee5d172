"""pretrain_t5.py from flags and a file in Megatron's format to weights: one result however the job is cut, which is
that of a plain loop over megatron.core's whole T5Model."""

import argparse
import functools

import pytest
import torch

from megatron.pipeline.runtime.failure.errors import CheckpointError
from megatron.trainer.checkpoint.arguments import check_same_model
from tests import workers
from tests.trainer.arguments.bert_command_line import data_flags
from tests.trainer.arguments.t5_command_line import SMALL_T5, defaults, t5_arguments
from tests.trainer.run.run_case import joined_weights, numbered_names, train

BASE = (
    f"{SMALL_T5} --num-workers 0 --log-interval 1 --eval-iters 1 --eval-interval 2 --train-iters 4 --lr 1e-2 "
    "--lr-decay-style constant --clip-grad 0 --micro-batch-size 2 --weight-decay 0.01 --make-vocab-size-divisible-by 64"
)
UNTIED = "--untie-embeddings-and-output-weights"
PLAIN = f"{UNTIED} --hidden-dropout 0 --attention-dropout 0"
FOUR_BATCHES, FOUR_MICROBATCHES = 4, 4


def train_t5(num_ranks: int, flags: str = "", **options) -> list[dict]:
    return train(num_ranks, f"{data_flags()} {flags}", program="pretrain_t5", base=BASE, **options)


def plain_loop(flags: str, delay: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The losses of the batches and the final weights of megatron.core's own model, trained in a plain loop on the
    run's own samples from the run's own weights; batch j computes with the weights of the step `delay` before."""
    from dataclasses import replace

    from megatron.core import parallel_state
    from megatron.core.datasets.t5_dataset import T5MaskedWordPieceDataset
    from megatron.core.models.T5.t5_model import T5Model
    from megatron.trainer.data.masked import build_t5_datasets
    from megatron.trainer.data.tokenizer import build_tokenizer, padded_vocab_size
    from megatron.trainer.models import core_config, t5

    args = t5_arguments(f"{BASE.removeprefix(SMALL_T5)} {flags}")
    parallel_state.initialize_model_parallel()
    try:
        tokenizer = build_tokenizer(args)
        args = replace(args, padded_vocab_size=padded_vocab_size(args, tokenizer))
        data, config = build_t5_datasets(args, tokenizer).parts[0], core_config.transformer_config(args)
        start = dict(numbered_names(t5.t5_model(args, config)))
        config.num_layers = args.encoder_num_layers
        model = T5Model(
            config=config, encoder_config=config,
            transformer_encoder_layer_spec=t5.t5_spec.encoder_model_with_local_spec(),
            transformer_decoder_layer_spec=t5.t5_spec.decoder_model_with_local_spec(),
            vocab_size=args.padded_vocab_size, max_sequence_length=args.max_position_embeddings,
        )  # fmt: skip
        named = {name.removeprefix("lm_head."): value for name, value in numbered_names(model)}
        assert named.keys() == start.keys()
        drawn = [start[f"{stack}.layers.1.self_attention.linear_qkv.weight"] for stack in ("encoder", "decoder")]
        assert not torch.equal(*drawn), "layers of both stacks draw from streams of their own"
        masters = {name: start[name].detach().clone() for name in named}
        groups = [
            {"params": [value for value in masters.values() if value.dim() > 1], "weight_decay": args.weight_decay},
            {"params": [value for value in masters.values() if value.dim() == 1], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.999), eps=args.adam_eps)
        versions, losses = [{name: value.clone() for name, value in masters.items()}], []
        for batch in range(FOUR_BATCHES):
            for name, value in named.items():
                value.data.copy_(versions[max(batch - delay, 0)][name])
            gradients, sums = {name: torch.zeros_like(value) for name, value in masters.items()}, []
            for microbatch in range(FOUR_MICROBATCHES):
                first = 2 * (batch * FOUR_MICROBATCHES + microbatch)
                samples = torch.utils.data.default_collate([data[first], data[first + 1]])
                tokens = samples["text_enc"], samples["text_dec"]
                masks = T5MaskedWordPieceDataset.config_attention_mask(*tokens, None, None, use_local=True)
                output = model(*tokens, *masks, lm_labels=samples["labels"].clamp(min=0))
                total, count = (output * samples["loss_mask"]).reshape(-1).sum(), samples["loss_mask"].sum()
                sums.append((total.item(), count.item()))
                (total if args.calculate_per_token_loss else total / count / FOUR_MICROBATCHES).backward()
                for name, value in named.items():
                    gradients[name] += value.grad
                    value.grad = None
            number = sum(count for _, count in sums) if args.calculate_per_token_loss else 1
            for name, value in masters.items():
                value.grad = gradients[name] * (1 / number)
            optimizer.step()
            versions.append({name: value.clone() for name, value in masters.items()})
            losses.append(sum(total for total, _ in sums) / sum(count for _, count in sums))
        return losses, versions[-1]
    finally:
        parallel_state.destroy_model_parallel()


@functools.cache
def expected(schedule: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    name, *flags = schedule.split()
    flags = " ".join((data_flags(), PLAIN, *flags))
    [found] = workers.run(1, f"{__name__}:plain_loop", timeout=100, flags=flags, delay=int(name == "2bw"))
    return found


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "stages, schedule",
    [
        pytest.param(1, "flush", marks=pytest.mark.full),
        pytest.param(2, "flush", marks=pytest.mark.full),
        (4, "flush"),
        pytest.param(1, "2bw", marks=pytest.mark.full),
        pytest.param(2, "2bw", marks=pytest.mark.full),
        (4, "2bw --calculate-per-token-loss"),
        pytest.param(4, "2bw", marks=pytest.mark.full),
    ],
)
def test_a_run_is_a_plain_loop_over_the_whole_model(stages, schedule):
    """Losses and weights of p stages are those of megatron.core's model in one process, bit for bit."""
    losses, weights = expected(schedule)
    found = train_t5(stages, f"{PLAIN} --pipeline-schedule {schedule} --pipeline-model-parallel-size {stages}")
    assert list(found[-1]["losses"].values()) == losses
    joined = joined_weights(found)
    assert joined.keys() == weights.keys()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in joined.items())


PUBLISHED = (
    "--position-embedding-type relative --relative-attention-num-buckets 8 --relative-attention-max-distance 12 "
    "--normalization RMSNorm --disable-bias-linear --attention-scale 1.0"
)
RELATIVE = f"{UNTIED} {PUBLISHED} --gated-gelu"
FIRST = f"{PUBLISHED} --relu --scaled-tied-head"
"""Of the first T5."""


@pytest.mark.parametrize(
    "stages, flags",
    [(4, ""), pytest.param(2, "--pipeline-recompute --pipeline-schedule interleaved "
                              "--num-virtual-stages-per-pipeline-rank 2", marks=pytest.mark.full)],
)  # fmt: skip
@pytest.mark.parametrize(
    "layers", ["--encoder-num-layers 6", pytest.param("--decoder-num-layers 6", marks=pytest.mark.full)]
)
@pytest.mark.full
def test_distances_of_any_cut_are_those_of_one_process(layers, stages, flags):
    """Bit for bit, tables of distances included, which the first stage trains for all: a stage in the middle has two
    layers of one stack."""
    reference = alone(f"{RELATIVE} {layers}")
    found = train_t5(stages, f"{RELATIVE} {layers} --pipeline-model-parallel-size {stages} {flags}")
    assert found[-1]["losses"] == reference[-1]["losses"] and len(found[-1]["losses"]) == 4
    weights, joined = joined_weights(reference), joined_weights(found)
    assert {f"{stack}_relative_pos_emb.relative_attention_bias.weight" for stack in ("encoder", "decoder")} < set(
        joined
    )
    assert all(torch.equal(tensor, weights[name]) for name, tensor in joined.items())


@pytest.mark.parametrize("name", ["gated_gelu", "relu", "scaled_tied_head"])
def test_a_checkpoint_without_a_flag_is_of_a_model_without_it(name):
    """Megatron-LM's T5s have none of them, and weights of the same shapes with a ReLU."""
    saved = t5_arguments()
    there = argparse.Namespace(**{key: value for key, value in vars(saved).items() if key != name})
    with pytest.raises(CheckpointError, match=f"another model: {name} is "):
        check_same_model(t5_arguments(f"--{name.replace('_', '-')}"), there, "DIR")
    check_same_model(saved, there, "DIR")


def test_a_scale_of_the_scores_is_part_of_the_model():
    """Also where one side says none, which is 1 / root of the width of a head."""
    plain, scaled = t5_arguments(), t5_arguments("--attention-scale 1.0")
    for here, there in ((plain, scaled), (scaled, plain)):
        with pytest.raises(CheckpointError, match="another model: attention_scale is"):
            check_same_model(here, argparse.Namespace(**vars(there)), "DIR")
        check_same_model(here, argparse.Namespace(**vars(here)), "DIR")


@functools.cache
def alone(flags: str = "") -> list[dict]:
    return train_t5(1, flags)


@pytest.mark.full
@pytest.mark.parametrize(
    "stages, flags",
    [
        (4, "--pipeline-schedule bpipe"),
        (2, "--pipeline-schedule interleaved --num-virtual-stages-per-pipeline-rank 2"),
        (2, "--pipeline-schedule zb-h1"),
        (2, "--pipeline-schedule l2l"),
        (3, ""),
        (2, "--num-layer-list 3,1 --pipeline-recompute"),
        (2, "--recompute-granularity full --recompute-method block --recompute-num-layers 1"),
        (2, "--recompute-activations"),
    ],
)
def test_the_pipeline_changes_nothing(stages, flags):
    """With dropout and evaluations, losses and weights are those of one process."""
    reference, found = alone(UNTIED), train_t5(stages, f"{UNTIED} --pipeline-model-parallel-size {stages} {flags}")
    assert found[-1]["losses"] == reference[-1]["losses"] and len(found[-1]["losses"]) == 4
    names = ("validation_loss", "test_loss")
    told = [[record[name] for record in each[-1]["records"] for name in names if name in record]
            for each in (found, reference)]  # fmt: skip
    assert told[0] == told[1] and len(told[0]) == 3
    weights = joined_weights(reference)
    assert all(torch.equal(tensor, weights[name]) for name, tensor in joined_weights(found).items())


@pytest.mark.full
@pytest.mark.parametrize("model", ["", FIRST])
@pytest.mark.parametrize("flags", ["--use-distributed-optimizer", "--tensor-model-parallel-size 2 --sequence-parallel"])
def test_a_checkpoint_goes_on_at_another_depth(tmp_path, flags, model):
    """Saved by 4 stages with tied embeddings, loaded by 2 with replicas or tensor ranks: the losses are those of the
    whole run, to rounding, and those of one process."""
    dry = f"{model} --hidden-dropout 0 --attention-dropout 0 --lr 1e-3"
    whole = train_t5(4, f"{dry} --pipeline-model-parallel-size 4 --save {tmp_path} --save-interval 2")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("2")
    resumed = train_t5(4, f"{dry} --pipeline-model-parallel-size 2 {flags} --load {tmp_path}")
    losses = resumed[-1]["losses"]
    assert list(losses) == [3, 4]
    assert list(whole[-1]["losses"].values()) == pytest.approx(list(alone(dry)[-1]["losses"].values()), rel=1e-6)
    assert [losses[each] for each in (3, 4)] == pytest.approx([whole[-1]["losses"][each] for each in (3, 4)], rel=1e-5)


@pytest.mark.full
@pytest.mark.parametrize(
    "flags",
    [
        "--bf16 --pipeline-schedule 2bw",
        "--fp16 --initial-loss-scale 1024 --lr 1e-3",
        "--pipeline-schedule 2bw --2bw-provisional stage",
        "--mock-data --data-path --num-workers 1 --clip-grad 1.0",
    ],
)
def test_feature_trains_on_two_stages(flags):
    """Every loss is finite, and the last lies below the first."""
    mock = "--mock-data" in flags
    run = (
        functools.partial(train, program="pretrain_t5", base=BASE.replace("--data-path none", "")) if mock else train_t5
    )
    given = f"{flags.replace('--data-path ', '')} {vocabulary()}" if mock else flags
    losses = run(2, f"--pipeline-model-parallel-size 2 {given}")[-1]["losses"]
    assert len(losses) == 4 and losses[4] < losses[1] < float("inf")


def vocabulary() -> str:
    words = data_flags().split()
    return f"--vocab-file {words[words.index('--vocab-file') + 1]}"


@pytest.mark.parametrize(
    "flags, message",
    [
        ("--num-layers 4", "--num-layers 4: a T5 has an encoder and a decoder; give --encoder-num-layers and"),
        ("--seq-length 24", "--seq-length 24: a T5 has an encoder and a decoder; give --encoder-seq-length and"),
        ("--vocab-extra-ids 1", "--vocab-extra-ids 1 are fewer than the 3 spans"),
        ("--decoder-seq-length 32", "--decoder-seq-length 32 is beyond --max-position-embeddings 24"),
        ("--encoder-seq-length 2", "--encoder-seq-length 2 has no room"),
        ("--qk-layernorm", "--qk-layernorm: megatron.core's T5"),
        ("--group-query-attention", "--group-query-attention: megatron.core's cross-attention"),
        ("--optimizer muon", "--optimizer muon does not know"),
        ("--rank-mapping optimized --rank-topology nodes.yaml", "--rank-mapping optimized weighs"),
        ("--dry-run 1 --pipeline-schedule l2l", "--dry-run 1 has no price of a T5 whose weights live on the host"),
        ("--recompute-granularity full --recompute-method uniform --recompute-num-layers 2", "give 1, or use block"),
        ("--freeze-training", "--freeze-training: the layers of a decoder"),
        ("--tokenizer-type ByteLevelTokenizer", "--tokenizer-type ByteLevelTokenizer lacks tokens"),
        (
            "--tokenizer-type HuggingFaceTokenizer --tokenizer-model x",
            "--vocab-extra-ids 10: the tokenizer of a T5 has",
        ),
        ("--position-embedding-type relative --relative-attention-max-distance 16", "give more than 16"),
        ("--position-embedding-type relative --transformer-impl transformer_engine", "use --transformer-impl local"),
        ("--gated-gelu --swiglu", "--swiglu and --gated-gelu exclude each other"),
        (
            f"--scaled-tied-head {UNTIED}",
            "--scaled-tied-head and --untie-embeddings-and-output-weights exclude each other",
        ),
        ("--num-experts 4", "--num-experts belongs to pretrain_gpt.py"),
        ("--bert-no-binary-head", "--bert-no-binary-head belongs to pretrain_bert.py"),
        (
            "--encoder-num-layers 2 --num-virtual-stages-per-pipeline-rank 3",
            "sum of --encoder-num-layers 2 and --decoder-num-layers 2 is less",
        ),
    ],
)
def test_what_a_t5_does_not_have_is_refused(flags, message):
    """By name, with the reason and the remedy."""
    ranks = 2 if "encoder-num-layers" in flags else 1
    with pytest.raises(ValueError) as caught:
        t5_arguments(f"--pipeline-model-parallel-size {ranks} {flags}", world_size=ranks)
    assert message in str(caught.value)


def test_the_two_stacks_belong_to_this_program():
    """A GPT has one number of layers and one length; the decoder has as many layers as the encoder."""
    from tests.trainer.arguments.command_line import arguments

    for flag in ("--encoder-num-layers", "--position-embedding-type relative"):
        with pytest.raises(ValueError, match=rf"{flag} belongs to pretrain_t5\.py"):
            arguments(f"{flag} 2" if flag.endswith("layers") else flag)
    args = t5_arguments(SMALL_T5.replace("--decoder-num-layers 2", ""))
    assert (args.num_layers, args.decoder_num_layers, args.seq_length) == (4, 2, 24)
    assert "tokenizer_type" in defaults() and args.architecture == "t5"
