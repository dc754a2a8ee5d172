"""The part `model` of an entry: sizes, and a name from which others follow."""

import re
from collections.abc import Callable
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from megatron.documents.faults import Boolean, Name, Number, shown
from megatron.planner.memory.architecture import Architecture, Experts

Count = Annotated[int, Number, Field(ge=1, le=10_000_000)]
Positive = Annotated[float, Number, Field(gt=0, allow_inf_nan=False)]

_RMS_GATED = {"num_positions": 0, "tied_embeddings": False, "gated": True, "linear_biases": False, "norm_vectors": 1,
              "hidden_dropout": False, "attention_dropout": False}  # fmt: skip
_PLAIN = {"gated": False, "norm_vectors": 2}  # squared ReLU, LayerNorm
_FAMILIES = {  # what a word in the name says, as megatron.core's flags would
    "llama": _RMS_GATED,
    "mixtral": _RMS_GATED,
    "qwen3": _RMS_GATED | {"qk_norm": True},
    "nemotron-3": _RMS_GATED | _PLAIN,
    "nemotron-4": _RMS_GATED | _PLAIN,
    "bert": {"masked_head": True, "binary_head": True},
}
_HAS_EXPERTS = re.compile(r"\bmoe\b|mixtral|\d+x\d+b", re.IGNORECASE)
_IS_NO_DECODER = re.compile(r"\bt5\b|mamba|hyena|rwkv", re.IGNORECASE)
_VOCABULARY, _VOCABULARY_OF_BERT, _PADDING = 51200, 30522, 128
_LLAMA_3_FFN = {4096: 14336, 8192: 28672, 16384: 53248}  # by hidden size; Dubey et al. 2024, Table 3
_GPT3_SIZES = {  # billions of parameters: layers, hidden size and heads; Narayanan et al. 2021, Tables 1 and 2
    1.7: (24, 2304, 24), 3.6: (30, 3072, 32), 7.5: (36, 4096, 32), 18.4: (40, 6144, 48), 39.1: (48, 8192, 64),
    76.1: (60, 10240, 80), 145.6: (80, 12288, 96), 174.6: (96, 12288, 96), 310.1: (96, 16384, 128),
    529.6: (105, 20480, 128), 1008.0: (128, 25600, 160),
}  # fmt: skip


class ModelRecord(BaseModel):
    """The part `model` of an entry. `params_B` is mostly a remark, and may be any text."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Name = ""
    layers: Count | None = None
    hidden: Count | None = None
    heads: Count | None = None
    kv_heads: Count | None = None
    head_dim: Count | None = None
    ffn: Count | None = None
    seq: Count | None = None
    vocab: Count | None = None
    params_B: Annotated[float | None, BeforeValidator(lambda value: value if type(value) in (int, float) else None)] = (
        None
    )
    tied_embeddings: Boolean | None = None
    num_experts: Count | None = None
    moe_router_topk: Count | None = None
    moe_ffn: Count | None = None
    moe_shared_ffn: Count | None = None
    moe_layer_freq: Count | tuple[Literal[0, 1], ...] | None = None
    moe_capacity_factor: Positive | None = None

    def architecture(self, tensor: int, assume: Callable[[str], None]) -> Architecture:
        """The model, padded for `tensor` ranks.

        Args:
            assume: is called with the words for a value that is filled in.

        Raises:
            ValueError: a size is missing, or the model is not modelled.
        """
        family = next((fields for word, fields in _FAMILIES.items() if word in self.name.lower()), {})
        if _IS_NO_DECODER.search(self.name) or (_HAS_EXPERTS.search(self.name) and self.num_experts is None):
            raise ValueError(
                f"model.name is {shown(self.name)}: encoders and recurrent layers are not modelled, and experts "
                "by their numbers only; give another model, or model.num_experts and model.moe_router_topk"
            )
        sizes = self._sizes(family, assume)
        h, heads, multiple = sizes["hidden"], sizes["heads"], _PADDING * tensor
        if self.head_dim is None and h % heads:
            raise ValueError(f"hidden size {h} does not divide into {heads} heads; correct model.hidden or model.heads")
        if heads % (self.kv_heads or heads):
            raise ValueError(
                f"{heads} heads do not divide into groups for {self.kv_heads} key and value heads; correct "
                "model.kv_heads"
            )
        tied = {} if self.tied_embeddings is None else {"tied_embeddings": self.tied_embeddings}
        return Architecture(
            num_layers=sizes["layers"],
            hidden_size=h,
            ffn_hidden_size=sizes["ffn"],
            num_attention_heads=heads,
            num_query_groups=self.kv_heads or heads,
            kv_channels=self.head_dim or h // heads,
            sequence_length=sizes["seq"],
            vocabulary_size=-(-sizes["vocab"] // multiple) * multiple,
            experts=self._experts(sizes["ffn"], assume),
            **{"num_positions": sizes["seq"]} | family | tied,
        )

    def _sizes(self, family: dict, assume: Callable[[str], None]) -> dict[str, int]:
        sizes = {name: getattr(self, name) for name in ("layers", "hidden", "heads", "seq", "vocab", "ffn")}
        is_bert = "masked_head" in family
        known = {"vocab": _VOCABULARY_OF_BERT if is_bert else _VOCABULARY}
        if re.fullmatch(r"BERT-\d+\??", self.name):  # of PipeDream-2BW, with the layers of BERT-large
            known |= {"hidden": 1024, "heads": 16}
        if "llama 3" in self.name.lower() and self.hidden in _LLAMA_3_FFN:
            known["ffn"] = _LLAMA_3_FFN[self.hidden]
        elif self.moe_ffn is not None and self.moe_layer_freq in (None, 1):  # no layer has another
            known["ffn"] = self.moe_ffn
        if not family and self.params_B in _GPT3_SIZES and self.layers is self.hidden is self.heads is None:
            sizes["layers"], sizes["hidden"], sizes["heads"] = _GPT3_SIZES[self.params_B]
            assume(f"the GPT-3 of {self.params_B:g} billion parameters: {sizes['layers']} layers of {sizes['hidden']}, "
                   f"{sizes['heads']} heads")  # fmt: skip
        for name, size in sizes.items():
            if size is None and name in known:
                sizes[name] = known[name]
                assume(f"{'vocabulary' if name == 'vocab' else name} {known[name]}")
            elif size is None and name == "ffn" and not family.get("gated"):
                sizes[name] = 4 * sizes["hidden"]
            elif size is None:
                raise ValueError(f"model.{name} is not given; give it")
        return sizes

    def _experts(self, ffn: int, assume: Callable[[str], None]) -> Experts | None:
        """The experts of the model, as wide as its MLP unless given; None: the model has none."""
        if self.num_experts is None:
            given = [name for name in self.model_fields_set if name.startswith("moe_")]
            if given:
                raise ValueError(f"model.{min(given)} is given, and model.num_experts is not; give both, or neither")
            return None
        if self.moe_router_topk is None:
            raise ValueError("model.moe_router_topk is not given; give the number of experts that a token goes to")
        if self.moe_ffn is None:
            assume(f"experts with {ffn} columns")
        if self.moe_capacity_factor is None:
            assume("as many tokens for each expert")
        return Experts(
            count=self.num_experts, topk=self.moe_router_topk, ffn_hidden_size=self.moe_ffn or ffn,
            shared_ffn_hidden_size=self.moe_shared_ffn or 0, layers=self.moe_layer_freq or 1,
            capacity_factor=self.moe_capacity_factor,
        )  # fmt: skip
