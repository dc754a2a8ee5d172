"""A tiny GPT for the tests of the megatron.core stage, its data and its weights, the same for every layout; with
`bert` the BERT of bert_model.py, with `t5` the T5 of t5_model.py.

`Case` holds one configuration. Weights depend on the parameter's global name only, data on the sample's number only, so
every (t, p, d) starts alike and sees the same samples.
"""

import gc
import hashlib
import itertools
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from megatron import backend
from megatron.core import parallel_state, tensor_parallel
from megatron.core.activations import quick_gelu
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.moe_utils import get_moe_layer_wise_logging_tracker
from megatron.core.transformer.transformer_config import MLATransformerConfig
from megatron.core.utils import get_batch_on_this_cp_rank
from megatron.pipeline.program.edges import round_robin, stages_of
from megatron.pipeline.runtime.stages.megatron.auxiliary import drop_unread_output_weight
from megatron.pipeline.runtime.stages.megatron.pipeline_position import at_stage, config_of_stage, embedding_ranks
from megatron.pipeline.schedules import PLACEMENTS, PRESETS
from megatron.pipeline.start_up.core_version import installed_core
from megatron.trainer.models.bert import BertModel, bert_layer_specs
from megatron.trainer.models.context_parallel import sharing_sequences
from tests.pipeline.runtime.stages.megatron import bert_model, t5_model

SEQUENCE, VOCABULARY, HEADS = 16, 64, 4


