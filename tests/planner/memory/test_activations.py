"""What a microbatch saves: the papers' formulas, and what megatron.core's layers really save."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.placement.bandwidth import ModelShape, RecomputeScope, saved_activation_bytes
from megatron.planner import Activations, ActivationSetting, Architecture, Recompute
from tests import workers
from tests.trainer.arguments.command_line import arguments

ATTENTION = Recompute(modules=frozenset({"core_attn"}))
LAYER = Recompute(method="uniform")


@given(
    heads=st.integers(1, 16),
    channels=st.sampled_from([16, 64]),
    length=st.sampled_from([128, 512]),
    size=st.integers(1, 4),
    layers=st.integers(1, 6),
    tensor=st.sampled_from([1, 2, 4]),
)
def test_equations_of_appendix_b(heads, channels, length, size, layers, tensor):
    """16-bit GPTs save what BPipe's equations 4 and 5 say, and equation 6 where nothing is split."""
    h = heads * channels
    shape = Architecture.gpt3(
        num_layers=layers, hidden_size=h, num_attention_heads=heads, sequence_length=length, vocabulary_size=1000
    )
    written = ModelShape(
        num_layers=layers, num_attention_heads=heads, hidden_size=h, sequence_length=length, micro_batch_size=size,
        pipeline=1, tensor=tensor,
    )  # fmt: skip
    for scope, recompute in ((RecomputeScope.NONE, Recompute()), (RecomputeScope.ATTENTION, ATTENTION)):
        setting = ActivationSetting(
            tensor=tensor, micro_batch_size=size, sequence_parallel=tensor > 1, recompute=recompute
        )
        saved = Activations(shape, setting).saved(layers, is_first=False, is_last=False)
        assert saved == pytest.approx(saved_activation_bytes(written, scope))
    whole = ActivationSetting(tensor=tensor, micro_batch_size=size, recompute=LAYER)
    saved = Activations(shape, whole).saved(layers, is_first=False, is_last=False)
    assert saved == pytest.approx(saved_activation_bytes(written, RecomputeScope.LAYER))


def test_without_sequence_parallelism():
    """Korthikanti et al., equation 2: s b h (10 + 24/t + 5 a s / (h t)) where only heads and columns are split."""
    shape = Architecture.gpt3(
        num_layers=1, hidden_size=512, num_attention_heads=8, sequence_length=256, vocabulary_size=1000
    )
    activations = Activations(shape, ActivationSetting(tensor=4, micro_batch_size=2))
    expected = 256 * 2 * 512 * (10 + 24 / 4 + 5 * 8 * 256 / (512 * 4))
    assert activations.saved(1, is_first=False, is_last=False) == expected


def capture_case(tensor: int, cases: list[str]) -> list[tuple[float, float]]:
    """For each command line (estimated, captured) bytes that the layers of a middle stage save of a microbatch."""
    from megatron.core import parallel_state
    from megatron.trainer.models import core_config, gpt
    from megatron.trainer.plan import from_flags

    parallel_state.initialize_model_parallel(tensor)
    results = []
    try:
        for flags in cases:
            args = arguments(
                f"--tensor-model-parallel-size {tensor} --micro-batch-size 2 --position-embedding-type none {flags}",
                world_size=tensor,
            )
            args.padded_vocab_size = 256
            made = core_config.transformer_config(args)
            decoder = gpt.gpt_model(args, made, pre_process=False, post_process=False).decoder
            setting = from_flags.activation_setting(args)
            setting = ActivationSetting(**{**vars(setting), "mask_bytes": setting.element_bytes})
            estimated = Activations(from_flags.architecture(args), setting).saved(
                args.num_layers, is_first=False, is_last=False
            )
            length = args.seq_length // (tensor if args.sequence_parallel else 1)
            hidden = torch.randn(length, 2, args.hidden_size).to(core_config.params_dtype(args)).requires_grad_()
            mask = torch.ones(1, 1, args.seq_length, args.seq_length).triu(1).bool()
            results.append((estimated, _captured_bytes(decoder, hidden, mask)))
    finally:
        parallel_state.destroy_model_parallel()
    return results


def _captured_bytes(decoder: torch.nn.Module, hidden: torch.Tensor, mask: torch.Tensor) -> int:
    """Bytes of all storages that the graph of a forward saves, each once, without parameters and the mask."""
    from megatron.core.tensor_parallel.random import is_checkpointing

    stays = {tensor.untyped_storage().data_ptr() for tensor in (*decoder.parameters(), mask)}
    found: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in stays and not is_checkpointing():
            found[storage.data_ptr()] = storage.nbytes()
        return tensor

    decoder.set_input_tensor(hidden)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = decoder(None, mask)
    assert output.requires_grad
    return sum(found.values())


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
)


@pytest.mark.parametrize("tensor", [1, 2])
def test_layers_save_as_much_as_estimated(tensor):
    """Each scope, format and dropout: the estimate is what megatron.core's layers save, to the percent."""
    cases = [f"{flags} {'--sequence-parallel' if tensor > 1 else ''}" for flags in CASES]
    for rank in workers.run(tensor, "tests.planner.memory.test_activations:capture_case", tensor=tensor, cases=cases):
        for flags, (estimated, captured) in zip(cases, rank, strict=True):
            assert captured == pytest.approx(estimated, rel=0.01), flags
