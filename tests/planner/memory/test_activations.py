"""What a microbatch saves: the papers' formulas, and what megatron.core's layers really save."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.pipeline.placement.cost import required_bandwidth
from megatron.planner import Activations, ActivationSetting, Architecture, Recompute
from megatron.planner.memory.activations import by_stage
from megatron.planner.memory.recompute import RecomputeScope
from tests import workers
from tests.trainer.arguments.command_line import arguments


@given(
    heads=st.integers(1, 16),
    channels=st.sampled_from([16, 64]),
    length=st.sampled_from([128, 512]),
    size=st.integers(1, 4),
    layers=st.integers(1, 6),
    tensor=st.sampled_from([1, 2, 4]),
)
def test_equations_of_appendix_b(heads, channels, length, size, layers, tensor):
    """16-bit GPTs save what BPipe's equations 4 and 5 say, and equation 6 where nothing is split; split along the
    sequence, a part of that."""
    h = heads * channels
    shape = Architecture.gpt3(
        num_layers=layers, hidden_size=h, num_attention_heads=heads, sequence_length=length, vocabulary_size=1000
    )
    elements = layers * length * size * h
    for scope, expected in (
        (RecomputeScope.NONE, elements / tensor * (34 + 5 * heads * length / h)),
        (RecomputeScope.ATTENTION, elements / tensor * 34),
        (RecomputeScope.LAYER, 2 * elements / tensor),
    ):
        assert saved(shape, layers, scope, tensor=tensor, micro_batch_size=size) == pytest.approx(expected)
    whole = saved(shape, layers, RecomputeScope.LAYER, tensor=tensor, micro_batch_size=size, sequence_parallel=False)
    assert whole == pytest.approx(2 * elements)


def saved(shape: Architecture, num_layers: int, scope: RecomputeScope, **setting) -> float:
    """The bytes that a stage in the middle saves, with sequences split unless `setting` says otherwise."""
    chosen = ActivationSetting(**{"sequence_parallel": True, "recompute": Recompute.of(scope), **setting})
    return Activations(shape, chosen).saved(num_layers, is_first=False, is_last=False)


GPT3_96B = Architecture.gpt3(
    num_layers=80, hidden_size=9984, num_attention_heads=104, sequence_length=2048, vocabulary_size=51200
)
GPT3_13B = Architecture.gpt3(
    num_layers=40, hidden_size=5120, num_attention_heads=40, sequence_length=2048, vocabulary_size=51200
)


def test_numbers_of_the_paper():
    """Appendix B, "the fastest configuration for GPT-3 96B", t=4, p=8, b=2: equation 5 gives 3.48 GB, and under a
    forward of 143.37 ms (Table 3) equations 8 and 7 24.25 GB/s with the attention recomputed, 100.31 with nothing."""
    needs = []
    for scope in (RecomputeScope.ATTENTION, RecomputeScope.NONE):
        num_bytes = saved(GPT3_96B, 10, scope, tensor=4, micro_batch_size=2)
        needs.append((round(num_bytes / 1e9, 2), round(required_bandwidth(num_bytes, forward_seconds=143.37e-3), 2)))
    assert needs[0] == (3.48, 24.25) and needs[1][1] == 100.31


@pytest.mark.parametrize(("scope", "transfer_ms"), [("none", 22.48), ("attention", 7.63), ("layer", 0.58)])
def test_transfers_of_table_4_are_possible_on_nvlink(scope, transfer_ms):
    """GPT-3 13B, p=8: the bytes over the measured times are below NVLink's 300 GB/s, at least half of it, and above
    what a forward of 36.32 ms needs."""
    num_bytes = saved(GPT3_13B, 5, RecomputeScope(scope), tensor=1, micro_batch_size=1)
    measured = num_bytes / (transfer_ms * 1e-3) / 1e9
    assert 150 < measured < 300
    assert measured > required_bandwidth(num_bytes, forward_seconds=36.32e-3)


def test_what_the_paper_leaves_out_by_hand():
    """In FP32 masks stay at a byte. The first stage has a mask of the embedding, the last the head."""
    shape = Architecture.gpt3(
        num_layers=6, hidden_size=20, num_attention_heads=5, sequence_length=8, vocabulary_size=100
    )
    wide = {"tensor": 5, "micro_batch_size": 7, "element_bytes": 4, "residual_bytes": 4}
    assert saved(shape, 3, RecomputeScope.NONE, **wide) == pytest.approx(3360 / 5 * (66 + 9 * 2))
    activations = Activations(shape, ActivationSetting(tensor=5, micro_batch_size=7, sequence_parallel=True))
    first, middle, last = by_stage(activations.saved, (2, 2, 2))
    assert first - middle == pytest.approx(7 * 8 * 20 / 5) and last - middle == pytest.approx(activations.head)


def test_without_sequence_parallelism():
    """Korthikanti et al., equation 2: s b h (10 + 24/t + 5 a s / (h t)) where only heads and columns are split."""
    shape = Architecture.gpt3(
        num_layers=1, hidden_size=512, num_attention_heads=8, sequence_length=256, vocabulary_size=1000
    )
    activations = Activations(shape, ActivationSetting(tensor=4, micro_batch_size=2))
    expected = 256 * 2 * 512 * (10 + 24 / 4 + 5 * 8 * 256 / (512 * 4))
    assert activations.saved(1, is_first=False, is_last=False) == expected


def test_ranks_that_share_sequences():
    """Each saves its part. A ring holds the keys and values of all steps and their results, or in a backward those of
    two steps with gradients; gathered, they are those of whole sequences, with gradients."""
    shape = Architecture.gpt3(
        num_layers=1, hidden_size=512, num_attention_heads=8, sequence_length=256, vocabulary_size=1000
    )
    common = {"tensor": 2, "micro_batch_size": 1, "sequence_parallel": True, "saves_scores": False}

    def activations(context: int, **changes: object) -> Activations:
        return Activations(shape, ActivationSetting(**common, context=context, **changes))

    middle = {"is_first": False, "is_last": False}
    assert activations(4).saved(3, **middle) == activations(1).saved(3, **middle) / 4
    assert activations(4).boundary == activations(1).boundary / 4
    assert activations(1).workspace(1, **middle) == 0
    tokens, width = 256 / 4, 2 * 512 / 2  # bytes of a token's keys on a tensor rank
    assert activations(4).workspace(1, **middle) == tokens * width * 4 * 3
    assert activations(2).workspace(1, **middle) == 2 * tokens * width * 8
    assert activations(4, gathers_keys=True).workspace(1, **middle) == 4 * tokens * width * 4
    assert activations(4).workspace(0, **middle) == 0


def capture_case(tensor: int, cases: list[str], context: int = 1) -> list[tuple[float, float]]:
    """For each command line (estimated, captured) bytes that the layers of a middle stage save of a microbatch; with
    multi-token prediction the last stage."""
    from megatron.core import parallel_state
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
    from megatron.trainer.models import core_config, gpt
    from megatron.trainer.plan import from_flags

    parallel_state.initialize_model_parallel(tensor, context_parallel_size=context)
    results = []
    try:
        for flags in cases:
            args = arguments(
                f"--tensor-model-parallel-size {tensor} --context-parallel-size {context} --micro-batch-size 2 "
                f"--position-embedding-type none {flags}",
                world_size=tensor * context,
            )
            args = replace(args, padded_vocab_size=256)
            made = core_config.transformer_config(args)
            further = args.mtp_num_layers or 0
            model = gpt.gpt_model(args, made, pre_process=False, post_process=further > 0)
            setting = from_flags.activation_setting(args)
            setting = ActivationSetting(**{**vars(setting), "mask_bytes": setting.element_bytes})
            estimated = Activations(from_flags.architecture(args), setting).saved(
                args.num_layers, is_first=False, is_last=further > 0, further=further
            )
            length = args.seq_length // (tensor if args.sequence_parallel else 1) // context
            hidden = torch.randn(length, 2, args.hidden_size).to(core_config.params_dtype(args)).requires_grad_()
            mask = torch.ones(1, 1, args.seq_length, args.seq_length).triu(1).bool() if context == 1 else None
            tokens = torch.zeros(2, args.seq_length // context, dtype=torch.long)
            model.set_input_tensor(hidden)
            forward = partial(model.decoder, None, mask)
            if further:
                forward = partial(model, tokens, tokens, mask, labels=tokens, loss_mask=torch.ones(tokens.shape))
            results.append((estimated, _captured_bytes(model, forward, num_keys=args.seq_length)))
            MTPLossLoggingHelper.tracker.clear()
    finally:
        parallel_state.destroy_model_parallel()
    return results


def _captured_bytes(model: torch.nn.Module, forward: Callable[[], torch.Tensor], *, num_keys: int) -> int:
    """Bytes of all storages that the graph of a forward of the model saves, each once, without parameters and masks of
    attention: booleans [..., queries, keys] of all samples and heads."""
    from megatron.core.tensor_parallel.random import is_checkpointing

    stays = {tensor.untyped_storage().data_ptr() for tensor in model.parameters()}
    found: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        is_mask = tensor.dtype is torch.bool and tensor.shape[-1] == num_keys and tensor.numel() <= num_keys**2
        if storage.data_ptr() not in stays and not is_mask and not is_checkpointing():
            found[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = forward()
    assert output.requires_grad
    return sum(storage.nbytes() for storage in found.values())  # without what was freed to be recomputed


LATENT = "--multi-latent-attention --kv-lora-rank 28 --qk-head-dim 24 --qk-pos-emb-head-dim 4 --v-head-dim 12"
UP_AGAIN = "--recompute-granularity selective --recompute-modules mla_up_proj"
WIDE_HEADS = "--kv-channels 128"  # beside which the two numbers that a norm keeps of each head are few
CASES = (
    "",
    "--bf16 --attention-softmax-in-fp32",
    "--attention-dropout 0 --hidden-dropout 0",
    "--attention-dropout 0 --hidden-dropout 0 --bf16 --attention-softmax-in-fp32",
    "--recompute-activations",
    "--recompute-granularity full --recompute-method uniform --recompute-num-layers 2",
    "--recompute-granularity full --recompute-method block --recompute-num-layers 3",
    "--group-query-attention --num-query-groups 2",
    "--group-query-attention --num-query-groups 2 --recompute-activations",
    f"--group-query-attention --num-query-groups 2 --qk-layernorm {WIDE_HEADS}",
    f"--group-query-attention --num-query-groups 2 --qk-layernorm --recompute-activations {WIDE_HEADS}",
    f"--group-query-attention --num-query-groups 1 --qk-layernorm --recompute-activations {WIDE_HEADS}",
    "--group-query-attention --num-query-groups 1",
    "--group-query-attention --num-query-groups 1 --recompute-activations",
    "--swiglu --disable-bias-linear",
    "--swiglu --no-bias-swiglu-fusion --disable-bias-linear",
    f"{LATENT} --q-lora-rank 40 --qk-layernorm",
    f"{LATENT} --q-lora-rank 40 --qk-layernorm {UP_AGAIN}",
    f"{LATENT} --recompute-activations --bf16",
    "--softmax-type learnable --window-size 7,0 --window-attn-skip-freq 2",
    "--quick-geglu",
    "--quick-geglu --glu-linear-offset 1 --activation-func-clamp-value 7",
)


@pytest.mark.sample(1)
@pytest.mark.parametrize("tensor", [1, 2])
def test_layers_save_as_much_as_estimated(tensor):
    """Each scope, format and dropout: the estimate is what megatron.core's layers save, to the percent."""
    cases = [f"{flags} {'--sequence-parallel' if tensor > 1 else ''}" for flags in CASES]
    for rank in workers.run(tensor, "tests.planner.memory.test_activations:capture_case", tensor=tensor, cases=cases):
        for flags, (estimated, captured) in zip(cases, rank, strict=True):
            assert captured == pytest.approx(estimated, rel=0.01), flags


@pytest.mark.parametrize("exchange", ["all_gather", pytest.param("a2a", marks=pytest.mark.full)])
def test_ranks_that_share_sequences_save_as_much_as_estimated(exchange):
    """Gathered keys and values are whole, shared heads are parts; exchanged latents' keys are not recomputed."""
    further = ("--mtp-num-layers 2", f"{LATENT} --mtp-num-layers 1", f"{LATENT} {UP_AGAIN} core_attn")
    cases = [f"{flags} --cp-comm-type {exchange}" for flags in (*CASES, *further) if "groups 1" not in flags]
    case = "tests.planner.memory.test_activations:capture_case"
    for rank in workers.run(2, case, tensor=1, cases=cases, context=2):
        for flags, (estimated, captured) in zip(cases, rank, strict=True):
            assert captured == pytest.approx(estimated, rel=0.01), flags
