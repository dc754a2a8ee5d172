"""The part `model` of an entry: sizes, and a name from which others follow."""

from collections.abc import Callable
from typing import Annotated, Literal

from pydantic import AliasChoices, BaseModel, BeforeValidator, ConfigDict, Field

from megatron.documents.faults import Boolean, Name, Number
from megatron.planner.memory.architecture import Architecture, Experts

Count = Annotated[int, Number, Field(ge=1, le=10_000_000)]

_BERT_LARGE = {"hidden": 1024, "heads": 16}  # Devlin et al. 2018; PipeDream-2BW's BERT-24 and others have such layers
_VOCABULARY, _VOCABULARY_OF_BERT = 51200, 30522
_LLAMA_3_FFN = {4096: 14336, 8192: 28672, 16384: 53248}  # by hidden size; Dubey et al. 2024, Table 3
_PADDING = 128
_RMS_GATED = {"num_positions": 0, "tied_embeddings": False, "gated": True, "linear_biases": False, "norm_vectors": 1,
              "hidden_dropout": False, "attention_dropout": False}  # fmt: skip
_FAMILIES = {  # what a word in the name says, as megatron.core's flags would
    "llama": _RMS_GATED,
    "mixtral": _RMS_GATED,
    "qwen3": _RMS_GATED | {"qk_norm": True},
    "nemotron-3": _RMS_GATED | {"gated": False, "norm_vectors": 2},  # squared ReLU, LayerNorm
    "nemotron-4": _RMS_GATED | {"gated": False, "norm_vectors": 2},
    "bert": {"masked_head": True, "binary_head": True},
}
_OF_EXPERTS = frozenset({"moe_router_topk", "moe_ffn", "moe_shared_ffn", "moe_layer_freq", "moe_capacity_factor"})
_SIZES = ("layers", "hidden", "heads")
_GPT3_SIZES = {  # billions of parameters: layers, hidden size and heads; Narayanan et al. 2021, Tables 1 and 2
    1.7: (24, 2304, 24), 3.6: (30, 3072, 32), 7.5: (36, 4096, 32), 18.4: (40, 6144, 48), 39.1: (48, 8192, 64),
    76.1: (60, 10240, 80), 145.6: (80, 12288, 96), 174.6: (96, 12288, 96), 310.1: (96, 16384, 128),
    529.6: (105, 20480, 128), 1008.0: (128, 25600, 160),
}  # fmt: skip


def _if_a_number(value: object) -> object:
    """It is mostly a remark, and may be any text."""
    return float(value) if type(value) in (int, float) else None


