"""The GPT model, and the base of other models: initial weights that do not depend on the number of stages.

Problem: megatron.core draws all weights of a rank from one stream of random numbers, so a layer's initial weights
depend on the number of layers that were built before it on the same rank. Runs at p=1 and p=4 would start from
different models and could not be compared.

Solution: every layer, the embedding and the output layer draw from random streams of their own, seeded by the run's
seed and the layer's global number. With `--use-cpu-initialization` (always on without CUDA) megatron.core draws the
full matrix and shards it, so the weights do not depend on the tensor parallel size either.
"""

import dataclasses
from collections.abc import Callable, Sequence

import torch

from megatron import backend
from megatron.core import tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_decoder_layer_specs,
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import set_defaults_if_not_set_tensor_model_parallel_attributes
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlockSubmodules,
    MultiTokenPredictionLayer,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import LayerNormImpl, TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, get_transformer_layer_offset
from megatron.core.utils import get_pg_rank
from megatron.pipeline.runtime.relay.host_store import to_host_memory
from megatron.pipeline.runtime.stages.megatron.auxiliary import drop_unread_output_weight
from megatron.pipeline.runtime.stages.megatron.pipeline_position import at_stage, config_of_stage, copy_tied_embeddings
from megatron.pipeline.runtime.stages.megatron.relay_update import RelayChunk
from megatron.trainer.arguments.flags.config import TrainConfig
from megatron.trainer.models.context_parallel import sharing_sequences
from megatron.trainer.models.packed_sequences import taking_packed_sequences
from megatron.trainer.ranks import set_seeds

_STREAM = 1_000_003  # distance of the seeds of neighbouring layers, greater than the offsets of tensor ranks
_AFTER_LAYERS = 2  # streams after those of the layers: for the output layer and for heads


class SeededTransformerLayer(TransformerLayer):
    """A layer whose initial weights depend only on the run's seed and on the layer's global number."""

    seed = 0

    def __init__(self, config: TransformerConfig, submodules: object, layer_number: int = 1, **options) -> None:
        groups = options.get("pg_collection")
        stage = get_pg_rank(groups.pp) if groups is not None else None
        offset = get_transformer_layer_offset(config, options.get("vp_stage"), stage)
        set_seeds(self.seed + _STREAM * (layer_number + offset))
        super().__init__(config, submodules, layer_number, **options)


class ResidualAfterNormLayer(SeededTransformerLayer):
    """A layer whose residuals start at the outputs of its norms, not at their inputs, as in the published BERT."""

    def __init__(self, config: TransformerConfig, submodules: object, layer_number: int = 1, **options) -> None:
        super().__init__(config, submodules, layer_number, **options)
        self.self_attn_bda = _adding_to_output(self.input_layernorm, self.self_attn_bda)
        self.mlp_bda = _adding_to_output(self.pre_mlp_layernorm, self.mlp_bda)


def _adding_to_output(norm: torch.nn.Module, bias_dropout_add: Callable) -> Callable:
    """Make megatron.core's `bias_dropout_add` add to the latest output of `norm` instead of the residual."""
    outputs: list[torch.Tensor] = []
    norm.register_forward_hook(lambda module, inputs, output: outputs.append(output))

    def chosen(training: bool, fused: bool) -> Callable:
        add = bias_dropout_add(training, fused)
        return lambda hidden_and_bias, residual, probability: add(hidden_and_bias, outputs.pop(), probability)

    return chosen


def layer_spec(args: TrainConfig) -> ModuleSpec:
    """The module specification of a transformer layer, with the seeded layer class."""
    kinds = {"qk_layernorm": args.qk_layernorm, "multi_latent_attention": args.multi_latent_attention}
    if args.transformer_impl == "transformer_engine":
        spec = get_gpt_layer_with_transformer_engine_spec(**kinds)
    else:
        spec = get_gpt_layer_local_spec(normalization=args.normalization, **kinds)
    return seeded_spec(args, spec)


