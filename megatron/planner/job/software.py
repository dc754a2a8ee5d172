"""Training software, as far as memory and time depend on it: precision, kernels, and overlap."""

from dataclasses import dataclass, replace

from megatron.planner.job.configuration import Configuration
from megatron.planner.memory.activations import ActivationSetting
from megatron.planner.memory.parameters import TrainingState
from megatron.planner.memory.recompute import EVERY_OTHER_PRODUCT, Recompute, RecomputeScope

ALL_TO_ALL, FLEX = "alltoall", "flex"
_LAYERS = {"transformer_engine": "TE"}  # in tables
_FLASH_BACKENDS = ("auto", "flash", "fused")


def has_flash_attention(transformer_impl: str, attention_backend: str, element_bytes: int) -> bool:
    """Return whether attention never writes its scores to memory.

    The kernels are those of Transformer Engine and take only 16-bit numbers.

    Args:
        transformer_impl: the resolved value of `--transformer-impl`.
        attention_backend: the value of `--attention-backend`.
        element_bytes: bytes of an element of an activation.
    """
    return transformer_impl == "transformer_engine" and attention_backend in _FLASH_BACKENDS and element_bytes == 2


@dataclass(frozen=True, kw_only=True)
class ShardingRuntime:
    """How training software gathers and keeps split weights.

    Attributes:
        keeps_shards: ranks keep their shard of the weights in the dtype of matrix products, beside the masters. If not,
            the shard is cast for each gather.
        by_matrix: each matrix is gathered and reduced in a separate collective, and only some matrices live at once. If
            not, a whole layer is gathered while the layer before is computed.
        gathers_to_recompute: a whole layer that is recomputed is gathered for the recompute, and again for the
            backward.
        copies: gathered data arrive in one buffer, and weights are copied out of it.
        by_parts: each replica's part in a collective is a separate tensor, which the host makes and copies with one
            kernel. The host waits for the device before, so nothing hides this time.
        keeps_last: the last layer stays gathered from its forward to its backward, which follows at once.
        keeps_batch: with stage 2, weights stay gathered for all microbatches of a batch. If not, for one microbatch.
    """

    keeps_shards: bool = True
    by_matrix: bool = False
    gathers_to_recompute: bool = False
    copies: bool = False
    by_parts: bool = False
    keeps_last: bool = True
    keeps_batch: bool = True


MEGATRON_FSDP = ShardingRuntime()
"""Megatron-Core's FSDP: 16-bit weights and FP32 masters are both sharded. Weights are views of the gathered buffer."""

FSDP2 = ShardingRuntime(keeps_shards=False, copies=True, keeps_batch=False)
"""PyTorch's `fully_shard`, as torchtitan uses it. Each layer is a unit, and so are embedding and head together. Weights
that stay gathered after a forward are split again after its backward."""

DEEPSPEED = ShardingRuntime(by_matrix=True, gathers_to_recompute=True, copies=True, by_parts=True, keeps_last=False)
"""DeepSpeed of July 2021 (commit 1ff2574): each parameter is gathered separately, before its module runs, and released
after the module. `_allgather_param` synchronizes with the device and cuts the buffer into a list with each replica's
part, and `torch.distributed.all_gather` copies part by part. Gradients are treated in the same way."""