class ModelRecord(BaseModel):
    """The part `model` of an entry."""

    model_config = ConfigDict(frozen=True)

    name: Name = ""
    layers: Count | None = None
    hidden: Count | None = None
    heads: Count | None = None
    kv_heads: Count | None = None
    head_dim: Count | None = Field(default=None, validation_alias=AliasChoices("head_dim", "kv_channels"))
    ffn: Count | None = None
    seq: Count | None = None
    vocab: Count | None = None
    params_B: Annotated[float | None, BeforeValidator(_if_a_number)] = None
    tied_embeddings: Boolean | None = None
    num_experts: Count | None = Field(default=None, validation_alias=AliasChoices("num_experts", "num_moe_experts"))
    moe_router_topk: Count | None = None
    moe_ffn: Count | None = Field(default=None, validation_alias=AliasChoices("moe_ffn", "moe_ffn_hidden_size"))
    moe_shared_ffn: Count | None = Field(
        default=None, validation_alias=AliasChoices("moe_shared_ffn", "moe_shared_expert_intermediate_size")
    )
    moe_layer_freq: Count | tuple[Literal[0, 1], ...] = 1
    moe_capacity_factor: Annotated[float, Number, Field(gt=0, allow_inf_nan=False)] | None = Field(
        default=None, validation_alias=AliasChoices("moe_capacity_factor", "moe_expert_capacity_factor")
    )

    def architecture(self, tensor: int, assume: Callable[[str], None]) -> Architecture:
        """A GPT-3, or what the name says. `assume` is told what is filled in. Raises ValueError."""
        name = self.name.lower()
        family = next((word for word in _FAMILIES if word in name), None)
        is_bert, says_ffn = family == "bert", _FAMILIES.get(family, {}).get("gated", False)
        found = {field: getattr(self, field) for field in ("layers", "hidden", "heads", "seq", "vocab", "ffn")}
        prefix, _, num_layers = self.name.partition("-")
        known = {"vocab": _VOCABULARY_OF_BERT if is_bert else _VOCABULARY}
        if prefix == "BERT" and num_layers.rstrip("?").isdecimal():
            known |= _BERT_LARGE
        if "llama 3" in name and self.hidden in _LLAMA_3_FFN:
            known["ffn"] = _LLAMA_3_FFN[self.hidden]
        if all(found[field] is None for field in _SIZES) and family is None and self.params_B in _GPT3_SIZES:
            found |= dict(zip(_SIZES, _GPT3_SIZES[self.params_B], strict=True))
            assume("the GPT-3 of {:g} billion parameters: {} layers of {}, {} heads".format(
                self.params_B, *_GPT3_SIZES[self.params_B]))  # fmt: skip
        if self.moe_ffn is not None and self.moe_layer_freq == 1:  # no layer has another
            known.setdefault("ffn", self.moe_ffn)
        for field in found:
            if found[field] is None and field in known:
                found[field] = known[field]
                assume(f"{'vocabulary' if field == 'vocab' else field} {known[field]}")
            if found[field] is None and field == "ffn" and not says_ffn:
                found[field] = 4 * found["hidden"]
            if found[field] is None:
                raise ValueError(f"model.{field} is not given; give it")
        h, heads, multiple = found["hidden"], found["heads"], _PADDING * tensor
        if self.head_dim is None and h % heads:
            raise ValueError(f"hidden size {h} does not divide into {heads} heads; correct model.hidden or model.heads")
        if heads % (self.kv_heads or heads):
            raise ValueError(
                f"{heads} heads do not divide into groups for {self.kv_heads} key and value heads; correct "
                "model.kv_heads"
            )
        return Architecture(
            num_layers=found["layers"],
            hidden_size=h,
            ffn_hidden_size=found["ffn"],
            num_attention_heads=heads,
            num_query_groups=self.kv_heads or heads,
            kv_channels=self.head_dim or h // heads,
            sequence_length=found["seq"],
            vocabulary_size=-(-found["vocab"] // multiple) * multiple,
            experts=self._experts(found["ffn"], assume),
            **{"num_positions": found["seq"]} | _FAMILIES.get(family, {}) | self._said,
        )

    @property
    def _said(self) -> dict[str, bool]:
        return {} if self.tied_embeddings is None else {"tied_embeddings": self.tied_embeddings}

    def _experts(self, ffn: int, assume: Callable[[str], None]) -> Experts | None:
        """Of layers with experts, which are as wide as the others unless said. Raises ValueError."""
        if self.num_experts is None:
            given = next(
                (name for name in type(self).model_fields if name in _OF_EXPERTS & self.model_fields_set), None
            )
            if given is not None:
                raise ValueError(f"model.{given} is given, and model.num_experts is not; give both, or neither")
            return None
        if self.moe_router_topk is None:
            raise ValueError("model.moe_router_topk is not given; give the number of experts that a token goes to")
        if self.moe_ffn is None:
            assume(f"experts with {ffn} columns")
        if self.moe_capacity_factor is None:
            assume("as many tokens for each expert")
        return Experts(
            count=self.num_experts, topk=self.moe_router_topk, ffn_hidden_size=self.moe_ffn or ffn,
            shared_ffn_hidden_size=self.moe_shared_ffn or 0, layers=self.moe_layer_freq,
            capacity_factor=self.moe_capacity_factor,
        )  # fmt: skip