def block_spec(args: TrainConfig, config: TransformerConfig) -> ModuleSpec | TransformerBlockSubmodules:
    """The specification of the layers of the stage that `config` describes.

    It is one specification for all layers; if some layers have experts, there is one for each layer.
    """
    if args.num_experts is None:
        return layer_spec(args)
    uses_engine = args.transformer_impl == "transformer_engine"
    block = get_gpt_decoder_block_spec(config, use_transformer_engine=uses_engine, normalization=args.normalization)
    layers = [seeded_spec(args, each) for each in block.layer_specs]
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=LayerNormImpl)


class SeededMultiTokenLayer(MultiTokenPredictionLayer):
    """A multi-token prediction layer whose initial weights depend only on the run's seed and on the layer's number."""

    seed = 0

    def __init__(self, config: TransformerConfig, submodules: object, layer_number: int = 1, **options) -> None:
        set_seeds(self.seed + _STREAM * (config.num_layers + _AFTER_LAYERS + layer_number))
        super().__init__(config, submodules, layer_number, **options)


def further_layers_spec(args: TrainConfig, config: TransformerConfig) -> MultiTokenPredictionBlockSubmodules | None:
    """The specification of the multi-token prediction layers of the stage that `config` describes.

    They have the parts of the model's last layer. None if the stage has no such layer.
    """
    uses_engine, last = args.transformer_impl == "transformer_engine", layer_spec(args)
    if args.num_experts is not None:
        kinds = get_gpt_decoder_layer_specs(config, uses_engine, normalization=args.normalization)
        last = seeded_spec(args, kinds[-1])
    last = dataclasses.replace(last, module=TransformerLayer)  # draws from the stream of its `SeededMultiTokenLayer`
    block = get_gpt_mtp_block_spec(config, last, use_transformer_engine=uses_engine)
    if block is None:
        return None
    seeded = type("MultiTokenPredictionLayer", (SeededMultiTokenLayer,), {"seed": args.seed})
    return MultiTokenPredictionBlockSubmodules([dataclasses.replace(each, module=seeded) for each in block.layer_specs])


def seeded_spec(args: TrainConfig, spec: ModuleSpec, *, before: int = 0) -> ModuleSpec:
    """The specification `spec` of a transformer layer, with the seeded layer class.

    With context parallelism, the attention of a local layer takes shards of sequences; with `--sft`, it keeps
    conversations apart.

    `before`: the number of layers in another stack, whose streams come first.
    """
    if args.context_parallel_size > 1 and args.transformer_impl == "local":
        spec = sharing_sequences(spec)
    elif args.sft and args.transformer_impl == "local":
        spec = taking_packed_sequences(spec)
    kind = ResidualAfterNormLayer if args.residual_from_norm else SeededTransformerLayer
    seeded = type("TransformerLayer", (kind,), {"seed": layer_stream(args, before)})
    return dataclasses.replace(spec, module=seeded)


def layer_stream(args: TrainConfig, number: int) -> int:
    """The seed of the weights of layer `number`: 0 is the embedding, then the layers, output layer and heads."""
    return args.seed + _STREAM * number


def gpt_model(
    args: TrainConfig, config: TransformerConfig, pre_process: bool = True, post_process: bool = True
) -> LanguageModule:
    """Build the GPT's layers for the stage that `config` describes.

    `args.padded_vocab_size` gives the number of rows of the embedding. At the end, `set_seeds(args.seed)` resets the
    random states.
    """
    set_seeds(args.seed)
    tied = not args.untie_embeddings_and_output_weights
    build = _as_gpt_model if args.hybrid_layer_pattern is None else _as_hybrid_model
    model = build(
        args,
        config,
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        fp16_lm_cross_entropy=args.fp16_lm_cross_entropy,
        share_embeddings_and_output_weights=tied,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=args.rotary_percent,
        rotary_base=args.rotary_base,
        seq_len_interpolation_factor=args.rotary_seq_len_interpolation_factor,
    )
    if post_process and not tied:
        draw_output_weight(args, config, model.output_layer.weight)
    drop_unread_output_weight(model)
    if model.mtp_process:  # this copy of the embedding gets the learning rate of the first stage's
        model.embedding.word_embeddings.weight.is_embedding_or_output_parameter = True
    set_seeds(args.seed)
    return model


