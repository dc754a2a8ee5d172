"""The part `modules` of `papers.zero_bubble`: split backwards of modules of plain torch, beside torch's own split."""

import copy
import random
import time
from collections import defaultdict
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import _backward as of_torch

from megatron import backend
from megatron.pipeline.runtime.activations.weight_products import WeightProducts
from megatron.pipeline.runtime.stages.module.stage import split_linears

_WARM_UP = 2


class _Block(nn.Module):
    """The MLP of a transformer layer, with its norm and its residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, input: Tensor) -> Tensor:
        return input + self.layers(input)


def measure(args: dict) -> list[dict]:
    """Measure a row for each module: seconds in each repeat, and bytes."""
    torch.manual_seed(0)
    backend.keep_freed_memory()
    width, layers = args["hidden_size"], args["layers"]
    modules = {
        "MLPs": nn.Sequential(*(_Block(width) for _ in range(layers))),
        "nn.TransformerEncoderLayer": nn.Sequential(
            *(nn.TransformerEncoderLayer(width, args["heads"], 4 * width, dropout=0.0) for _ in range(layers))
        ),
    }
    input = torch.randn(args["seq_length"], args["micro_batch_size"], width)
    return [{"module": name} | _time(module, input, args["repeats"]) for name, module in modules.items()]


def _time(module: nn.Module, input: Tensor, num_repeats: int) -> dict:
    found = defaultdict(list)
    turns, order = _Turns(module, input, found), random.Random(0)
    for _ in range(num_repeats + _WARM_UP):
        for turn in order.sample((turns.whole, turns.halves, turns.halves_of_torch), 3):
            turn()
    times = {name: values[_WARM_UP:] for name, values in found.items()}
    return times | {name: times[name][-1] for name in ("kept_bytes", "torch_kept_bytes")}


class _Turns:
    """The measurements that take turns: a module's whole backward, its halves by this project, and by torch.

    `found`: receives the seconds and the bytes of each turn, by name.
    """

    def __init__(self, module: nn.Module, input: Tensor, found: dict[str, list]) -> None:
        self._module, self._split, self._found = module, copy.deepcopy(module), found
        split_linears(self._split)
        self._input, self._output_grad = input, torch.randn_like(input)

    def whole(self) -> None:
        output = self._module(self._leaf())
        self._time("whole", output.backward, self._output_grad)

    def halves(self) -> None:
        output, products = self._split(self._leaf()), WeightProducts()
        with products.collect():
            self._time("input", output.backward, self._output_grad)
        self._found["kept_bytes"].append(products.num_bytes)
        self._time("weight", products.compute)

    def halves_of_torch(self) -> None:
        own = {parameter.untyped_storage()._cdata for parameter in self._module.parameters()}
        graph: dict[int, int] = {}

        def note(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage._cdata not in own:
                graph[storage._cdata] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            output = self._module(leaf := self._leaf())
        self._found["torch_kept_bytes"].append(sum(graph.values()))
        parameters = list(self._module.parameters())
        _, groups = self._time(
            "torch_input", of_torch.stage_backward_input, [output], [self._output_grad], [leaf], iter(parameters)
        )
        self._time("torch_weight", of_torch.stage_backward_weight, iter(parameters), groups)

    def _leaf(self) -> Tensor:
        return self._input.clone().requires_grad_()

    def _time(self, name: str, work: Callable[..., object], *arguments: object) -> object:
        start = time.thread_time()
        result = work(*arguments)
        self._found[name].append(time.thread_time() - start)
        return result