@dataclass(frozen=True)
class Case:
    """One configuration; the model is tiny, the rest is what Megatron's flags say."""

    schedule: str = "flush"
    p: int = 1
    v: int = 1  # chunks of the model on each rank
    t: int = 1
    d: int = 1
    cp: int = 1
    exchange: str = "all_gather"  # --cp-comm-type
    query_groups: int | None = None
    batches: tuple[int, ...] = (4, 4, 4, 4)  # microbatches of the whole job, over all replicas
    drains: tuple[int, ...] = ()  # drain after these batches
    layers: int = 4
    first_layers: int | None = None  # on the first stage; the others share the rest
    hidden: int = 32
    micro_batch_size: int = 2
    tied: bool = False
    swiglu: bool = False
    normalization: str = "LayerNorm"
    position: str = "learned_absolute"
    dropout: float = 0.0
    dtype: str = "float32"
    lr: float = 1.0e-2
    warmup: int = 0  # samples
    clip: float = 0.0
    weight_decay: float = 0.01
    optimizer: str = "adam"
    adam_eps: float = 1.0e-5  # large enough that the noise of gradients that should be zero stays noise
    distributed_optimizer: bool = False
    sequence_parallel: bool = False
    recompute_granularity: str | None = None
    recompute_modules: tuple[str, ...] | None = None
    recompute: bool = False  # R instructions
    single_gradient_buffer: bool = False
    token_form: bool = False  # the loss function returns (sum, num_tokens, numbers)
    masked: bool = False  # so does it, and leaves out tokens, of each microbatch another number
    per_token: bool = False  # --calculate-per-token-loss
    loss_scale: float | None = None
    initial_loss_scale: float = 2.0**10
    hysteresis: int = 1
    overflow_batches: tuple[int, ...] = ()
    extra_warmup: bool = False
    bert: bool = False
    binary_head: bool = True  # of BERT
    t5: bool = False  # half of the layers are the encoder's
    balance: bool = False  # saved activations are captured, and move where there is something to move
    engine: bool = False  # Transformer Engine's layers
    puts_off: bool = False  # these put weight gradients off
    predict: bool = False  # weights
    provisional_microbatches: int | None = None  # per replica, that each stage's prediction reads
    reduce_partial: bool = False
    experts: int = 0  # of each layer, of which two compute a token; not with biases
    e: int = 1  # ranks that share out the experts of a layer, of those with other replicas
    cut_experts: bool = True  # tensor ranks cut each expert; else they share out whole experts
    balancing: str = "aux_loss"  # --moe-router-load-balancing-type
    router: tuple[tuple[str, object], ...] = ()  # further fields of the configuration
    attention: tuple[tuple[str, object], ...] = ()  # fields of latents, windows, sinks, gates and YaRN
    further: int = 0  # layers of multi-token prediction, on the last stage; not with learned positions
    fused: bool = False  # gradient accumulation; needs `fused_accumulation.stand_in`
    packed: bool = False  # samples of several documents, in layers of Transformer Engine; one to a microbatch

    @property
    def edge_length(self) -> int:
        """Tokens of what stages send each other."""
        return t5_model.edge_length(self) if self.t5 else SEQUENCE

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @property
    def num_ranks(self) -> int:
        return self.p * self.t * self.d * self.cp

    @property
    def rank_of_stage(self) -> tuple[int, ...]:
        return tuple(PLACEMENTS[PRESETS[self.schedule].placement](self.p, self.v))

    @property
    def is_placed(self) -> bool:
        """Stages are not where megatron.core itself puts them."""
        return self.rank_of_stage != round_robin(self.p, self.v)

    def stage_of_layer(self, layer: int) -> int:
        """The stage of a layer, counted from 0, where each rank has one stage."""
        first = self.layers // self.p if self.first_layers is None else self.first_layers
        return 0 if layer < first else 1 + (layer - first) // ((self.layers - first) // (self.p - 1))

    def stage_of(self, name: str) -> int:
        """The stage of a parameter by its global name, where each rank has one stage."""
        if self.p == 1 or name.startswith(("embedding", "encoder_relative", "decoder_relative")):
            return 0
        if name.startswith("encoder.final") and self.t5:
            return self.stage_of_layer(self.layers // 2 - 1)
        if ".layers." not in name or name.startswith("mtp"):
            return self.p - 1
        before = self.layers // 2 if self.t5 and name.startswith("decoder") else 0
        return self.stage_of_layer(before + int(name.split(".layers.")[1].split(".")[0]) - 1)


# The model and its data, the same everywhere.


def transformer_config(case: Case) -> TransformerConfig:
    own = dict(case.attention)
    of_yarn = {name: own.pop(name) for name in [*own] if name.startswith("yarn_")}
    if own.pop("quick_geglu", False):
        own["activation_func"] = quick_gelu
    options = dict(
        num_layers=case.layers,
        hidden_size=case.hidden,
        num_attention_heads=HEADS,
        ffn_hidden_size=2 * case.hidden,
        tensor_model_parallel_size=case.t,
        context_parallel_size=case.cp,
        cp_comm_type=case.exchange,
        num_query_groups=case.query_groups,
        pipeline_model_parallel_size=case.p,
        virtual_pipeline_model_parallel_size=case.v if case.v > 1 else None,
        num_layers_in_first_pipeline_stage=case.first_layers if case.p > 1 else None,
        pipeline_dtype=case.torch_dtype,
        params_dtype=case.torch_dtype,
        fp16=case.dtype == "float16",
        bf16=case.dtype == "bfloat16",
        sequence_parallel=case.sequence_parallel,
        hidden_dropout=case.dropout,
        attention_dropout=case.dropout,
        normalization=case.normalization,
        gated_linear_unit=case.swiglu,
        activation_func=torch.nn.functional.silu if case.swiglu else torch.nn.functional.gelu,
        add_bias_linear=not case.swiglu,
        recompute_granularity=case.recompute_granularity,
        recompute_modules=None if case.recompute_modules is None else list(case.recompute_modules),
        recompute_method="uniform" if case.recompute_granularity == "full" else None,
        recompute_num_layers=1 if case.recompute_granularity == "full" else None,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        gradient_accumulation_fusion=case.fused,
        calculate_per_token_loss=case.per_token,
        **(_experts(case) if case.experts else {}),
        **({"mtp_num_layers": case.further, "mtp_loss_scaling_factor": 0.5} if case.further else {}),
    )
    config = (MLATransformerConfig if "kv_lora_rank" in own else TransformerConfig)(**options | own)
    for name, value in of_yarn.items():
        setattr(config, name, value)
    config.delay_wgrad_compute = case.puts_off  # TransformerConfig itself allows it beside an overlap of experts alone
    return config


def _experts(case: Case) -> dict:
    return {
        "num_moe_experts": case.experts,
        "moe_ffn_hidden_size": case.hidden,
        "moe_router_load_balancing_type": case.balancing,
        "moe_aux_loss_coeff": 0.0 if case.balancing in ("none", "sinkhorn") else 0.5,  # large, so that it is missed
        "moe_z_loss_coeff": 0.1,
        "expert_tensor_parallel_size": case.t if case.cut_experts else 1,
        "expert_model_parallel_size": case.e,
        **dict(case.router),
    }


def own_stages(case: Case) -> tuple[int, ...]:
    """The stages of this rank."""
    return stages_of(case.rank_of_stage, parallel_state.get_pipeline_model_parallel_rank())


def gpt_model(case: Case, chunk: int = 0) -> GPTModel | BertModel:
    """A chunk of this rank, with the weights that its global names imply."""
    if case.t5:
        return _with_weights(
            case, t5_model.stage(case, transformer_config(case), own_stages(case)[chunk], case.p * case.v)
        )
    if not case.is_placed:
        return _gpt_model(case, transformer_config(case), vp_stage=chunk if case.v > 1 else None)
    return model_of_stage(case, own_stages(case)[chunk], case.p * case.v)


def model_of_stage(case: Case, stage: int, num_stages: int) -> GPTModel | BertModel:
    """The same of one of so many stages of equally many layers, wherever it lies."""
    with at_stage(stage, num_stages, builds=True):
        layers = [case.layers // num_stages] * num_stages
        return _gpt_model(case, config_of_stage(transformer_config(case), stage, layers))


def _gpt_model(case: Case, config: TransformerConfig, vp_stage: int | None = None) -> GPTModel | BertModel:
    place = {"ignore_virtual": False, "vp_stage": vp_stage}
    options = dict(
        config=config,
        vocab_size=VOCABULARY,
        max_sequence_length=SEQUENCE,
        pre_process=parallel_state.is_pipeline_first_stage(**place),
        post_process=parallel_state.is_pipeline_last_stage(**place),
        vp_stage=vp_stage,
        share_embeddings_and_output_weights=case.tied,
        position_embedding_type=case.position,
    )
    if case.bert:
        heads = {"num_tokentypes": 2 if case.binary_head else 0, "add_binary_head": case.binary_head}
        local = bert_layer_specs.bert_layer_local_spec
        spec = bert_layer_specs.get_bert_layer_with_transformer_engine_spec() if case.engine else local
        model = BertModel(transformer_layer_spec=spec, **heads, **options)
    else:
        experts = {"num_experts": case.experts or None, "moe_grouped_gemm": config.moe_grouped_gemm}
        kinds = {"multi_latent_attention": config.multi_latent_attention, "qk_layernorm": config.qk_layernorm}
        local = get_gpt_layer_local_spec(**experts, **kinds, normalization=case.normalization)
        local = sharing_sequences(local) if case.cp > 1 else local
        spec = get_gpt_layer_with_transformer_engine_spec(**experts, **kinds) if case.engine else local
        further = get_gpt_mtp_block_spec(config, spec, False, vp_stage=vp_stage) if case.further else None
        model = GPTModel(transformer_layer_spec=spec, mtp_block_spec=further, **options)
        drop_unread_output_weight(model)
    return _with_weights(case, model)


def whole_model(case: Case) -> torch.nn.Module:
    """The model in one piece, as megatron.core has it."""
    return _with_weights(case, t5_model.whole(case, transformer_config(case))) if case.t5 else gpt_model(case)


def _with_weights(case: Case, model: torch.nn.Module) -> torch.nn.Module:
    with torch.no_grad():
        for name, param in global_names(model).items():
            param.copy_(shard(case, name, param, full_weight(case, name, param)))
    return model


NORMS_OF_ENGINE = {
    "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
    "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
}
"""What Transformer Engine's layers call norms that they have inside -> what megatron.core's own call them."""


def global_names(model: GPTModel | BertModel) -> dict[str, torch.nn.Parameter]:
    """Global name -> parameter: layers numbered over the pipeline, a tied output weight named as the embedding, and
    norms as in megatron.core's own layers."""
    named = {}
    for name, param in model.named_parameters():
        parts = name.split(".")
        if "layers" in parts and parts[0] != "mtp":
            position = parts.index("layers") + 1
            parts[position] = str(getattr(model, parts[0]).layers[int(parts[position])].layer_number)
        if "local_experts" in parts:
            position = parts.index("local_experts") + 1
            first = parallel_state.get_expert_model_parallel_rank() * model.config.num_moe_experts
            first //= model.config.expert_model_parallel_size
            parts[position] = str(first + int(parts[position]))
        name = ".".join(parts).removeprefix("lm_head.")  # where megatron.core's T5 names its output layer first
        for inside, alone in NORMS_OF_ENGINE.items():
            name = name.replace(inside, alone)
        if name == "output_layer.weight" and model.share_embeddings_and_output_weights:
            name = "embedding.word_embeddings.weight"
        named[name] = param
    return named


def full_weight(case: Case, name: str, param: torch.nn.Parameter) -> torch.Tensor:
    shape = list(param.shape)
    if is_cut(case, name, param):
        shape[param.partition_dim] *= case.t
    seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest(), "little")
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.1
    is_norm_weight = "norm" in name and name.endswith("weight")
    return 1 + noise if is_norm_weight else noise


def is_cut(case: Case, name: str, param: torch.nn.Parameter) -> bool:
    """Whether each tensor rank holds a part of the parameter."""
    is_whole = "local_experts" in name and not case.cut_experts
    return getattr(param, "tensor_model_parallel", False) and case.t > 1 and not is_whole


def shard(case: Case, name: str, param: torch.nn.Parameter, full: torch.Tensor) -> torch.Tensor:
    """The part of a full tensor that this tensor rank holds; for a gated MLP of each of its halves."""
    if not is_cut(case, name, param):
        return full
    rank = parallel_state.get_tensor_model_parallel_rank()
    if case.swiglu and "linear_fc1" in name:
        return torch.cat([half.chunk(case.t)[rank] for half in full.chunk(2)])
    return full.chunk(case.t, dim=param.partition_dim)[rank]


def sample_tokens(case: Case, sample: int) -> torch.Tensor:
    """Tokens of one sample of the run, [sequence + 1]."""
    generator = torch.Generator().manual_seed(1000 + sample)
    return torch.randint(VOCABULARY, (SEQUENCE + 1,), generator=generator)


def samples_before(case: Case, batch: int) -> int:
    return sum(case.batches[:batch]) * case.micro_batch_size


def loss_factor(case: Case, first_sample: int) -> float:
    """A factor that makes the gradients of the batches that are to overflow infinite."""
    for batch in case.overflow_batches:
        if samples_before(case, batch) <= first_sample < samples_before(case, batch + 1):
            return 1.0e30
    return 1.0


def microbatch_data(case: Case, first_sample: int) -> dict:
    if case.bert:
        return bert_model.microbatch_data(case, first_sample)
    if case.t5:
        return t5_model.microbatch_data(case, first_sample) | {"factor": loss_factor(case, first_sample)}
    tokens = torch.stack([sample_tokens(case, first_sample + i) for i in range(case.micro_batch_size)])
    mask = loss_mask(case, first_sample)
    return {"tokens": tokens[:, :-1], "labels": tokens[:, 1:], "mask": mask, "factor": loss_factor(case, first_sample)}


def loss_mask(case: Case, first_sample: int) -> torch.Tensor:
    """1 for a token with a loss, [b, s]: where some have none, from a quarter to all of them do, at random places."""
    shape = case.micro_batch_size, SEQUENCE
    if not case.masked:
        return torch.ones(shape)
    generator = torch.Generator().manual_seed(2000 + first_sample)
    part = 0.25 + 0.75 * torch.rand((), generator=generator)
    return (torch.rand(shape, generator=generator) < part).float()


def training_data(case: Case, replica: int):
    """This replica's microbatches in the order of the run: sample by sample dealt out as Megatron's sampler does."""
    for microbatch in range(sum(case.batches) // case.d):
        yield microbatch_data(case, (microbatch * case.d + replica) * case.micro_batch_size)


def evaluation_data(case: Case, replica: int):
    microbatch = 0
    while True:
        yield microbatch_data(case, 1_000_000 + (microbatch * case.d + replica) * case.micro_batch_size)
        microbatch += 1


def causal_mask() -> torch.Tensor:
    return torch.triu(torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool), diagonal=1)


def documents(number: int) -> PackedSeqParams:
    """Three documents of a sequence, at borders that follow from a number."""
    first = 1 + number % (SEQUENCE - 2)
    borders = [0, first, first + 1 + number // SEQUENCE % (SEQUENCE - 1 - first), SEQUENCE]
    longest = max(end - begin for begin, end in itertools.pairwise(borders))
    places = torch.tensor(borders, dtype=torch.int32, device=backend.device())
    return PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=places, cu_seqlens_kv=places, max_seqlen_q=longest, max_seqlen_kv=longest
    )


def forward_step(case: Case):
    if case.bert:
        return bert_model.forward_step
    if case.t5:
        return t5_model.forward_step

    def step(data_iterator, model):
        # The middle stages read the data too: only its position matters, as in Megatron's own step without broadcast.
        data, device = next(data_iterator), backend.device()
        places = torch.arange(SEQUENCE).expand_as(data["tokens"])
        own = {"tokens": data["tokens"], "labels": data["labels"], "mask": data["mask"], "places": places}
        own = {name: each.contiguous() for name, each in own.items()}
        parts = get_batch_on_this_cp_rank(
            own, cp_group=parallel_state.get_context_parallel_group(), **installed_core().whole_sequences
        )
        tokens, labels, counted, position_ids = (each.to(device) for each in parts.values())
        mask = causal_mask().to(device) if case.cp == 1 else None
        packed = {"packed_seq_params": documents(int(data["tokens"].sum()))} if case.packed else {}
        output = model(tokens, position_ids, None if packed else mask, labels=labels, loss_mask=counted, **packed)

        def loss_function(losses):
            total = (losses.float() * counted).sum() * data["factor"]
            count = counted.sum().int()
            if case.token_form or case.masked:
                return total, count, {"lm loss": torch.stack([total.detach(), count.float()])}
            return total / count, {"lm loss": (total / count).detach()}

        return output, loss_function

    return step


@contextmanager
def parallel(case: Case):
    """megatron.core's groups and seeds for the case."""
    placement = case.rank_of_stage
    parallel_state.initialize_model_parallel(
        case.t,
        case.p,
        case.v if case.v > 1 else None,
        context_parallel_size=case.cp,
        expert_model_parallel_size=case.e,
        expert_tensor_parallel_size=case.t if case.cut_experts else 1,
        get_embedding_ranks=lambda ranks: embedding_ranks(ranks, placement),
    )
    tensor_parallel.model_parallel_cuda_manual_seed(123)
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()
        destroy_groups()
        get_moe_layer_wise_logging_tracker().clear()  # a later run in this process would take them for its own


def destroy_groups() -> None:
    """End all groups but the default one: their threads poll, and hundreds of them slow a worker down."""
    world = torch.distributed.distributed_c10d._world
    for group in [group for group in world.pg_map if group is not torch.distributed.group.WORLD]:
        torch.distributed.destroy_process_group(group)
    gc.collect()
