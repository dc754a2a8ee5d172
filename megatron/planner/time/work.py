"""The work of one GPU for one microbatch, in operations, bytes and kernels: a layer, the embedding and the head.

The counts are for the kernels of megatron.core and Megatron-LM. Notation: e bytes per element, h the hidden size, f the
feed-forward size, q and k the columns of queries and keys, N the number of attention scores of a rank. A pass over a
tensor counts the bytes that it reads and the bytes that it writes. Bytes are per token, except those with N.

    forward                               bytes            backward                              bytes
    norm                                  2 e h            norm, twice over its input            5 e h
    bias, dropout, residual in one        3 e h + h        dropout; sum with the residual        5 e h + h
    bias and activation in one            2 e f            the same, and sums of biases          4 e f
    context to (s, b, h)                  2 e q            the same, and joining q, k and v      2 e q + 2 e (q + 2 k)
    scores written, read by a product     2 e N            their gradients, by three products    5 e N
    softmax, fused with scale and mask    2 e N            the same                              3 e N
    dropout                               (2 e + 1) N      the same                              (2 e + 1) N

Without the fused kernel the softmax widens scores to FP32, scales, masks, normalizes and narrows them, each in one
pass. With 16-bit scores these are 37 N bytes, and 41 N bytes in the backward. Flash attention writes no scores; its
rate is a fraction of other products' rate (`Device.attention_part`). Norms, dropout and residuals are split over tensor
ranks only with sequence parallelism. A backward adds the weights' gradients to their buffer. Rows in the products of
scores are as wide as a head. If that is no multiple of 16 bytes, cuBLAS has no kernel that loads whole rows for the
matrix units, and numbers are widened one by one.

Eager PyTorch (not `fuses_elementwise`) takes a pass for each operator. An RMSNorm widens its input to FP32, squares,
averages, multiplies, narrows the result and multiplies by its weight. Rotary embeddings widen queries and keys, rotate
and narrow them. Keys and values are repeated for every query. With 4 bytes for FP32:

    forward                               bytes            backward                              bytes
    norm                                  (4 e + 24) h     the derivative of each operator       (7 e + 60) h
    gate and product apart                5 e f            the same                              9 e f
    rotary embeddings                     (2 e + 16)(q + k)  the same                            (2 e + 16)(q + k)
    repeated keys and values              2 e (q + k)      sums of them                          2 e (q + k)

In FP8 the inputs of linears are cast in a forward, and the gradients of their outputs in a backward. Each cast is a
separate kernel that reads e bytes per element and writes two copies of one byte, one of them transposed. Transformer
Engine with delayed scaling does the same when the cast is not fused with the kernel before. Weights are cast once a
batch, for all of its microbatches. Tensor ranks send 16-bit numbers.

If a backward is split, W has the products of linears that give gradients of weights, and adds these to their buffer.
With split sequences it also gathers the inputs for them. I has all other work: the other products, the attention's
core, norms, activations, the embedding, and recomputation. So operations and bytes of both halves add up to those of
the whole. But transfers of tensor ranks that a whole backward hides behind weight products are hidden in neither half.

With context parallelism a rank has 1/cp of the tokens, and the scores of these tokens with whole sequences. The kernels
compute the scores in cp equal steps, since each rank has a part of the beginning and a part of the end of a sequence. A
step's keys and values arrive while the previous step is computed; in a backward their gradients arrive with them. Each
step's result is added to the sum so far. This takes 3 passes over the result, or in a backward over the gradients of
queries, keys and values.

`Work` holds amounts of work by kind. Each kind has its own resource:

    products      matrix products (`operations`, `calls`), bound by arithmetic. FP8 products (`fp8_operations`) have
                  another peak, and flash attention's products (`attended`) another rate. `unaligned` are operations of
                  products whose rows do not begin at multiples of 16 bytes
    traffic       bytes that other kernels read and write, bound by memory
    exchanged     bytes that a tensor rank sends to the others while it computes nothing
    overlapped    bytes that it sends beside matrix products
    launches      `kernels` other than products, and `collectives`, which the host launches

Ranks that share sequences or experts send over separate links:

    ring          bytes of keys and values that a context parallel rank passes on beside the attention's core, in all
                  steps but the last; `ring_operations` and `ring_calls` belong to the core in these steps
    gathered      bytes that it sends to gather keys and values, while it computes nothing
    dispatched    bytes of tokens on their way to experts and back, while it computes nothing
    spread        bytes of these tokens between ranks that have parts of the same experts, while it computes nothing

Experts multiply in groups:

    grouped       operations of their products (`grouped_operations`), and bytes of the matrices that these read
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cached_property
from operator import attrgetter

from megatron.planner.job.software import Software
from megatron.planner.memory.architecture import FP32, Architecture
from megatron.planner.memory.parameters import FP8_COPY_BYTES, normalized_widths
from megatron.planner.memory.recompute import RecomputeScope


@dataclass(frozen=True)
class Work:
    """Amounts of work by kind; see the module."""

    operations: float = 0.0
    calls: float = 0.0
    traffic: float = 0.0
    exchanged: float = 0.0
    overlapped: float = 0.0
    kernels: float = 0.0
    collectives: float = 0.0
    grouped_operations: float = 0.0
    grouped_bytes: float = 0.0
    fp8_operations: float = 0.0
    ring: float = 0.0
    ring_operations: float = 0.0
    ring_calls: float = 0.0
    gathered: float = 0.0
    dispatched: float = 0.0
    spread: float = 0.0
    attended: float = 0.0
    unaligned: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(*(a + b for a, b in zip(_values(self), _values(other), strict=True)))

    def __mul__(self, factor: float) -> Work:
        return Work(*(factor * value for value in _values(self)))


_values = attrgetter(*(field.name for field in fields(Work)))
_ALIGNED = 16
"""Bytes. The GPU's matrix units load rows that begin at multiples of it."""


