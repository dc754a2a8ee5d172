"""The graphs of `partition_units.py`: models without memory, costs by a roofline, and the units that are not cut."""

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
import transformers
from torch import Tensor, nn

from megatron.capture.blocks import blocks_of
from megatron.capture.estimate import Roofline, estimate
from megatron.capture.export import Captured, capture
from megatron.capture.graph_file import graph_file
from megatron.capture.nodes import modules_of
from megatron.capture.tensors import fake_parameters
from megatron.partition import Graph, parse_graph

GIB = 2**30
GIGABYTES_PER_SECOND = 12.0
"""The bandwidth between devices: PCIe 3, the value that the paper's program uses."""

COMPUTE, MEMORY, LAUNCH = 0.7, 0.8, 5.0
"""Assumptions on each device: the part of its peak arithmetic rate that matrix products reach, the part of its memory
bandwidth that other kernels reach, and the microseconds of a kernel launch."""

RESERVED = 1 * GIB
"""The bytes of each device that are reserved for its context and workspaces."""


@dataclass(frozen=True)
class Device:
    """The figures of a data sheet: bytes, 10^12 operations a second in single precision, 10^9 bytes a second."""

    name: str
    memory: float
    teraflops: float
    gigabytes_per_second: float

    @property
    def roofline(self) -> Roofline:
        return Roofline(self.teraflops * COMPUTE, self.gigabytes_per_second * MEMORY, LAUNCH)


RTX_2080_TI = Device("RTX 2080 Ti", 11 * GIB, 13.45, 616)
V100 = Device("V100", 32 * GIB, 15.7, 900)

UNITS = {
    "operators": (),
    "sublayers": ("T5LayerSelfAttention", "T5LayerCrossAttention", "T5LayerFF", "GPT2Attention", "GPT2MLP"),
    "layers": (
        "T5Block", "GPT2Block", "MT5Block", "WhisperEncoderLayer", "WhisperDecoderLayer", "CLIPEncoderLayer",
        "LlamaDecoderLayer", "SwinLayer", "BertLayer", "XLMRobertaLayer", "DeepseekV3DecoderLayer",
    ),
}  # fmt: skip
"""Kind of units -> the classes of modules that are not cut."""


@dataclass(frozen=True)
class Case:
    """A model on the paper's machine.

    Attributes:
        lengths: name of each tensor of the data -> number of tokens, 0 for one class a sample; or the shape of a
            sample's real numbers; or what makes the tensor for a number of samples.
        weight_bytes_per_parameter: bytes of a parameter with gradient and optimizer state, in single precision: 8 with
            Adafactor, whose factored moments are negligible, 16 with AdamW.
        published: the paper's result, as text.
        memory_needs: whether to find the memory that the methods need.
        microbatches: number of microbatches of a batch, so shared parameters move once in so many.
    """

    build: Callable[[], nn.Module]
    lengths: Mapping[str, int | tuple[int, ...] | Callable[[int], Tensor]]
    microbatch: int
    device: Device
    num_devices: int
    weight_bytes_per_parameter: float
    published: str
    memory_needs: bool = False
    microbatches: int = 1

    def batch(self, samples: int) -> dict[str, Tensor]:
        return {name: _tensor(samples, length) for name, length in self.lengths.items()}


def _tensor(samples: int, length: int | tuple[int, ...] | Callable[[int], Tensor]) -> Tensor:
    if callable(length):
        return length(samples)
    if isinstance(length, tuple):
        return torch.zeros(samples, *length)
    return torch.ones((samples, length) if length else (samples,), dtype=torch.long)


def t5(*, layers: int = 24, heads: int, d_ff: int, **other: int) -> Callable[[], nn.Module]:
    """A function that builds a T5 with the published shapes of 3B and 11B, which differ in heads and d_ff."""
    shape = {"vocab_size": 32128, "d_model": 1024, "d_kv": 128, "num_heads": heads, "d_ff": d_ff} | other
    config = transformers.T5Config(**shape, num_layers=layers, decoder_start_token_id=0, attn_implementation="eager")
    return functools.partial(transformers.T5ForConditionalGeneration, config)


def gpt2_xl() -> nn.Module:
    config = transformers.GPT2Config(n_embd=1600, n_layer=48, n_head=25, attn_implementation="eager")
    return transformers.GPT2LMHeadModel(config)