@dataclass(frozen=True, kw_only=True)
class Software:
    """Training software. The defaults are this project's trainer with 16 bits and unfused attention.

    Attributes:
        element_bytes: bytes of an element of a weight or an activation.
        gradient_bytes: bytes of an element of a gradient that is kept and reduced.
        transformer_impl: the implementation of layers, a value of `--transformer-impl`; only for software with that
            flag.
        flash_attention: attention never writes scores to memory. If not, matrix products and a separate softmax write
            them.
        fuses_softmax: unfused attention uses Megatron's kernel that scales, masks and normalizes 16-bit scores in one
            pass. The kernel requires that 4 divides the number of sequences times heads of a rank.
        fuses_gradient_accumulation: matrix products add weight gradients to their buffer. If not, a separate pass does.
        overlaps_tensor: the backward of a matrix split by columns sums its input's gradient over tensor ranks while
            the weight's gradient is computed.
        overlaps_transfers: stages compute while activations and gradients move between them.
        splits_transfers: each tensor rank sends a part of an activation that all of them hold.
        keeps_gradient_copies: the optimizer's FP32 copies of gradients stay in memory from step to step.
        overlaps_gradients: gradients are reduced over replicas beside the last backward (time/links.py), where
            batches drain.
        overlaps_weights: weights of the distributed optimizer are gathered beside the first forward, where batches
            drain.
        own_communicators: ranks have the communicators of this project's runtime, over NCCL on CUDA devices.
        fuses_elementwise: norms, residuals, rotary embeddings and activations are fused or compiled kernels. If not,
            each operator of PyTorch is a pass.
        keeps_every_other_product: the recompute scope `attention` means torchtitan's selective recomputation by
            operators: the results of attention and of every other matrix product are kept, all else is recomputed.
        fuses_loss: the loss needs only the softmax of the logits. If not, as in PyTorch, it also needs FP32 gradients
            of the logits.
        compiles_loss: torch.compile fuses the loss, too, where it is used.
        operands_wait: collectives of tensor ranks hold their operands on a separate stream (estimate.py).
        dispatcher: how copies of tokens get to experts: `alltoall` (each copy separately) or `flex` (DeepEP, HybridEP:
            one copy for a node or rank, however many of its experts need the token).
        overlaps_experts: copies of tokens are sent beside the computation of another microbatch in the other direction
            (`--overlap-moe-expert-parallel-comm`).
        cuda_graphs: whole layers or iterations are CUDA graphs, so that the host issues none of their kernels.
        fp8_weights: with `fp8`, weights of linears are kept and gathered only in FP8 (`--fp8-param-gather`).
        sharding: how the software gathers weights that are split over replicas.
        fp8: linears of layers multiply in FP8, as in Transformer Engine. All else is in `element_bytes` (refusals.py).
        flash_attention_2: flash attention uses FlashAttention-2's kernels, as in PyTorch, even on later GPUs.
        overlaps_in_pieces: with split sequences, products of layers are computed in pieces, while inputs of other
            pieces are gathered and their results scattered, by Transformer Engine's user buffers (`--tp-comm-overlap`).
        blocks_launches: the host waits for each kernel before it issues the next (CUDA_LAUNCH_BLOCKING=1).
        sums_beside_gradients: if gradients are added up in FP32, the 16-bit gradients of a backward are kept beside
            these sums. Each replica holds both completely, however the optimizer is divided (DeepSpeed's
            BF16_Optimizer).
        gathers_keys: context parallel ranks gather keys and values of whole sequences before attention. If not, they
            pass keys and values round a ring beside attention.
    """

    element_bytes: int = 2
    gradient_bytes: int = 4
    transformer_impl: str = "local"
    flash_attention: bool = False
    fuses_softmax: bool = True
    fuses_gradient_accumulation: bool = True
    overlaps_tensor: bool = True
    overlaps_transfers: bool = True
    splits_transfers: bool = False
    overlaps_gradients: bool = False
    overlaps_weights: bool = False
    keeps_gradient_copies: bool = False
    own_communicators: bool = False
    fuses_elementwise: bool = True
    keeps_every_other_product: bool = False
    fuses_loss: bool = True
    compiles_loss: bool = False
    operands_wait: bool = True
    dispatcher: str = ALL_TO_ALL
    overlaps_experts: bool = False
    cuda_graphs: bool = False
    fp8_weights: bool = False
    sharding: ShardingRuntime = MEGATRON_FSDP
    fp8: bool = False
    gathers_keys: bool = False
    blocks_launches: bool = False
    sums_beside_gradients: bool = False
    overlaps_in_pieces: bool = False
    flash_attention_2: bool = False

    @property
    def layers(self) -> str:
        """The layers and the attention, as the cell of a table, such as `TE, flash`."""
        return f"{_LAYERS.get(self.transformer_impl, self.transformer_impl)}, {self.attention}"

    @property
    def attention(self) -> str:
        """The kind of attention: `flash` or `unfused`."""
        return "flash" if self.flash_attention else "unfused"

    def of(self, configuration: Configuration) -> "Software":
        """Return the software that trains a configuration. A subclass may return software with other layers."""
        return self

    def activation_setting(self, configuration: Configuration) -> ActivationSetting:
        return ActivationSetting(
            tensor=configuration.tensor,
            micro_batch_size=configuration.micro_batch_size,
            element_bytes=self.element_bytes,
            residual_bytes=self.element_bytes,
            sequence_parallel=configuration.sequence_parallel and configuration.tensor > 1,
            saves_scores=not self.flash_attention,
            recompute=self._recompute(configuration),
            fuses_loss=self.fuses_loss,
            fp8=self.fp8,
            context=configuration.context,
            gathers_keys=self.gathers_keys,
            experts=configuration.expert_degrees,
        )

    def _recompute(self, configuration: Configuration) -> Recompute:
        if configuration.is_hosted:
            return Recompute(whole_stage=True)
        if configuration.recompute is RecomputeScope.ATTENTION and self.keeps_every_other_product:
            return Recompute(modules=frozenset({EVERY_OTHER_PRODUCT}))
        return Recompute.of(configuration.recompute)

    def training_state(self, configuration: Configuration) -> TrainingState:
        return TrainingState(
            weight_bytes=self.element_bytes,
            gradient_bytes=self.gradient_bytes,
            distributed_optimizer=configuration.distributed_optimizer,
            data=configuration.replicas,
            expert_data=configuration.expert_replicas,
            fp8_weights=self.fp8_weights,
            keeps_gradient_copies=self.keeps_gradient_copies,
            sums_beside_gradients=self.sums_beside_gradients and self.gradient_bytes > self.element_bytes,
        )


