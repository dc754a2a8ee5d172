"""What CUDA graphs could save: a microbatch's forward and backward through some layers, captured once and replayed.

A graph's launch takes the place of some hundred launches, so it saves what the host costs where the device waits for
the host, and little where the device is busy. The engine captures nothing today. To do so it would need a graph for
each weight version and each place of an input in memory; what it would gain at the most is measured here, without that.

`eager` is the layers as they are. `plain` leaves out megatron.core's changes of random-number states around dropout,
which no capture allows, and which are of no use without dropout. `graph` replays the plain ones. Layers are
megatron.core's, and torch's own beside them. On a CPU nothing can be captured, and `graph` is a plain call.

Row: cuda_graphs | how much of a microbatch could CUDA graphs save, by size of the layers? |
-m benchmarks.gpu_hour.cuda_graphs | limit 180, expected 60 | a GPU
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from unittest import mock

import torch

from benchmarks.gpu_hour.process import largest_difference, main
from benchmarks.gpu_hour.result import Result, key_of
from megatron import backend

LAYERS = 2
SIZES = {
    "small": {"hidden_size": 512, "heads": 8, "seq_length": 512, "micro_batch_size": 1},
    "middle": {"hidden_size": 1024, "heads": 16, "seq_length": 1024, "micro_batch_size": 2},
    "large": {"hidden_size": 4096, "heads": 32, "seq_length": 1024, "micro_batch_size": 8},
}
TINY = {"small": {"hidden_size": 32, "heads": 2, "seq_length": 16, "micro_batch_size": 2}}
Microbatch = Callable[[], None]


def run(result: Result) -> None:
    from benchmarks.gpu_hour.one_device import may_not_fit

    for size, extent in (TINY if result.content["rehearsal"] else SIZES).items():
        for kind, make in LAYERS_OF.items():
            with may_not_fit(result, f"{size} layers of {kind}"):
                measure(result, size, kind, *make(**extent))


def of_megatron_core(*, hidden_size: int, heads: int, seq_length: int, micro_batch_size: int):
    from benchmarks.common.gpt import gpt_stage

    gpt = gpt_stage(
        num_layers=LAYERS, num_stages=1, hidden_size=hidden_size, heads=heads, vocab_size=64, seq_length=seq_length,
        dtype=torch.bfloat16,
    )  # fmt: skip
    layers = gpt.decoder.to(backend.device(), torch.bfloat16)
    mask = causal_mask(seq_length)[None, None]
    input = _input(seq_length, micro_batch_size, hidden_size)
    return layers, input, lambda hidden: layers(hidden_states=hidden, attention_mask=mask)


def of_torch(*, hidden_size: int, heads: int, seq_length: int, micro_batch_size: int):
    layers = torch.nn.ModuleList(
        torch.nn.TransformerEncoderLayer(
            hidden_size, heads, 4 * hidden_size, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        for _ in range(LAYERS)
    ).to(backend.device(), torch.bfloat16)
    mask = causal_mask(seq_length)

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        for layer in layers:
            hidden = layer(hidden, src_mask=mask, is_causal=True)
        return hidden

    return layers, _input(micro_batch_size, seq_length, hidden_size), forward


LAYERS_OF = {"megatron.core": of_megatron_core, "torch": of_torch}
"""Name -> function that makes (module, input, forward)."""


def causal_mask(length: int) -> torch.Tensor:
    """True where a position must not look."""
    return torch.ones(length, length, dtype=torch.bool, device=backend.device()).triu(1)


def _input(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device=backend.device(), dtype=torch.bfloat16, requires_grad=True)


def measure(result: Result, size: str, kind: str, module, input: torch.Tensor, forward) -> None:
    from benchmarks.gpu_hour.one_device import alternated, extent, first_sentence, ratios, shown

    leaves = [input, *module.parameters()]
    for each in leaves:  # a graph adds to gradients that have a place
        each.grad = torch.zeros_like(each)
    output_grad = torch.randn_like(input)

    def microbatch() -> None:
        forward(input).backward(output_grad)

    def plain() -> None:
        with without_random_states():
            microbatch()

    try:
        graph = captured(plain)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        result.add(f"{size} layers of {kind} cannot be captured: {first_sentence(error)}")
        return
    difference = largest_difference(gradients_of(plain, leaves), gradients_of(graph, leaves))
    calls = {"eager": microbatch, "plain": plain, "graph": graph}
    seconds = alternated(calls, **extent(result, rounds=7, count=20))
    found = {name: ratios(seconds, name, "graph") for name in ("eager", "plain")}
    note = "" if backend.is_cuda() else " (on this CPU the graph is a plain call)"
    result.add(
        f"{LAYERS} {size} layers of {kind}, forward and backward in ms: {shown(seconds, 3, 1e3)}; over graph: "
        f"{shown(found, 2)}{note}; "
        + (f"gradients {difference:.2g} apart" if difference else "gradients equal in all bits"),
        **{f"{size}_{key_of(kind)}_{name}_seconds": times for name, times in seconds.items()},
        **{f"{size}_{key_of(kind)}_ratio_of_{name}_over_graph": each for name, each in found.items()},
        **{f"{size}_{key_of(kind)}_largest_difference": difference},
    )


def captured(microbatch: Microbatch) -> Microbatch:
    """The microbatch as a CUDA graph, by the steps of torch's documentation; on a CPU the microbatch itself."""
    if not backend.is_cuda():
        return microbatch
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            microbatch()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # NCCL's watch asks its events meanwhile
        microbatch()
    return graph.replay


def without_random_states():
    """A block in which megatron.core's tracker changes no state of random numbers."""
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    return mock.patch.object(CudaRNGStatesTracker, "fork", lambda tracker, name="": nullcontext())


def gradients_of(microbatch: Microbatch, leaves: list[torch.Tensor]) -> list[torch.Tensor]:
    """What one microbatch adds to gradients of zero."""
    for each in leaves:
        each.grad.zero_()
    microbatch()
    return [each.grad.clone() for each in leaves]


if __name__ == "__main__":
    main(__doc__, run)