def _as_gpt_model(args: TrainConfig, config: TransformerConfig, **shape) -> GPTModel:
    return GPTModel(
        config=config,
        transformer_layer_spec=block_spec(args, config),
        mtp_block_spec=further_layers_spec(args, config) if config.mtp_num_layers else None,
        rope_scaling=args.use_rope_scaling,
        rope_scaling_factor=args.rope_scaling_factor,
        **shape,
    )


def _as_hybrid_model(args: TrainConfig, config: TransformerConfig, **shape) -> LanguageModule:
    from megatron.trainer.models import hybrid  # megatron.core has the parts of hybrid models from 0.18 on

    return hybrid.build(layer_spec(args), config=config, seed=layer_stream(args, 0), distance=_STREAM, **shape)


def draw_output_weight(args: TrainConfig, config: TransformerConfig, weight: torch.Tensor) -> None:
    """Initialise an untied output layer again, from its own random stream.

    megatron.core draws its weights after those of the rank's layers, so they would depend on the number of these
    layers.
    """
    set_seeds(layer_stream(args, config.num_layers + 1))
    layer = tensor_parallel.ColumnParallelLinear(
        config.hidden_size, args.padded_vocab_size, config=config, init_method=config.init_method, bias=False
    )
    with torch.no_grad():
        weight.copy_(layer.weight)


def build_chunks(
    provider_of: Callable[[TransformerConfig], Callable[..., torch.nn.Module]],
    config: TransformerConfig,
    *,
    stages: Sequence[int] = (0,),
    layers: Sequence[int] | None = None,
    on_host: bool = False,
) -> list[torch.nn.Module]:
    """Build this rank's model chunks, one for each of its stages, on its device and in its dtype.

    Collective: every rank must call it.

    Args:
        provider_of: a stage's configuration -> Megatron's `provider(pre_process, post_process) -> module`.
        config: configuration of the whole model.
        stages: the stages of this rank in ascending order.
        layers: number of layers of each stage of the pipeline; default: one stage with all layers.
        on_host: weights live on the host, so each chunk is moved there before the next one is built.
    """
    layers = (config.num_layers,) if layers is None else layers
    num_stages, chunks = len(layers), []
    for stage in stages:
        own = config_of_stage(config, stage, layers)
        with at_stage(stage, num_stages, builds=True):
            model = provider_of(own)(stage == 0, stage == num_stages - 1)
            seen = ProcessGroupCollection.use_mpu_process_groups(required_pgs=["pp"])
        for parameter in model.parameters():
            set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
        model.to(backend.device())
        if own.fp16 or own.bf16:
            model = Float16Module(own, model)
            if model.pg_collection is None:  # otherwise it would check whether the rank, not the stage, is the last
                model.pg_collection = seen
        chunks.append(model)
        if on_host:
            to_host_memory(chunks[-1])
    copy_tied_embeddings(chunks)
    return chunks


def wrap_for_training(
    chunks: list[torch.nn.Module], ddp_config: DistributedDataParallelConfig, *, on_host: bool = False,
    draws: bool = True,
) -> list[DistributedDataParallel]:  # fmt: skip
    """Wrap each chunk with megatron.core's gradient buffers, and broadcast its weights to all replicas.

    `on_host`: weights live on the host, and the device has only the gradients that backwards accumulate. `draws`: if
    False, weights are loaded later, so they are not broadcast and the call is not collective.
    """
    if on_host:  # all replicas have drawn the same weights, so no broadcast is needed
        return [RelayChunk(chunk.config, ddp_config, chunk) for chunk in chunks]
    wrapped = [
        DistributedDataParallel(chunk.config, ddp_config, chunk, disable_bucketing=index > 0)
        for index, chunk in enumerate(chunks)
    ]
    for chunk in wrapped if draws else ():
        chunk.broadcast_params()
    return wrapped


def num_parameters(chunks: list[torch.nn.Module]) -> int:
    """The number of elements of this rank's parameters."""
    return sum(parameter.nelement() for chunk in chunks for parameter in chunk.parameters())
