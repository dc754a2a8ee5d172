"""The part `model` of an entry: sizes, and a name from which others follow."""

from collections.abc import Callable
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from megatron.documents.faults import Boolean, Name, Number
from megatron.planner.memory.architecture import Architecture

Count = Annotated[int, Number, Field(ge=1, le=10_000_000)]

_BERT_LARGE = {"hidden": 1024, "heads": 16}  # Devlin et al. 2018; PipeDream-2BW's BERT-24 and others have such layers
_VOCABULARY, _VOCABULARY_OF_BERT = 51200, 30522
_LLAMA_3_FFN = {4096: 14336, 8192: 28672, 16384: 53248}  # by hidden size; Dubey et al. 2024, Table 3
_PADDING = 128


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
