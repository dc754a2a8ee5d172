"""The buffers that a forward writes: the running statistics of batch norm, and values that each forward writes afresh.

Problem: a stage runs a microbatch's forward again for a recompute, and must count its statistics once. Besides,
torch.export writes "training" into the graph.
Solution: batch norm becomes a call that gets the `Draw`. It updates its statistics for a microbatch whose number is
above all that it has seen, which a buffer beside the statistics records. So it counts neither a recompute, nor an
evaluation, nor a trial (a `Draw` with a sample below 0). The statistics are of the microbatches that a stage
runs: replicas have their own.

A buffer that each forward overwrites before it reads it (the frequencies of longrope) holds no state. Its readers take
the value that would be written.
"""

from __future__ import annotations

import torch
from torch import Tensor, fx

from megatron.capture.nodes import attribute, written_by
from megatron.capture.randomness import Draw, arguments_of, draw_of

aten = torch.ops.aten

_SEEN = "last_sample"
"""The buffer beside the statistics that has the number of the latest microbatch in them."""


def counted_batch_norm(
    draw: Draw, node: int, input: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, variance: Tensor,
    count: Tensor | None, last_sample: Tensor, momentum: float, eps: float,
) -> Tensor:  # fmt: skip
    """Compute ``batch_norm`` number `node` of `input` [samples, channels, ...], and update its statistics in place.

    Args:
        mean: the running mean [channels]; `variance` likewise.
        count: the number of batches in them, int64 []; None if the model does not count.
        last_sample: the number of the latest microbatch in them, int64 [], -1 at first.
    """
    norm = torch.nn.functional.batch_norm
    weight, bias = (each if each is None else each.to(mean.dtype) for each in (weight, bias))  # FP32 beside bf16
    if not draw.training:
        return norm(input, mean, variance, weight, bias, False, momentum, eps)
    if draw.sample < 0 or draw.sample <= int(last_sample):
        return norm(input, None, None, weight, bias, True, momentum, eps)
    last_sample.fill_(draw.sample)
    if count is not None:
        count.add_(1)
    return norm(input, mean, variance, weight, bias, True, momentum, eps)


def count_statistics(graph_module: fx.GraphModule) -> int:
    """Replace each batch norm that keeps statistics by `counted_batch_norm`. Returns how many are replaced.

    A batch norm whose buffers another operator uses, such as one that a forward calls twice, stays as it is and is
    refused as a write.
    """
    graph = graph_module.graph
    found = [node for node in graph.nodes if node.target is aten.batch_norm.default and node.args[5]]
    replaced = 0
    for number, node in enumerate(found):
        arguments = arguments_of(node)
        mean, variance = arguments["running_mean"], arguments["running_var"]
        if mean is None or variance is None or len(mean.users) != 1 or len(variance.users) != 1:
            continue
        path = mean.target.rpartition(".")[0]
        owner = graph_module.get_submodule(path)
        counter = f"{path}.num_batches_tracked"
        count = next((each for each in graph.nodes if each.op == "get_attr" and each.target == counter), None)
        if count is not None:
            adds = list(count.users)
            if [each.target for each in adds] != [aten.add_.Tensor] or adds[0].users:
                continue  # an average over all batches, whose momentum depends on the count
            graph.erase_node(adds[0])
        owner.register_buffer(_SEEN, torch.tensor(-1), persistent=False)
        draw = draw_of(graph)
        with graph.inserting_before(node):
            last = graph.get_attr(f"{path}.{_SEEN}")
            new = graph.call_function(
                counted_batch_norm,
                (draw, number, arguments["input"], arguments["weight"], arguments["bias"], mean, variance, count, last,
                 arguments["momentum"], arguments["eps"]),
            )  # fmt: skip
        new.meta = dict(node.meta)
        node.replace_all_uses_with(new)
        graph.erase_node(node)
        replaced += 1
    return replaced


def counted_in(graph: fx.Graph) -> frozenset[str]:
    """The names of the buffers that a graph's forwards change."""
    found = [node for node in graph.nodes if node.target is counted_batch_norm]
    return frozenset(each.target for node in found for each in node.args[5:9] if each is not None)


def forget_overwritten(graph_module: fx.GraphModule) -> None:
    """Let the readers of a buffer that is overwritten as a whole before any read take the written value instead."""
    graph = graph_module.graph
    for node in list(graph.nodes):
        if node.target is not aten.copy_.default or node.args[0].op != "get_attr":
            continue
        buffer, value = node.args[:2]
        same = [each for each in graph.nodes if each.op == "get_attr" and each.target == buffer.target]
        tensor = attribute(graph_module, buffer.target)
        if len(same) > 1 or next(iter(buffer.users)) is not node or isinstance(tensor, torch.nn.Parameter):
            continue
        if any(buffer in written_by(each) for each in buffer.users if each is not node):
            continue
        written = value.meta["val"]
        if (written.shape, written.dtype) != (tensor.shape, tensor.dtype):
            continue
        for each in (node, buffer):
            each.replace_all_uses_with(value, delete_user_cb=lambda user: user is not node)  # noqa: B023
        graph.erase_node(node)