MEGATRON_CORE = Software()

MEGATRON_V3 = Software(gradient_bytes=2, overlaps_transfers=False, splits_transfers=True)
"""Megatron-LM v3 (2022), measured by BPipe and Korthikanti et al., in FP16 with 20 bytes per parameter."""

MEGATRON_2021 = Software(
    gradient_bytes=2, fuses_gradient_accumulation=False, overlaps_tensor=False, overlaps_transfers=False,
    splits_transfers=True,
)  # fmt: skip
"""Megatron-LM of Narayanan et al. 2021: tensor ranks wait for every sum, and a separate pass adds weight gradients."""

MEGATRON_2020 = Software(
    gradient_bytes=2, fuses_gradient_accumulation=False, overlaps_tensor=False, overlaps_transfers=False,
    keeps_gradient_copies=True,
)  # fmt: skip
"""Megatron-LM of 2020, without pipelines. Its optimizer, from Apex, allocates FP32 copies of gradients only once."""

MEGATRON_DEEPSPEED = replace(MEGATRON_2021, sums_beside_gradients=True)
"""Microsoft's Megatron-DeepSpeed of 2021, measured by vTrain. It is Megatron-LM of that time except for bfloat16."""

BIGSCIENCE = replace(MEGATRON_DEEPSPEED, blocks_launches=True)
"""Megatron-DeepSpeed as run by BigScience in 2022: jobs on many nodes hung unless the host waited for each kernel."""

PIPEDREAM_2BW = Software(
    gradient_bytes=2, fuses_softmax=False, fuses_gradient_accumulation=False, overlaps_tensor=False,
    keeps_gradient_copies=True,
)  # fmt: skip
"""PipeDream-2BW's software, adapted from Megatron-LM of 2020 (section 5). It computes while it sends."""

TORCHTITAN = Software(
    flash_attention=True, flash_attention_2=True, fuses_softmax=False, fuses_gradient_accumulation=False,
    overlaps_tensor=False, fuses_elementwise=False, keeps_every_other_product=True, fuses_loss=False,
    operands_wait=False, sharding=FSDP2,
)  # fmt: skip
"""torchtitan of December 2024, eager. Its norms and rotary embeddings are operators of PyTorch (norms.py, model.py).
Gradients are reduced in FP32 (`mixed_precision_reduce`). The compute stream waits for its functional collectives."""

TORCHTITAN_2025 = replace(TORCHTITAN, compiles_loss=True)
"""torchtitan of June 2025, whose loss is compiled (components/loss.py)."""
