"""The parts `model` and `hardware` of an entry: sizes, a name from which others follow, the processor, and the network.

Papers name a processor by a label ("A100-SXM-80GB", "32x V100-16GB (4 servers)"), and a network by its rate ("400 Gb/s
per GPU", "4x200Gb/s HDR IB per node (800 Gb/s)") or by the machine ("Selene (DGX A100, HDR IB)").
"""

import math
import re
from collections.abc import Callable
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from megatron.documents.faults import Boolean, Name, Number, shown
from megatron.planner.job.cluster import Cluster
from megatron.planner.job.devices import DEVICES, device_of, domain_of, edition_of, is_edition
from megatron.planner.memory.architecture import Architecture, Experts

Count = Annotated[int, Number, Field(ge=1, le=10_000_000)]
Positive = Annotated[float, Number, Field(gt=0, allow_inf_nan=False)]

_RMS_GATED = {"num_positions": 0, "tied_embeddings": False, "gated": True, "linear_biases": False, "norm_vectors": 1,
              "hidden_dropout": False, "attention_dropout": False}  # fmt: skip
_PLAIN = {"gated": False, "norm_vectors": 2}  # squared ReLU, LayerNorm
_FAMILIES = {  # word in a model's name -> fields of its architecture, as megatron.core's flags would set them
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
        """The architecture of the model, with a vocabulary padded for `tensor` ranks.

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


_MACHINES = {  # name in papers, without hyphens, in small letters -> GB/s of a node to the network, and GPUs on it
    "selene": (200.0, 8), "dgx a100": (200.0, 8),  # 8 x HDR InfiniBand
    "dgx h100": (400.0, 8), "dgx h200": (400.0, 8), "dgx b200": (400.0, 8),  # 8 x NDR InfiniBand
    "dgx gb200": (3600.0, 72), "dgx 2": (100.0, 16),  # 72 x NDR, 8 x EDR
    "p3.16xlarge": (3.125, 8), "p3dn.24xlarge": (12.5, 8), "p4d.24xlarge": (50.0, 8),  # Ethernet
    "p4de.24xlarge": (50.0, 8), "p5.48xlarge": (400.0, 8), "nd a100 v4": (200.0, 8), "nd h100 v5": (400.0, 8),
}  # fmt: skip
_RATE = re.compile(r"(?:(\d+) ?x ?)?([\d.]+) ?(GB/s|Gb/s)([^(]*)")
_WATTS = {"A100-80": 400, "A100-40": 400, "H100": 700, "H200": 700, "V100-32": 300, "V100-16": 300}
"""The power limits of data sheets (SXM), in watts."""
_HBM2E_STACK = 16, 2039 / 5  # GB, and GB/s: five of them are an A100's of 80 GB


class HardwareRecord(BaseModel):
    """The part `hardware` of an entry."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    gpu: str | None = None
    desc: str | None = None
    mem_GB: Positive | None = None
    peak_tflops: Positive | None = None
    memory_bandwidth: Positive | None = None
    gpus: Count | None = None
    gpus_per_node: Count | None = None
    intranode: str | None = None
    internode: str | None = None
    interconnect: str | None = None
    system: str | None = None
    software: str | None = None

    def cluster(self, num_gpus: int, assume: Callable[[str], None]) -> Cluster:
        """The cluster of `num_gpus` GPUs. `assume` is called with the words for a value that is filled in.

        Raises ValueError for an unknown GPU or network."""
        machine, label = self._machine(), self.gpu or self.desc or ""
        edition = edition_of(" ".join(filter(None, (self.gpu, self.desc))))
        try:
            name, memory, is_guess = device_of(label, self.mem_GB, edition)
        except ValueError as error:
            raise ValueError(f"hardware.gpu {error}") from error
        usual = machine[2] if machine else domain_of(label) or (8 if name == "cpu" else DEVICES[name].gpus_per_node)
        if self.gpus_per_node is None and num_gpus > usual:
            assume(f"nodes of {usual} GPUs")
        per_node = min(self.gpus_per_node or usual, num_gpus)
        if num_gpus % per_node:
            raise ValueError(f"{num_gpus} GPUs do not fill nodes of {per_node}; give another hardware.gpus_per_node")
        if edition and name != "cpu" and not is_edition(name, edition):
            self._refuse_edition(name, label, edition)
        if is_guess:
            assume(f"GPU {name}")
        peak, bandwidth = self._rates_of_label(name, label, assume)
        is_one = num_gpus == per_node
        return Cluster(
            gpu=name, nodes=num_gpus // per_node, gpus_per_node=per_node, memory_gib=memory, peak_teraflops=peak,
            memory_bandwidth=bandwidth,
            bandwidth={
                "within_node": self._within_node(name),
                "between_nodes": None if is_one else self._between_nodes(per_node, machine, assume),
            },
        )  # fmt: skip

    def _machine(self) -> tuple[str, float, int] | None:
        said = (self.system, self.gpu, self.desc, self.internode, self.interconnect)
        text = " | ".join(filter(None, said)).lower().replace("-", " ")
        return next(((name, *machine) for name, machine in _MACHINES.items() if name in text), None)

    def _refuse_edition(self, name: str, label: str, edition: str) -> None:
        """Raise ValueError if a value is missing that differs between the editions of a GPU."""
        fields = ("mem_GB", "peak_tflops", "memory_bandwidth")
        missing = [each for each in fields if getattr(self, each) is None]
        if self.intranode is None or rate_of_node(self.intranode, 1) is None:
            missing.append("a rate in intranode")
        if missing:
            raise ValueError(
                f"hardware.gpu {shown(label)} is the {edition} edition, and the rates that are known are those of "
                f"{name} (SXM); give {', '.join(missing)} of its data sheet in hardware"
            )

    def _rates_of_label(
        self, name: str, label: str, assume: Callable[[str], None]
    ) -> tuple[float | None, float | None]:
        """Peak rate and memory bandwidth, as given or as the label says; None: as in the data sheet.

        Power grows with the cube of the clock, since voltage rises with the clock. For an H100 with a limit of 400 W
        this gives 821 TFLOP/s; the data sheet of the NVL edition, which takes 400 W, has 835.
        """
        peak, bandwidth = self.peak_tflops, self.memory_bandwidth
        watts = re.search(r"(?<![\w.])(\d{2,4}) ?W(?!\w)", label)
        if peak is None and watts is not None and int(watts[1]) < _WATTS.get(name, 0):
            peak = (int(watts[1]) / _WATTS[name]) ** (1 / 3) * DEVICES[name].peak_teraflops
            assume(f"{peak:.0f} TFLOP/s of 16 bits, at the clock that the limit of power leaves")
        size = re.search(r"(\d+) ?GI?B", label, re.IGNORECASE)
        gigabytes = self.mem_GB or (size and float(size[1]))
        if bandwidth is None and name in ("H100", "H200") and "HBM2e" in label and gigabytes:
            bandwidth = _HBM2E_STACK[1] * round(gigabytes / _HBM2E_STACK[0])
            assume(f"{bandwidth:.0f} GB/s of memory, as HBM2e of that size has")
        return peak, bandwidth

    def _within_node(self, name: str) -> float | None:
        """GB/s of a GPU to the others of its node; None: as in the data sheet."""
        rate = rate_of_node(self.intranode or "", 1)
        has_nvlink = name != "cpu" and DEVICES[name].has_nvlink
        if self.intranode and rate is None and has_nvlink != ("nvlink" in self.intranode.lower()):
            known = "NVLink" if has_nvlink else "no NVLink"
            raise ValueError(
                f"hardware.intranode is {shown(self.intranode)}, and what is known of {name} is with {known}; give the "
                "rate of one GPU in one direction, as 32 GB/s"
            )
        return rate

    def _between_nodes(
        self, per_node: int, machine: tuple[str, float, int] | None, assume: Callable[[str], None]
    ) -> float:
        """GB/s of a node, as the entry says, or as known of the machine that it names."""
        rate = next(
            filter(None, (rate_of_node(text or "", per_node) for text in (self.internode, self.interconnect))), None
        )
        if rate is not None:
            return rate
        if machine is None:
            raise ValueError(
                "there are several nodes, and the bandwidth between them is not given (hardware.internode); give it "
                "with its unit, as 100 GB/s, or the machine as hardware.system"
            )
        name, whole, of_node = machine
        network = whole * min(per_node / of_node, 1)
        part = f", {per_node} of whose {of_node} GPUs have" if network < whole else " has"
        assume(f"{network:g} GB/s between nodes, as {name}{part}")
        return network


def rate_of_node(text: str, gpus_per_node: int) -> float | None:
    """GB/s of a node; None: the text has no unit of a rate. Brackets hold remarks.

    Raises ValueError if no number above 0 stands before the unit.
    """
    rate = text.partition("(")[0]
    if "GB/s" not in rate and "Gb/s" not in rate:
        return None
    found = _RATE.match(rate)
    try:
        value = int(found[1] or 1) * float(found[2]) * (1 if found[3] == "GB/s" else 1 / 8)
    except (TypeError, ValueError):
        value = math.nan
    if not 0 < value < math.inf:
        raise ValueError(
            f"the bandwidth in hardware is {shown(text)}; give a number above 0 and a unit, as 100 GB/s, or 400 Gb/s "
            "per GPU"
        )
    return value * (gpus_per_node if "per GPU" in found[4] else 1)