class LayerWork:
    """The work of one microbatch on one of t tensor ranks: in a layer without experts, the embedding and the head."""

    def __init__(
        self,
        shape: Architecture,
        software: Software,
        *,
        tensor: int,
        micro_batch_size: int,
        sequence_parallel: bool,
        context: int = 1,
    ) -> None:
        self.shape, self.software = shape, software
        self.t, self.b, self.cp = tensor, micro_batch_size, context
        self.tokens = micro_batch_size * (shape.sequence_length // context)
        self.shared = tensor if sequence_parallel and tensor > 1 else 1
        self.sequence_parallel = self.shared > 1
        self.e = software.element_bytes

    # --- a layer

    @cached_property
    def forward(self) -> Work:
        h, e, t = self.shape.hidden_size, self.e, self.t
        norm, _, around = self._elementwise(backward=False)
        along_tokens = self.tokens / self.shared * (norm * self._normalized + 2 * (3 * e + self._mask) * h)
        moved = 0 if self.software.flash_attention else 2 * e * self.shape.result_width
        attention = self.tokens / t * (around + moved)
        return (
            self._linear(1)
            + self._casts(backward=False)
            + self._core_forward()
            + self._forward_exchange()
            + Work(traffic=along_tokens + attention + self._mlp_traffic(backward=False), kernels=18)
        )

    @cached_property
    def backward(self) -> Work:
        """The backward, without recomputation."""
        h, e, t = self.shape.hidden_size, self.e, self.t
        norm, _, around = self._elementwise(backward=True)
        along_tokens = self.tokens / self.shared * (norm * self._normalized + 2 * (5 * e + self._mask) * h)
        attention = self.tokens / t * (around + 2 * e * (self.shape.result_width + self._joined))
        weights = self._accumulated(self._matrices)
        return (
            self._linear(2)
            + self._casts(backward=True)
            + self._core_backward()
            + self._backward_exchange()
            + Work(traffic=along_tokens + attention + self._mlp_traffic(backward=True) + weights, kernels=36)
        )

    @cached_property
    def backward_weight(self) -> Work:
        """The W of a split backward."""
        sums = self._num_sums * self.sequence_parallel
        return self._linear(1) + Work(
            traffic=self._accumulated(self._matrices), exchanged=sums * self._all_reduce / 2, collectives=float(sums)
        )

    @cached_property
    def backward_input(self) -> Work:
        """The I of a split backward, without recomputation."""
        return _rest(self.backward, self.backward_weight)

    def recomputed(self, scope: RecomputeScope) -> Work:
        if scope is RecomputeScope.LAYER:
            return self.forward
        if scope is RecomputeScope.ATTENTION:
            return self._all_but_kept if self.software.keeps_every_other_product else self._core_forward()
        return Work()

    # --- before and after the layers

    @cached_property
    def embedding(self) -> tuple[Work, Work]:
        """Forward and backward of the first stage's embedding: a lookup, positions and dropout."""
        h, e = self.shape.hidden_size, self.e
        passes = self.tokens * h * (6 * e + self._mask)
        operations = 2.0 * self.tokens * h * self.shape.patch_elements
        exchanges = self.t > 1 and not self.shape.patch_elements  # tensor ranks split a vocabulary, but not patches
        forward = Work(
            operations=operations, traffic=passes, kernels=6, exchanged=self._all_reduce * exchanges,
            collectives=float(exchanges),
        )  # fmt: skip
        return forward, Work(operations=operations, traffic=passes + self.tokens * h * FP32, kernels=6)

    @cached_property
    def head(self) -> tuple[Work, Work]:
        """Forward and backward of the last stage's norm, output layer and loss. The loss has a softmax in FP32."""
        h, e, t, vocabulary = self.shape.hidden_size, self.e, self.t, self.shape.output_rows
        logits = self.tokens * vocabulary / t
        width = h * vocabulary / t
        dense = h * h if self.shape.masked_head else 0
        operations = 2.0 * self.tokens * (width + dense / self.shared)
        half = self._all_reduce / 2
        forward = Work(
            operations=operations, calls=1, traffic=(e + 9 * FP32) * logits + 2 * e * h * self.tokens / self.shared,
            kernels=14, exchanged=half * self.sequence_parallel, collectives=3.0 * (t > 1),
        )  # fmt: skip
        backward = Work(
            operations=2 * operations, calls=2, traffic=(3 * FP32 + 2 * e) * logits + self._accumulated(width + dense),
            kernels=8, overlapped=self._all_reduce, collectives=float(t > 1),
        )  # fmt: skip
        return forward, backward

    @cached_property
    def head_halves(self) -> tuple[Work, Work]:
        """I and W of the head's backward. W has the product of the output layer, but not that of BERT's dense layer."""
        backward = self.head[1]
        width = self.shape.hidden_size * self.shape.output_rows / self.t
        weight = Work(
            operations=2.0 * self.tokens * width, calls=1, traffic=self._accumulated(width),
            exchanged=self._all_reduce / 2 * self.sequence_parallel, collectives=float(self.sequence_parallel),
        )  # fmt: skip
        return _rest(backward, weight), weight

    # --- parts

    @property
    def _mask(self) -> int:
        return 1 if self.shape.hidden_dropout else 0

    def _accumulated(self, num_weights: float) -> float:
        """Return the bytes read and written to add gradients of weights to their buffer.

        Without fusion the gradients are also written and read once before.
        """
        passes = self.software.gradient_bytes + (0 if self.software.fuses_gradient_accumulation else self.e)
        return 2 * num_weights * passes

    @property
    def _matrices(self) -> float:
        """The number of elements of a layer's matrices on a rank."""
        return self.shape.layer_matrices / self.t

    @property
    def _joined(self) -> int:
        """The columns of queries, keys and values."""
        return self.shape.query_width + self.shape.key_width + self.shape.value_width

    @property
    def _normalized(self) -> int:
        """The columns of the inputs of a layer's norms. Those of heads (`qk_norm`) are not counted."""
        shape = self.shape
        return 2 * shape.hidden_size + (sum(normalized_widths(shape)) if shape.latents and shape.qk_norm else 0)

    @property
    def _num_sums(self) -> int:
        """The number of results that tensor ranks sum: those of the attention's projection and of the MLP."""
        return 2

    def _linear(self, times: int) -> Work:
        operations = 2.0 * times * self.tokens * self.shape.layer_matrices / self.t
        calls = (len(self.shape.attention_matrices) + 2) * times
        if self.software.fp8:
            return Work(fp8_operations=operations, calls=calls)
        return Work(operations=operations, calls=calls)

    def _casts(self, *, backward: bool) -> Work:
        """Return the work of casts to FP8: of inputs of linears, or in a backward of the gradients of their outputs."""
        if not self.software.fp8:
            return Work()
        elements, kernels = self._mlp_casts(backward)
        columns = self._joined if backward else self.shape.result_width
        elements += self.tokens * (self.shape.hidden_size / self.shared + columns / self.t)
        return Work(traffic=(self.e + FP8_COPY_BYTES) * elements, kernels=2 + kernels)

    def _mlp_casts(self, backward: bool) -> tuple[float, int]:
        """Return the numbers of elements and kernels of the casts for an MLP."""
        return self._cast_elements(self.shape.ffn_hidden_size, backward), 2

    def _cast_elements(self, width: int, backward: bool) -> float:
        """Return the number of elements of the two cast tensors of an MLP with `width` columns."""
        columns = width * (1 + self.shape.gated * backward)
        return self.tokens * (self.shape.hidden_size / self.shared + columns / self.t)

    @property
    def _all_but_kept(self) -> Work:
        """A forward without the products whose results are kept.

        Every other product of q, k, v, projection, (gate,) up, down is kept, beginning with the first. Of an even
        number of products the last is not needed, but counts. So does the attention, although torchtitan keeps its
        result: without it, the published runs come out 11.5% off instead of 4.7%.
        """
        h, q, k, f = self.shape.hidden_size, self.shape.query_width, self.shape.key_width, self.shape.ffn_hidden_size
        again = h * (k + q + f)  # keys, projection, and up of a gated MLP or else down
        operations = 2.0 * self.tokens * again / self.t
        kind = {"operations": 0.0, "fp8_operations": operations} if self.software.fp8 else {"operations": operations}
        return replace(self.forward, **kind, calls=3)

    def _elementwise(self, *, backward: bool) -> tuple[float, float, float]:
        """Return bytes per token: of a norm (per column), of the activation, and around attention; see the module."""
        e, shape = self.e, self.shape
        plain = self._activation_bytes(4 if backward else 2, shape.ffn_hidden_size)
        copied = 2 * e * self._joined if shape.latents else 0  # rotated parts are joined to the others
        if self.software.fuses_elementwise:
            return (5.0 if backward else 2.0) * e, plain, copied
        norm = 7 * e + 15 * FP32 if backward else 4 * e + 6 * FP32
        gated = (9.0 if backward else 5.0) * e * shape.ffn_hidden_size
        turned = (2 * e + 4 * FP32) * (shape.query_width + shape.key_width)
        if shape.latents:
            turned = (2 * e + 4 * FP32) * (shape.num_attention_heads + self.t) * shape.latents.rotated
        repeats = shape.num_query_groups < shape.num_attention_heads and not shape.latents
        repeated = 2 * e * (shape.query_width + shape.key_width) * repeats
        return norm, gated if shape.gated else plain, turned + repeated + copied

    def _mlp_traffic(self, *, backward: bool) -> float:
        """Return the bytes that an MLP's kernels move between its products."""
        return self.tokens / self.t * self._elementwise(backward=backward)[1]

    def _activation_bytes(self, passes: int, width: int) -> float:
        return passes * self.e * width * (1.5 if self.shape.gated else 1)

    def _forward_exchange(self) -> Work:
        exposed, hidden = self._in_pieces(self._num_sums * self._all_reduce)
        return (
            Work(exchanged=exposed, overlapped=hidden, collectives=self._num_sums * (self.t > 1)) + self._shared_groups
        )

    @property
    def _shared_groups(self) -> Work:
        """The exchange in which tensor ranks that share a query group gather queries, keys and values, or scatter
        gradients; or in which they gather the columns of latents.
        """
        if latents := self.shape.latents:
            width = (latents.query_rank + latents.key_rank + latents.rotated) * (self.t > 1)
        else:
            width = self._joined * (self.shape.num_query_groups < self.t)
        return Work(exchanged=(self.t - 1) / self.t * self.tokens * width * self.e, collectives=float(width > 0))

    def _in_pieces(self, num_bytes: float) -> tuple[float, float]:
        """Split the bytes of sums into those sent while nothing is computed and those sent beside products.

        If products are computed in pieces, one for each tensor rank, all pieces but one are sent beside products.
        """
        if not (self.software.overlaps_in_pieces and self.sequence_parallel):
            return num_bytes, 0.0
        return num_bytes / self.t, num_bytes * (self.t - 1) / self.t

    @property
    def _all_reduce(self) -> float:
        """Bytes that a tensor rank sends to all-reduce the residual stream, or to scatter and gather it."""
        return 2 * (self.t - 1) / self.t * self.tokens * self.shape.hidden_size * self.e

    def _backward_exchange(self) -> Work:
        """Return the transfers of tensor ranks in a backward.

        With split sequences gradients are gathered before products, which nothing hides. Then the inputs are gathered
        again and the gradients scattered, beside products. Software without `overlaps_tensor` waits for all of them.
        """
        exposed, beside = self._in_pieces(self._num_sums * self._all_reduce / 2 * self.sequence_parallel)
        hidden = self._num_sums * self._all_reduce + beside
        if not self.software.overlaps_tensor:
            exposed, hidden = exposed + hidden, 0.0
        return (
            Work(exchanged=exposed, overlapped=hidden, collectives=self._num_sums * (self.t > 1)) + self._shared_groups
        )

    @property
    def _scores(self) -> float:
        return self.tokens * self.shape.sequence_length * self.shape.num_attention_heads / self.t

    @property
    def softmax_is_fused(self) -> bool:
        heads = self.b * self.shape.num_attention_heads // self.t
        return self.software.fuses_softmax and self.e < FP32 and heads % 4 == 0

    @property
    def _widening(self) -> int:
        """Bytes moved to widen a score to FP32 and to narrow it again."""
        return 2 * (self.e + FP32) if self.e < FP32 else 0

    @property
    def _channels(self) -> tuple[float, float]:
        """The channels of a head's queries and keys, and of its values."""
        heads = self.shape.num_attention_heads
        return self.shape.query_width // heads, self.shape.result_width // heads

    def _core_products(self, times: float) -> Work:
        work = Work(calls=2 * times)
        for channels in self._channels:
            kind = "unaligned" if self.e * channels % _ALIGNED else "operations"
            work += Work(**{kind: 2.0 * times * self._scores * channels})
        return work

    def _flash(self, times: float) -> Work:
        """Return the products of flash attention, which under a causal mask skips blocks of later tokens, and those
        outside of windows."""
        operations = 2.0 * times * self._scores * sum(self._channels)
        if self.shape.is_causal:
            operations *= (self.shape.windows.attended(self.shape.sequence_length) if self.shape.windows else 1.0) / 2
        return Work(attended=operations, calls=2 * times)

    def _core_forward(self) -> Work:
        if self.software.flash_attention:
            return self._in_steps(self._flash(1) + Work(kernels=1), self.shape.result_width, passed=1)
        e = self.e
        softmax = 2 * e if self.softmax_is_fused else 6 * FP32 + 1 + self._widening
        dropout = 2 * e + 1 if self.shape.attention_dropout else 0
        return self._core_products(1) + Work(traffic=(2 * e + softmax + dropout) * self._scores, kernels=5)

    def _core_backward(self) -> Work:
        if self.software.flash_attention:
            return self._in_steps(self._flash(2.5) + Work(kernels=3), self._joined, passed=2)
        e = self.e
        softmax = 3 * e if self.softmax_is_fused else 7 * FP32 + 1 + self._widening
        dropout = 2 * e + 1 if self.shape.attention_dropout else 0
        return self._core_products(2) + Work(traffic=(5 * e + softmax + dropout) * self._scores, kernels=8)

    def _in_steps(self, core: Work, width: int, *, passed: int) -> Work:
        """Return the attention's core with the transfers of context parallel ranks.

        `passed`: 1 if ranks pass on keys and values, 2 if they also pass on their gradients. `width`: the columns of
        the results to which each step adds.
        """
        if self.cp == 1:
            return core
        passed_columns = self.shape.key_width + self.shape.value_width
        keys = (self.cp - 1) * passed * passed_columns * self.e * self.tokens / self.t
        if self.software.gathers_keys:
            return core + Work(gathered=keys, collectives=float(passed))
        part = (self.cp - 1) / self.cp
        calls, added = self.cp * core.calls, self.cp * 3 * width * self.e * self.tokens / self.t
        return core + Work(
            calls=calls - core.calls, traffic=added, kernels=self.cp * (core.kernels + 1) - core.kernels,
            collectives=self.cp - 1.0, ring=keys, ring_operations=part * core.attended, ring_calls=part * calls,
        )  # fmt: skip


class Joining:
    """The work of a layer of multi-token prediction before its transformer layer: an embedding, two norms, and the
    product that joins both vectors. `layer`: the work of a transformer layer."""

    def __init__(self, layer: LayerWork) -> None:
        self._layer, h = layer, layer.shape.hidden_size
        self._product = Work(operations=4.0 * layer.tokens * h * h / layer.t, calls=1)
        gathered = layer._all_reduce / 2 * (layer.t > 1)
        self._around = Work(traffic=12 * layer.e * h * layer.tokens / layer.shared, kernels=6, exchanged=gathered,
                            collectives=float(layer.t > 1))  # fmt: skip

    @property
    def forward(self) -> Work:
        return self._layer.embedding[0] + self._product + self._around

    @property
    def backward(self) -> Work:
        return self.backward_input + self.backward_weight

    @property
    def backward_weight(self) -> Work:
        h = self._layer.shape.hidden_size
        return self._product + Work(traffic=self._layer._accumulated(2 * h * h / self._layer.t))

    @property
    def backward_input(self) -> Work:
        return self._layer.embedding[1] + self._product + self._around

    def recomputed(self, scope: RecomputeScope) -> Work:
        return self._product + self._around if scope is RecomputeScope.LAYER else Work()


def _rest(whole: Work, weight: Work) -> Work:
    """Return the I of a backward whose W is `weight`. I has the other transfers of `whole`, and hides none of them."""
    exchanged = whole.exchanged + whole.overlapped - weight.exchanged
    left = whole + weight * -1.0
    return replace(left, exchanged=exchanged, overlapped=0.0, collectives=whole.collectives)
