"""What a layer's routed experts keep and hold of a microbatch, in bytes for a token that a rank routes.

A rank routes the tokens of its part of a sequence, which are all that it has without sequence parallelism. Of balanced
load as many copies come to a rank as leave it, times the ranks that have parts of the same experts (etp), since each
of these has all the tokens for them. So with k copies of a token, experts f wide, and e bytes an element:

    permuted copies, the experts' input                    k etp e h
    input of the activation, its result                    k 2 e f, gated k 3 e f: etp ranks have 1 / etp of etp tokens
    router: a probability and a bit for each expert        5 E
    indices and probabilities of the copies                24 topk

In FP8 the inputs of both matrices are kept in a byte: h etp and one f. An activation without a fused kernel that weighs
its result keeps the result before that, too: k 3 e f, and gated, where the halves and the gate's result are kept as
well, k 6 e f. megatron.core has such kernels for gated MLPs only.
"""

from megatron.planner.memory.architecture import Architecture
from megatron.planner.memory.experts import ExpertDegrees

_ROUTER, _INDEX = 4 + 1, 2 * 8 + 2 * 4


def routed(
    shape: Architecture, degrees: ExpertDegrees, *, element_bytes: int, input_bytes: int, fused_gate: bool
) -> float:
    """What is kept from the forward to the backward. `input_bytes`: of an element of a linear's input."""
    experts = shape.experts
    columns = (2 if fused_gate else 5) if shape.gated else 2
    inputs = degrees.tensor * shape.hidden_size + experts.ffn_hidden_size
    kept = input_bytes * inputs + element_bytes * columns * experts.ffn_hidden_size
    return experts.copies * kept + _ROUTER * experts.count + _INDEX * experts.topk


def routed_gradients(shape: Architecture, degrees: ExpertDegrees, *, element_bytes: int) -> float:
    """What is kept between the halves of a split backward: inputs of the experts' matrices, and the gradients of their
    outputs."""
    experts, gate = shape.experts, 2 if shape.gated else 1
    width = 2 * degrees.tensor * shape.hidden_size + (1 + gate) * experts.ffn_hidden_size
    return experts.copies * element_bytes * width


def exchanged_copies(shape: Architecture, degrees: ExpertDegrees, *, element_bytes: int) -> float:
    """What is held while copies move between ranks, or are sorted by expert: what leaves and what has come."""
    return shape.experts.copies * element_bytes * shape.hidden_size * (1 + degrees.tensor)
