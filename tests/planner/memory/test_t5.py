"""What is counted of a T5, stage by stage, is what its stages hold and save, wherever its two stacks are cut."""

from dataclasses import replace

import pytest
import torch

from megatron.planner import ActivationSetting
from megatron.planner.memory.encoder_decoder import activations_of
from megatron.planner.memory.parameters import stage_parameters
from megatron.trainer.arguments.flags.config import edge_length
from tests import workers
from tests.trainer.arguments.t5_command_line import t5_arguments

CUTS = ((5,), (1, 1, 1, 1, 1), (3, 2), (2, 3), (4, 1), (1, 3, 1))
"""Layers of the stages, of three layers of the encoder and two of the decoder."""
FLAGS = "--encoder-num-layers 3 --decoder-num-layers 2 --hidden-size 128 --micro-batch-size 2"
RELATIVE = "--position-embedding-type relative --gated-gelu --disable-bias-linear"
FIRST = "--position-embedding-type relative --relu --disable-bias-linear --scaled-tied-head"
SHAPES = (
    "", "--untie-embeddings-and-output-weights --swiglu --disable-bias-linear --kv-channels 24",
    f"{RELATIVE} --normalization RMSNorm --untie-embeddings-and-output-weights --relative-attention-num-buckets 16",
    FIRST,
)  # fmt: skip


def stages(args, cut: tuple[int, ...]):
    """Yields (index, stage) of a T5 cut so."""
    from megatron.pipeline.runtime.stages.megatron.pipeline_position import at_stage, config_of_stage
    from megatron.trainer.models import core_config
    from megatron.trainer.models.t5 import t5_model

    made = core_config.transformer_config(args)
    for index in range(len(cut)):
        with at_stage(index, len(cut), builds=True):
            config = config_of_stage(made, index, cut)
            yield index, t5_model(args, config, pre_process=index == 0, post_process=index == len(cut) - 1)


def count_case(tensor: int) -> list[tuple]:
    """(case, counted, real) parameters of each stage of every cut and shape."""
    from megatron.core import parallel_state
    from megatron.trainer.models.gpt import num_parameters
    from megatron.trainer.plan import from_flags

    parallel_state.initialize_model_parallel(tensor)
    found = []
    try:
        for flags in SHAPES:
            args = t5_arguments(f"{FLAGS} --tensor-model-parallel-size {tensor} {flags}", world_size=tensor)
            args = replace(args, padded_vocab_size=128)
            shape = from_flags.architecture(args)
            for cut in CUTS:
                real = tuple(num_parameters([model]) for _, model in stages(args, cut))
                found.append(((flags, cut), stage_parameters(shape, tensor, cut), real))
    finally:
        parallel_state.destroy_model_parallel()
    return found


@pytest.mark.parametrize("tensor", [1, pytest.param(2, marks=pytest.mark.full)])
def test_parameters(tensor):
    """Cross-attentions, the encoder's norm and the bias of tied logits are counted, on the stage that holds them."""
    for case, counted, real in workers.run(tensor, f"{__name__}:count_case", tensor=tensor)[0]:
        assert counted == real, case


def capture_case(flags: list[str]) -> list[tuple]:
    """(case, estimated, captured) bytes that each stage but the last saves of a microbatch."""
    from megatron.core import parallel_state
    from megatron.trainer.models import core_config
    from megatron.trainer.plan import from_flags

    parallel_state.initialize_model_parallel()
    found = []
    try:
        for each in flags:
            args = replace(t5_arguments(f"{FLAGS} {each}"), padded_vocab_size=128)
            setting = from_flags.activation_setting(args)
            setting = ActivationSetting(**{**vars(setting), "mask_bytes": setting.element_bytes})
            for cut in CUTS[1:]:
                saved, _, _ = activations_of(from_flags.architecture(args), setting).by_stage(cut)
                dtype = core_config.params_dtype(args)
                for index, model in stages(args, cut):
                    if index < len(cut) - 1:  # behind it come the loss's own tensors
                        found.append(((each, cut, index), saved[index], _captured_bytes(args, model.to(dtype), dtype)))
    finally:
        parallel_state.destroy_model_parallel()
    return found


def _captured_bytes(args, model: torch.nn.Module, dtype: torch.dtype) -> int:
    """Bytes of all storages that a forward of the stage saves or holds, each once, without parameters and masks."""
    from megatron.core.tensor_parallel.random import is_checkpointing

    size, lengths = args.micro_batch_size, (args.encoder_seq_length, args.decoder_seq_length)
    padding = [torch.ones(size, length, dtype=torch.int64) for length in lengths]
    stays = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    found: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        is_data = tensor.is_floating_point() and storage.data_ptr() not in stays
        if is_data and not is_checkpointing():
            found[storage.data_ptr()] = storage.nbytes()
        return tensor

    if not model.pre_process:
        given = torch.randn(edge_length(args), size, args.hidden_size, dtype=dtype).requires_grad_()
        model.set_input_tensor(given)
        found[given.untyped_storage().data_ptr()] = given.untyped_storage().nbytes()
    tokens = padding if model.pre_process else (None, None)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        assert model(*tokens, *padding).requires_grad
    return sum(found.values())


@pytest.mark.parametrize(
    "flags",
    [
        ["", "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1", RELATIVE, FIRST],
        pytest.param(
            [
                "--bf16 --attention-softmax-in-fp32",
                "--attention-dropout 0 --hidden-dropout 0",
                "--recompute-activations",
                "--recompute-granularity full --recompute-method block --recompute-num-layers 1",
                "--swiglu --disable-bias-linear",
            ],
            marks=pytest.mark.full,
        ),
    ],
)
def test_stages_save_as_much_as_estimated(flags):
    """Both kinds of layers, what is passed on, and the encoder's output, which all layers of the decoder share."""
    for case, estimated, captured in workers.run(1, f"{__name__}:capture_case", flags=flags)[0]:
        assert captured == pytest.approx(estimated, rel=0.01), case


def test_operations_by_hand():
    """Two layers, one of each kind: the products of each are those of its own tokens; log and planner agree."""
    from megatron.trainer.plan import from_flags
    from megatron.trainer.report.metrics import flops_per_sample

    args = replace(t5_arguments("--encoder-num-layers 1 --decoder-num-layers 1"), padded_vocab_size=128)
    h, s, r, rows = 32, 24, 16, 128
    encoder = s * 12 * h * h + 2 * s * s * h
    own = r * 12 * h * h + 2 * r * r * h
    crossing = r * 2 * h * h + s * 2 * h * h + 2 * r * s * h
    expected = 6 * (encoder + own + crossing + r * h * rows)
    assert flops_per_sample(args) == pytest.approx(expected)
    assert from_flags.architecture(args).operations(1) == pytest.approx(expected)