def bert_large() -> nn.Module:
    """A BERT that finds answers in a text."""
    config = transformers.BertConfig(
        hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096,
        attn_implementation="eager",
    )  # fmt: skip
    return transformers.BertForQuestionAnswering(config)


CASES = {
    "t5-3b": Case(
        t5(heads=32, d_ff=16384), {"input_ids": 64, "labels": 4}, 64, RTX_2080_TI, 8, 8,
        "5.6, WiC: with operators an epoch of mixed is 2.2% faster than with layers (asynchronous), 1.6% (synchronous)",
    ),
    "t5-11b-2-layers": Case(
        t5(layers=1, heads=128, d_ff=65536), {"input_ids": 512, "labels": 4}, 1, RTX_2080_TI, 2, 8,
        "5.6, one encoder and one decoder layer: the objective with operators is 45% better than with layers",
    ),
    "gpt2-xl": Case(
        gpt2_xl, {"input_ids": 1024, "labels": 1024}, 1, RTX_2080_TI, 8, 16,
        "Table 2, WikiText-2: sequential was chosen; operators are not compared with layers",
    ),
    "t5-11b": Case(
        t5(heads=128, d_ff=65536), {"input_ids": 512, "labels": 4}, 1, V100, 4, 8,
        "5.8, BoolQ: mixed trained, as 7 stages; sequential ran out of memory", memory_needs=True,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Estimated:
    """A captured model with estimated costs. `content`: its graph file, whose nodes are operators."""

    captured: Captured
    content: dict

    def graph(self, units: str) -> Graph:
        """The graph in which the modules of a kind of units must stay together. A view, which costs nothing, stays with
        the operator of whose result it is a view."""
        together = [*_views(self.content), *(layers_of(self.captured, UNITS[units]) if UNITS[units] else ())]
        return parse_graph(self.content | {"together": [{"nodes": nodes} for nodes in together]})


def estimated(name: str, case: Case) -> Estimated:
    """Capture a model without memory for it, and price its operators."""
    with fake_parameters():
        model = case.build()
    return priced(name, case, capture(model, case.batch(2)))


def priced(name: str, case: Case, captured: Captured) -> Estimated:
    """Price the operators of a captured model for the case's microbatch and machine."""
    costs = estimate(captured, case.batch(case.microbatch), case.device.roofline)
    content = graph_file(
        captured, costs, name=name, num_devices=case.num_devices, bandwidth_gigabytes_per_second=GIGABYTES_PER_SECOND,
        memory_limit_bytes=case.device.memory - RESERVED, weight_bytes_per_parameter=case.weight_bytes_per_parameter,
        microbatches_per_version=case.microbatches,
    )  # fmt: skip
    return Estimated(captured, content)


def layers_of(captured: Captured, classes: Iterable[str]) -> list[list[int]]:
    """The nodes of each module of the given classes, and of each call of an innermost module outside of them."""
    classes, modules = set(classes), [modules_of(node) for node in captured.nodes]
    holds_others = {path for stack in modules for path, _ in stack[:-1]}
    blocks = enumerate(blocks_of(captured), start=len(captured.inputs))
    found: dict[tuple[str, int], set[int]] = {}
    before, run = "", 0
    for number, node in sorted((number, node) for node, block in blocks for number in block):
        stack = modules[number]
        path = next((path for path, kind in stack if kind in classes), None)
        if path is not None:
            found.setdefault((path, 0), set()).add(node)
        elif stack and stack[-1][0] not in holds_others:
            path = stack[-1][0]
            run += path != before  # a dropout may be called at both ends of a stack
            found.setdefault((path, run), set()).add(node)
        before = path
    return [sorted(nodes) for nodes in found.values() if len(nodes) > 1]


def _views(content: Mapping) -> list[list[int]]:
    inputs = {node["id"] for node in content["nodes"] if node.get("input")}
    producers: dict[int, list[int]] = {}
    for source, target in content["edges"]:
        if source not in inputs:
            producers.setdefault(target, []).append(source)
    free = [node["id"] for node in content["nodes"] if not node["fwd_ms"] + node["bwd_ms"] and node["id"] not in inputs]
    return [[*producers[node], node] for node in free if len(producers.get(node, ())) == 1]
