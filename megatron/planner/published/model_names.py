"""The part `model` of an entry: sizes, and a name from which others follow."""

from collections.abc import Callable
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from megatron.documents.faults import Boolean, Name, Number
from megatron.planner.memory.architecture import Architecture

Count = Annotated[int, Number, Field(ge=1, le=10_000_000)]

_BERT_LARGE = {"hidden": 1024, "heads": 16}  # Devlin et al. 2018; PipeDream-2BW's BERT-24 and others have such layers
_VOCABULARY, _VOCABULARY_OF_BERT = 51200, 30522
_LLAMA_3_FFN = {4096: 14336, 8192: 28672, 16384: 53248}  # by hidden size; Dubey et al. 2024, Table 3
_PADDING = 128
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
    ffn: Count | None = None
    seq: Count | None = None
    vocab: Count | None = None
    params_B: Annotated[float | None, BeforeValidator(_if_a_number)] = None
    tied_embeddings: Boolean | None = None

    def architecture(self, tensor: int, assume: Callable[[str], None]) -> Architecture:
        """A GPT-3, a BERT or a Llama, by the name. `assume` is told what is filled in. Raises ValueError."""
        name = self.name.lower()
        is_bert, is_llama = "bert" in name, "llama" in name
        found = {field: getattr(self, field) for field in ("layers", "hidden", "heads", "seq", "vocab", "ffn")}
        prefix, _, num_layers = self.name.partition("-")
        known = {"vocab": _VOCABULARY_OF_BERT if is_bert else _VOCABULARY}
        if prefix == "BERT" and num_layers.rstrip("?").isdecimal():
            known |= _BERT_LARGE
        if "llama 3" in name and self.hidden in _LLAMA_3_FFN:
            known["ffn"] = _LLAMA_3_FFN[self.hidden]
        if all(found[field] is None for field in _SIZES) and not (is_bert or is_llama) and self.params_B in _GPT3_SIZES:
            found |= dict(zip(_SIZES, _GPT3_SIZES[self.params_B], strict=True))
            assume("the GPT-3 of {:g} billion parameters: {} layers of {}, {} heads".format(
                self.params_B, *_GPT3_SIZES[self.params_B]))  # fmt: skip
        for field in found:
            if found[field] is None and field in known:
                found[field] = known[field]
                assume(f"{'vocabulary' if field == 'vocab' else field} {known[field]}")
            if found[field] is None and field == "ffn" and not is_llama:
                found[field] = 4 * found["hidden"]
            if found[field] is None:
                raise ValueError(f"model.{field} is not given; give it")
        h, heads, multiple = found["hidden"], found["heads"], _PADDING * tensor
        if h % heads:
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
            kv_channels=h // heads,
            sequence_length=found["seq"],
            vocabulary_size=-(-found["vocab"] // multiple) * multiple,
            num_positions=0 if is_llama else found["seq"],
            tied_embeddings=not is_llama if self.tied_embeddings is None else self.tied_embeddings,
            gated=is_llama,
            linear_biases=not is_llama,
            norm_vectors=1 if is_llama else 2,
            masked_head=is_bert,
            binary_head=is_bert,
            hidden_dropout=not is_llama,
            attention_dropout=not is_llama,
        )
