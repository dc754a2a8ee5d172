"""The work of one GPU for one microbatch in a layer with experts.

Attention is as in any layer, and a shared expert is an MLP. Beside these, a rank routes the tokens of its part of the
sequence and sends a copy of a token to each expert chosen for it. The rank computes the copies that arrive and sends
the results back. As many copies arrive as leave, since balanced load is assumed. With n tokens to route, k copies of
each token, M matrix elements of an expert, and E experts in a layer of which E/ep are on a rank, the forward has:

    router             a product of 2 n h E operations; its softmax and choice in FP32, 6 passes over E numbers
    experts            2 n k M operations, or the bytes of the matrices if reading them takes longer. Each matrix of
                       each expert on the rank is a separate product, so `product_overhead` counts E/ep times: small
                       experts are slow
    copies             made, sorted by expert, sorted back and summed: (2 + 2 k + 4 k etp) e h bytes read and written
                       for each token; (2 + 2 k) e h with one expert on the rank, where nothing is sorted
    between ranks      2 all-to-alls of n k e h bytes, of which (ep - 1) / ep leave the rank. With etp, the ranks with
                       parts of the same experts gather and scatter 2 n k (etp - 1) e h bytes

With DeepEP's or HybridEP's dispatcher (`flex`), a token is sent once to each rank that has one of its experts, not k
times. These are r < k ranks on average, if all choices are equally likely. The token is copied where it arrives, and
the results are summed there before they go back: (2 r + 2 k) etp e h bytes are read and written for each token.

In FP8 the copies for each expert are padded to the sizes that its products require. So they are copied once more before
and after the products, 4 k etp e h bytes, unless a capacity makes their numbers equal.

The backward moves as much and computes twice as much.
"""

from megatron.planner.job.software import FLEX, Software
from megatron.planner.memory.architecture import FP32, Architecture, ExpertDegrees
from megatron.planner.time.work import LayerWork, Work

_CHOICES = 6 * FP32  # bytes moved for an expert's probability for a token: softmax, choice, scatter
_KERNELS = 20  # number of kernels of megatron.core's router and dispatcher, in each direction


class ExpertLayerWork(LayerWork):
    """The work of one microbatch on one of t tensor ranks, in a layer with experts.

    `degrees`: how experts are distributed over ranks. All other arguments are those of `LayerWork`.
    """

    def __init__(self, shape: Architecture, software: Software, *, degrees: ExpertDegrees, **options: object) -> None:
        super().__init__(shape, software, **options)
        self.experts, self.degrees = shape.experts, degrees
        self._own = shape.experts.count // degrees.parallel
        self._matrix = shape.mlp_matrices(shape.experts.ffn_hidden_size)
        self._router = shape.hidden_size * shape.experts.count
        self._dense = shape.projections + shape.mlp_matrices(shape.experts.shared_ffn_hidden_size)

    @property
    def _routed_tokens(self) -> float:
        return self.tokens / self.shared

    @property
    def _matrices(self) -> float:
        return self._dense / self.t + self._own * self._matrix / self.degrees.tensor + self._router

    @property
    def _num_sums(self) -> int:
        return 1 + (self.experts.shared_ffn_hidden_size > 0)

    def _linear(self, times: int) -> Work:
        dense, router = 2.0 * self.tokens * self._dense / self.t, 2.0 * self._routed_tokens * self._router
        is_fp8 = self.software.fp8
        once = Work(
            operations=router + (0.0 if is_fp8 else dense),
            fp8_operations=dense if is_fp8 else 0.0,
            grouped_operations=2.0 * self._routed_tokens * self.experts.copies * self._matrix,
            grouped_bytes=(1 if is_fp8 else self.e) * self._own * self._matrix / self.degrees.tensor,
            calls=2 * self._num_sums - 1 + len(self.shape.attention_matrices) + 2 * self._own,
        )
        return once * times

    def _mlp_casts(self, backward: bool) -> tuple[float, int]:
        experts = self.experts
        gate = 1 + self.shape.gated * backward
        routed = self.degrees.tensor * self.shape.hidden_size + gate * experts.ffn_hidden_size
        elements, kernels = self._routed_tokens * experts.copies * routed, 2 * self._own
        if experts.shared_ffn_hidden_size:
            elements, kernels = elements + self._cast_elements(experts.shared_ffn_hidden_size, backward), kernels + 2
        return elements, kernels

    def _mlp_traffic(self, *, backward: bool) -> float:
        experts, h, passes = self.experts, self.shape.hidden_size, 4 if backward else 2
        shared = self.tokens / self.t * self._activation_bytes(passes, experts.shared_ffn_hidden_size)
        columns = experts.copies * self._activation_bytes(passes, experts.ffn_hidden_size)
        return shared + self._routed_tokens * (columns + self.e * h * self._moved + _CHOICES * experts.count)

    @property
    def _moved(self) -> float:
        """How often a token's hidden state is read or written for its copies, in one direction of the computation."""
        k, etp = self.experts.copies, self.degrees.tensor
        padded = 4 * k * etp * (self.software.fp8 and self.experts.capacity_factor is None)
        if self.software.dispatcher == FLEX:
            return 2 * (self._sent + k) * etp + padded
        return 2 + 2 * k + 4 * k * etp * (self._own > 1) + padded

    @property
    def _sent(self) -> float:
        """The number of times that a token is sent to ranks with its experts."""
        if self.software.dispatcher == FLEX:
            return min(self.experts.copies, self.experts.reached(self.degrees.parallel))
        return self.experts.copies

    def _forward_exchange(self) -> Work:
        return super()._forward_exchange() + self._between_ranks

    def _backward_exchange(self) -> Work:
        return super()._backward_exchange() + self._between_ranks

    @property
    def _between_ranks(self) -> Work:
        """The work of sending copies to experts and back, in one direction of the computation."""
        sent = 2 * self._routed_tokens * self._sent * self.e * self.shape.hidden_size
        ep, etp = self.degrees.parallel, self.degrees.tensor
        return Work(
            kernels=_KERNELS, dispatched=sent * (ep - 1) / ep, spread=sent * (etp - 1),
            collectives=2.0 * (ep > 1) + 2.0 * (etp > 1),
        )  # fmt: skip
