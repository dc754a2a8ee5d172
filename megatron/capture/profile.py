"""The measured cost of each block of a captured model: milliseconds, and the bytes that it saves and sends.

Blocks run one after another on the data of a batch, each on the results of the blocks before it. Parameters without
memory get memory only while their block is measured, so a model that fits on no device can be profiled. A block with
the same operators as an earlier block on tensors of the same shapes, as in later layers, is not measured again: the
earlier block's costs and results are used in its place (times do not depend on values).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from megatron.capture.blocks import blocks_of, free_nodes
from megatron.capture.export import Captured, word
from megatron.capture.nodes import attribute, differentiable, on_device, without_model
from megatron.capture.randomness import DRAW, Draw
from megatron.capture.tensors import is_fake

_REPEATS = 3


@dataclass(frozen=True, slots=True)
class BlockCost:
    """The cost of a block for one microbatch.

    Attributes:
        forward_ms: milliseconds of a forward without gradients, as before a recompute.
        recorded_forward_ms: milliseconds of a forward that saves tensors for the backward.
        backward_ms: milliseconds of the backward alone.
        saved_bytes: bytes that the block saves for its backward and that no earlier block has saved; without
            parameters.
        out_bytes: bytes of the block's results that other blocks read.
    """

    forward_ms: float
    recorded_forward_ms: float
    backward_ms: float
    saved_bytes: int
    out_bytes: int


@dataclass(slots=True)
class _Measured:
    """The measurements of a block.

    `saved`: the saved tensors, each as ("input", index), ("result", index), or ("own", bytes) for any other.
    """

    forward_ms: float
    recorded_forward_ms: float
    backward_ms: float
    saved: list[tuple[str, int]]
    shares: dict[int, int]  # index of a result -> index of the input of which the result is a view
    results: list[object]


def profile(
    captured: Captured,
    batch: Mapping[str, Tensor],
    *,
    repeats: int = _REPEATS,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[BlockCost, ...]:
    """Measure each block of `blocks_of`.

    Args:
        batch: a microbatch of the size that will be trained, on the device to measure, where parameters without memory
            get memory.
        repeats: number of measurements, of which the least time counts.
        progress: called after each block with the number of measured blocks and of all blocks.
    """
    return GraphProfiler(captured, batch, repeats).run(progress)


class GraphProfiler:
    """Measures the blocks of a captured model in turn. `estimate.py` overrides `timed` and `apply`."""

    def __init__(self, captured: Captured, batch: Mapping[str, Tensor], repeats: int) -> None:
        self._captured = captured
        self._device = next(iter(batch.values())).device
        self._repeats = repeats
        self._free = free_nodes(captured)
        self._trained = differentiable(captured.graph_module)
        self._values: dict[fx.Node, object] = {}
        self._memory: dict[fx.Node, fx.Node] = {}  # result -> the node that owns its memory
        self._saved: set[fx.Node] = set()  # the nodes whose memory has been counted as saved
        self._known: dict[str, _Measured] = {}
        given = {DRAW: Draw(seed=0, sample=-1), **batch}  # below 0: statistics stay as they are
        for node in captured.graph_module.graph.nodes:
            if node.op == "placeholder":
                self._values[node] = given[node.target]
        for node in captured.nodes:
            if node in self._free:
                self._values[node] = self._compute(node, self._values, {})

    def run(self, progress: Callable[[int, int], None] | None) -> tuple[BlockCost, ...]:
        blocks = blocks_of(self._captured)
        costs = []
        for place, block in enumerate(blocks):
            costs.append(self._cost([self._captured.nodes[number] for number in block]))
            if progress is not None:
                progress(place + 1, len(blocks))
        return tuple(costs)

    def _cost(self, nodes: list[fx.Node]) -> BlockCost:
        members = set(nodes)
        sources = dict.fromkeys(source for node in nodes for source in node.all_input_nodes)
        inputs = [source for source in sources if source.op != "get_attr" and source not in members]
        results = [node for node in nodes if any(user not in members for user in node.users)]
        key = self._key(nodes, inputs, results)
        if key not in self._known:
            self._known[key] = self._measure(nodes, inputs, results)
        measured = self._known[key]
        for place, (node, value) in enumerate(zip(results, measured.results, strict=True)):
            self._values[node] = value
            shared = inputs[measured.shares[place]] if place in measured.shares else node
            self._memory[node] = self._memory.get(shared, shared)
        saved_bytes = 0
        for kind, number in measured.saved:
            if kind == "own":
                saved_bytes += number
                continue
            node = (inputs if kind == "input" else results)[number]
            memory = self._memory.get(node, node)
            if memory not in self._saved and memory.op != "placeholder" and memory not in self._free:
                self._saved.add(memory)
                saved_bytes += _num_bytes(self._values[node])
        out_bytes = sum(
            _num_bytes(self._values[node])
            for node in results
            if any(user not in members and user.op != "output" for user in node.users)
        )
        times = measured.forward_ms, measured.recorded_forward_ms, measured.backward_ms
        return BlockCost(*times, saved_bytes, out_bytes)

    def _key(self, nodes: list[fx.Node], inputs: list[fx.Node], results: list[fx.Node]) -> str:
        """A text that is equal for equal blocks: operators, arguments, shapes, strides and dtypes, without names."""
        number = {node: place for place, node in enumerate([*inputs, *nodes])}
        words = [_look(self._values[node]) + str(node in self._trained) for node in inputs]
        for node in nodes:
            constants = {each: len(number) + place for place, each in enumerate(node.all_input_nodes)}
            for each in node.all_input_nodes:
                if each.op == "get_attr":
                    value = attribute(self._captured.graph_module, each.target)
                    words.append(_look(value) if isinstance(value, Tensor) else each.target)
            arguments = node.args
            if node.args and isinstance(node.args[0], fx.Node) and node.args[0].target == DRAW:
                arguments = (node.args[0], *node.args[2:])  # the operator's number does not matter
            words += [str(node.target), word(arguments, {**constants, **number})]
            words.append(word(dict(node.kwargs), {**constants, **number}))
        words.append(str([number[node] for node in results]))
        return "\n".join(words)

    def _measure(self, nodes: list[fx.Node], inputs: list[fx.Node], results: list[fx.Node]) -> _Measured:
        parameters = self._parameters(nodes)
        forward, recorded, backward = [], [], []
        for _ in range(self._repeats):
            with torch.no_grad():
                forward.append(self.timed(lambda: self._forward(nodes, self._leaves(inputs), parameters, results))[0])
            leaves = self._leaves(inputs)
            milliseconds, made = self.timed(lambda: self._forward(nodes, leaves, parameters, results))  # noqa: B023
            recorded.append(milliseconds)
            roots = [each for each in made if isinstance(each, Tensor) and each.requires_grad]
            gradients = [torch.ones_like(each) for each in roots]
            if roots:
                milliseconds, _ = self.timed(lambda: torch.autograd.backward(roots, gradients))  # noqa: B023
                backward.append(milliseconds)
        saved, shares, made = self._memory_of(nodes, inputs, results, parameters)
        return _Measured(min(forward), min(recorded), min(backward, default=0.0), saved, shares, made)

    def _memory_of(self, nodes, inputs, results, parameters):
        """Run a forward. Returns the saved tensors, the results that are views of inputs, and the results (as in
        `_Measured`)."""
        packed: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            packed[_address(tensor)] = tensor.untyped_storage().nbytes()
            return tensor

        leaves = self._leaves(inputs)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            made = self._forward(nodes, leaves, parameters, results)
        places = {_address(value): ("own", 0) for value in parameters.values()}
        for place in reversed(range(len(results))):
            if isinstance(made[place], Tensor):
                places[_address(made[place])] = ("result", place)
        for place, node in reversed(list(enumerate(inputs))):
            if isinstance(leaves[node], Tensor):
                places[_address(leaves[node])] = ("input", place)
        saved = [places.get(address, ("own", size)) for address, size in packed.items()]
        found = {place: places[_address(each)] for place, each in enumerate(made) if isinstance(each, Tensor)}
        shares = {place: number for place, (kind, number) in found.items() if kind == "input"}
        return saved, shares, [each.detach() if isinstance(each, Tensor) else each for each in made]

    def _forward(self, nodes, leaves, parameters, results) -> list[object]:
        values = dict(leaves)
        for node in nodes:
            values[node] = self._compute(node, values, parameters)
        return [values[node] for node in results]

    def _leaves(self, inputs: Sequence[fx.Node]) -> dict[fx.Node, object]:
        """The inputs of a block, detached from the autograd graph of earlier blocks."""
        return {
            node: value.detach().requires_grad_(node in self._trained) if isinstance(value, Tensor) else value
            for node, value in ((node, self._values[node]) for node in inputs)
        }

    def _compute(self, node: fx.Node, values: Mapping[fx.Node, object], parameters: Mapping[str, Tensor]) -> object:
        def value_of(source: fx.Node) -> object:
            if source.op != "get_attr":
                return values[source]
            if source.target in parameters:
                return parameters[source.target]
            value = attribute(self._captured.graph_module, source.target)
            return value.to(self._device) if isinstance(value, Tensor) else value

        args, kwargs = (on_device(fx.node.map_arg(each, value_of), self._device) for each in (node.args, node.kwargs))
        return self.apply(node.target, args, kwargs)

    def apply(self, target: Callable, args: tuple, kwargs: Mapping[str, object]) -> object:
        """Compute one operator."""
        return target(*args, **kwargs)

    def _parameters(self, nodes: Sequence[fx.Node]) -> dict[str, Tensor]:
        """The block's parameters, with memory, by their names in the graph."""
        found = {}
        for source in (source for node in nodes for source in node.all_input_nodes):
            value = self._captured.parameter(source)
            if value is None:
                continue
            if is_fake(value):
                real = torch.empty(value.shape, dtype=value.dtype, device=self._device)
                real = real.normal_(0, 0.02, generator=torch.Generator(self._device).manual_seed(0))
            else:
                real = value.detach().to(self._device)
            found[source.target] = real.requires_grad_(value.requires_grad)
        return found

    def timed(self, work: Callable[[], object]) -> tuple[float, object]:
        """Call `work`. Returns its milliseconds and its result."""
        self._wait()
        begin = time.perf_counter()
        result = work()
        self._wait()
        return (time.perf_counter() - begin) * 1e3, result

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def parameters_of(captured: Captured, block: Sequence[int]) -> tuple[str, ...]:
    """The names of the parameters that a block uses."""
    sources = (source for number in block for source in captured.nodes[number].all_input_nodes)
    names = dict.fromkeys(without_model(source.target) for source in sources if source.op == "get_attr")
    return tuple(name for name in names if name in captured.parameters)


def _address(tensor: Tensor) -> int:
    """The identity of a tensor's storage. An address would not do, since parameters without memory have none."""
    return tensor.untyped_storage()._cdata


def _num_bytes(value: object) -> int:
    return value.numel() * value.element_size() if isinstance(value, Tensor) else 0


def _look(value: object) -> str:
    if isinstance(value, Tensor):
        return f"{tuple(value.shape)} {value.stride()} {value.dtype}"
    return str(value) if isinstance(value, (int, float, bool)) else type(value).__name__
