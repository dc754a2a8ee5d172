"""Repairs of megatron-core 0.16.1: for faults without Transformer Engine and Apex, and for the needs of 2bw.

The wheel's code for torch's own AdamW and norms is little used and has faults, on CPU and on CUDA alike; these repairs
are skipped if Transformer Engine or Apex is present. Three more repairs are needed everywhere: the fused gradient
accumulation assumes that a parameter has one gradient buffer, the distributed optimizer saves tied embeddings in the
wrong place, and a load mixes up groups of parameters whose multipliers are equal. Each repair wraps one function and
states the fault.
"""

import collections
import functools
import warnings
from collections.abc import Hashable, Sequence

import torch

from megatron.backend.attention_fixes import repair_attention
from megatron.backend.replacing import replaces


def apply() -> None:
    """Apply all repairs that this installation needs. megatron.core must be importable."""
    # megatron.core calls collectives by names that newer torch has renamed, which a user cannot change.
    warnings.filterwarnings("ignore", message=r"`torch.distributed.\w+` is deprecated", category=FutureWarning)
    from megatron.core.models.gpt import gpt_model
    from megatron.core.optimizer import distrib_optimizer, optimizer
    from megatron.core.tensor_parallel import mappings, random
    from megatron.core.transformer import dot_product_attention, mlp, multi_latent_attention, torch_norm
    from megatron.core.transformer import multi_token_prediction as further_tokens
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    if not distrib_optimizer.HAVE_APEX_OR_TE:
        _repair_initial_state(optimizer)
        _repair_distributed_optimizer(distrib_optimizer.DistributedOptimizer)
    if hasattr(distrib_optimizer.DistributedOptimizer, "sharded_param_state_fully_reshardable"):  # from core 0.15 on
        _repair_places_in_buckets(distrib_optimizer.DistributedOptimizer)
    if not random.HAVE_TE:
        _repair_checkpoint_without_output(random.CheckpointWithoutOutput)
    for kind in ("FP32Optimizer", "Float16OptimizerWithFloat16Params"):
        _repair_groups_that_look_alike(getattr(optimizer, kind))
    _repair_groups_that_look_alike(distrib_optimizer.DistributedOptimizer)
    _repair_torch_norm(torch_norm.WrappedTorchNorm)
    _repair_experts(moe_utils, token_dispatcher, mlp.MLP)
    repair_attention(dot_product_attention.DotProductAttention, multi_latent_attention, has_engine=bool(random.HAVE_TE))
    _repair_parts_of_unequal_size(mappings)
    _repair_numbers_of_further_tokens(gpt_model if hasattr(gpt_model, "roll_tensor") else further_tokens)
    if not random.HAVE_TE and hasattr(further_tokens, "is_inference_column_parallel_linear"):
        # The fault (from core 0.20 on): without Transformer Engine these kinds of layers are no classes.
        further_tokens.is_inference_column_parallel_linear = lambda module: False
    follow_shown_gradients()


def follow_shown_gradients() -> None:
    """Make megatron.core's linears add to the `main_grad` that a weight has in the backward, and remember the weight.

    Later calls are no-ops. Weights of two batches, and split backwards, need this repair on every installation.
    """
    from megatron.core.tensor_parallel import layers

    linear = layers.LinearWithGradAccumulationAndAsyncCommunication
    if not getattr(linear, "follows_shown_gradients", False):
        _repair_fused_accumulation(linear)
        linear.follows_shown_gradients = True


def complete_optimizer_state(optimizer: torch.optim.Optimizer) -> None:
    """Create the state that the optimizer would create in its first step, for each parameter that lacks it.

    This works for torch's Adam, AdamW and SGD, for any optimizer with Adam's state, and for those with a method
    `make_state`; others are left unchanged.
    """
    if hasattr(optimizer, "make_state"):
        for group in optimizer.param_groups:
            for param in group["params"]:
                optimizer.make_state(param, group)
        return
    if has_adams_state(optimizer):
        names = ("exp_avg", "exp_avg_sq")
    elif isinstance(optimizer, torch.optim.SGD):
        names = ("momentum_buffer",) if optimizer.defaults["momentum"] else ()
    else:
        return
    for group in optimizer.param_groups:
        for param in group["params"]:
            state = optimizer.state[param]
            if has_adams_state(optimizer):
                state.setdefault("step", torch.tensor(0.0))
            for name in names:
                if state.get(name) is None:
                    state[name] = torch.zeros_like(param.data)


TORCHS_ADAM = (torch.optim.Adam, torch.optim.AdamW)  # AdamW is an Adam since torch 2.7


def has_adams_state(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer keeps `step`, `exp_avg` and `exp_avg_sq` of each parameter.

    This holds for torch's Adam, and for optimizers whose attribute `adams_state` is true.
    """
    return isinstance(optimizer, TORCHS_ADAM) or getattr(optimizer, "adams_state", False)


def _repair_initial_state(optimizer_module) -> None:
    """Create the whole optimizer state when a checkpoint is loaded.

    The fault: loading first creates the optimizer's state. For Adam it lacks the counter `step`, so the next step fails
    if the checkpoint has no counter; for SGD it calls None.
    """

    @replaces(optimizer_module.MegatronOptimizer, "__init__")
    def initialise_with_state(initialise, self, optimizer, config, init_state_fn=None):
        def init_state(inner_optimizer, *args):
            complete_optimizer_state(inner_optimizer)

        torch_optimizer = isinstance(optimizer, (*TORCHS_ADAM, torch.optim.SGD))
        initialise(self, optimizer, config, init_state if torch_optimizer else init_state_fn)


def _repair_distributed_optimizer(optimizer_class) -> None:
    """Handle the step counter that torch's AdamW keeps for each parameter.

    The faults: state_dict() reads the counter, which exists only after the first step; load_state_dict() puts one
    shared tensor into all states, so that each of n parameters advances it and the second step after a resume is
    silently wrong; and loading a parameter's state looks for a saved `step`, which is never saved per parameter.
    """

    @replaces(optimizer_class, "state_dict")
    def state_dict_with_step(state_dict, self):
        complete_optimizer_state(self.optimizer)
        if not any(group["params"] for group in self.optimizer.param_groups):
            # A rank without parameters has no counter to report; loading merges in the counter of the other ranks.
            return _state_dict_of_nothing(self)
        return state_dict(self)

    @replaces(optimizer_class, "load_state_dict")
    def load_state_dict_with_own_steps(load_state_dict, self, state):
        load_state_dict(self, state)
        for param_state in self.optimizer.state.values():
            param_state["step"] = param_state["step"].detach().clone()

    @replaces(optimizer_class, "_set_main_param_and_optimizer_states")
    def set_states_without_step(set_states, self, model_param, tensors):
        group_index, group_order = self.model_param_group_index_map[model_param]
        main_param = self.optimizer.param_groups[group_index]["params"][group_order]
        # A counter in the loaded state is ignored: in the dp_reshardable format it is this run's own, before loading.
        return set_states(self, model_param, {**tensors, "step": self.optimizer.state[main_param]["step"]})


def places_among_alike(keys: Sequence[Hashable]) -> list[int]:
    """For each key, the number of equal keys before it."""
    seen: collections.Counter = collections.Counter()
    places = []
    for key in keys:
        places.append(seen[key])
        seen[key] += 1
    return places


def _repair_groups_that_look_alike(optimizer_class) -> None:
    """Load each group of parameters from its own saved group.

    The fault: a group is identified by its multipliers alone. Groups that differ in something else, such as the
    learning rate of `--decoupled-lr`, are taken for one group: with masters the load fails, and the distributed
    optimizer silently trains all of these groups with the options of the last one. Groups have the same order in every
    run with the same flags. So the key of a group is completed by the number of groups before it that look alike.
    """

    @replaces(optimizer_class, "load_state_dict")
    def load_with_numbered_groups(load, self, state):
        saved = state.get("optimizer", state.get("optimizer_state_dict", state))
        own = [] if self.is_stub_optimizer else self.optimizer.param_groups
        if "param_groups" not in saved or any("lr_mult" not in group for group in (*own, *saved["param_groups"])):
            return load(self, state)
        given = saved["param_groups"]
        saved["param_groups"] = [dict(group) for group in given]
        for groups in (own, saved["param_groups"]):
            keys = [tuple(group.get(name) for name in _KEY_OF_GROUP) for group in groups]
            for group, place in zip(groups, places_among_alike(keys), strict=True):
                group["lr_mult"] = (group["lr_mult"], place)
        try:
            return load(self, state)
        finally:
            saved["param_groups"] = given
            for group in () if self.is_stub_optimizer else self.optimizer.param_groups:
                if isinstance(group["lr_mult"], tuple):
                    group["lr_mult"] = group["lr_mult"][0]


_KEY_OF_GROUP = ("wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr")


def _repair_places_in_buckets(optimizer_class) -> None:
    """Save the state of a buffer's buckets from positions without padding.

    The fault: for a checkpoint that other degrees can load, the state of a buffer's buckets is laid end to end without
    the padding at the buckets' ends, and then cut at positions that count the padding. Tied embeddings on a pipeline
    have a bucket of their own, so their saved state (master weights, moments) is shifted by the padding of the bucket
    before, and ends in zeros: "param range exceeds unpadded buffer ... can lead to data corruption".
    """
    if "padding_adjustment" in optimizer_class.sharded_param_state_fully_reshardable.__code__.co_varnames:
        return  # core 0.20 subtracts the padding itself

    @replaces(optimizer_class, "sharded_param_state_fully_reshardable")
    def save_from_right_places(save, self, *args, **kwargs):
        padded = [buffer.param_index_map for buffer in self.buffers]
        try:
            for buffer in self.buffers:
                buffer.param_index_map = _places_without_padding(buffer)
            return save(self, *args, **kwargs)
        finally:
            for buffer, places in zip(self.buffers, padded, strict=True):
                buffer.param_index_map = places


def _places_without_padding(buffer) -> dict:
    """Parameter -> (start, end, bucket) in a buffer whose buckets are laid end to end without padding."""
    shifts, unpadded = [], 0
    for bucket in buffer.buckets:
        shifts.append(bucket.offset - unpadded)
        unpadded += bucket.numel_unpadded
    return {
        param: (start - shifts[bucket], end - shifts[bucket], bucket)
        for param, (start, end, bucket) in buffer.param_index_map.items()
    }


def _state_dict_of_nothing(optimizer) -> dict:
    inner = optimizer.optimizer.state_dict()
    groups = [{k: v for k, v in group.items() if k != "params"} | {"step": 0.0} for group in inner["param_groups"]]
    state = {"optimizer": {"param_groups": groups}}
    if optimizer.grad_scaler:
        state["grad_scaler"] = optimizer.grad_scaler.state_dict()
    return state


def _repair_checkpoint_without_output(checkpoint_class) -> None:
    """Pass `fp8=False` on as None.

    The fault: `fp8=False` is taken for "FP8 is on" (the test is `is not None`), and Transformer Engine is called.
    """

    @replaces(checkpoint_class, "__init__")
    def initialise_with_flag(initialise, self, fp8=False):
        initialise(self, fp8=fp8 or None)


def _repair_torch_norm(norm_class) -> None:
    """Allow torch's norms under sequence parallelism, with their parameters marked `sequence_parallel`.

    The fault: megatron.core refuses these norms, although only the mark is missing. Each rank sees a part of the
    sequence, so the gradients of a norm must be summed over the tensor-parallel group, which megatron.core does for
    marked parameters.
    """
    build = norm_class.__new__

    def build_for_sequence_parallel(cls, config, *args, **kwargs):
        if not config.sequence_parallel:
            return build(cls, config, *args, **kwargs)
        config.sequence_parallel = False
        try:
            norm = build(cls, config, *args, **kwargs)
        finally:
            config.sequence_parallel = True
        for param in norm.parameters():
            param.sequence_parallel = True
        return norm

    norm_class.__new__ = build_for_sequence_parallel


def _repair_experts(moe_utils, token_dispatcher, mlp: type[torch.nn.Module]) -> None:
    """Make mixtures of experts work without Transformer Engine, and on a CPU.

    The faults: without Transformer Engine the router tests whether `te_general_gemm` is None, and the name is missing;
    on a CPU the numbers of tokens that experts exchange stay tensors although arrays are asked for; and the bias of an
    expert is added in place to the output of its second linear layer, which autograd forbids where one tensor rank
    returns that output as it came in.
    """
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None

    @replaces(token_dispatcher, "maybe_move_tensor_to_cpu")
    def move_as_asked(move, tensor, as_numpy=False, record_stream=False):
        moved = move(tensor, as_numpy, record_stream)
        return moved.numpy() if as_numpy and torch.is_tensor(moved) else moved

    @replaces(mlp, "forward")
    def forward_with_bias(forward, self, hidden_states, per_token_scale=None, **others):
        if per_token_scale is None or not self.config.add_bias_linear:
            return forward(self, hidden_states, per_token_scale, **others)
        hook = self.linear_fc2.register_forward_hook(lambda module, inputs, output: (output[0].clone(), output[1]))
        try:
            return forward(self, hidden_states, per_token_scale, **others)
        finally:
            hook.remove()


def _repair_parts_of_unequal_size(mappings) -> None:
    """Gather and reduce parts of unequal size over gloo, as the tokens of experts on several tensor ranks are.

    The fault: gloo can only gather parts of equal size. So all parts are padded to the size of the largest.
    """

    def is_plain(group, sizes) -> bool:
        return sizes is None or group.size() == 1 or "nccl" in torch.distributed.get_backend(group)

    @replaces(mappings, "_gather_along_first_dim")
    def gather_filled(gather, input_, group, output_split_sizes=None, use_global_buffer=False):
        if is_plain(group, output_split_sizes):
            return gather(input_, group, output_split_sizes, use_global_buffer)
        most = max(1, *output_split_sizes)
        filled = torch.cat([input_, input_.new_zeros(most - len(input_), *input_.shape[1:])])
        parts = gather(filled, group).split(most)
        return torch.cat([part[:size] for part, size in zip(parts, output_split_sizes, strict=True)])

    @replaces(mappings, "_reduce_scatter_along_first_dim")
    def reduce_scatter_filled(reduce_scatter, input_, group, input_split_sizes=None, use_global_buffer=False):
        if is_plain(group, input_split_sizes):
            return reduce_scatter(input_, group, input_split_sizes, use_global_buffer)
        most = max(1, *input_split_sizes)
        parts = [
            torch.cat([part, part.new_zeros(most - len(part), *part.shape[1:])])
            for part in input_.split(input_split_sizes)
        ]
        return reduce_scatter(torch.cat(parts), group)[: input_split_sizes[group.rank()]].clone()


def _repair_numbers_of_further_tokens(losses) -> None:
    """Divide the losses of multi-token prediction by the number of tokens of whole sequences.

    The fault: where ranks share sequences, each rank divides the losses of its tokens by their number, and gradients
    are averaged over these ranks. But the ranks have unequal numbers of tokens with such a loss: the last tokens of a
    sequence, which have no later token, are on the first rank, and masks leave out others. So the result is not the
    mean over tokens. A rank, or a microbatch, without any such token divides by 0.
    """

    @replaces(losses, "roll_tensor")
    def roll_and_count(roll, tensor, *args, cp_group=None, **options):
        rolled, count = roll(tensor, *args, cp_group=cp_group, **options)
        shares = cp_group is not None and cp_group.size() > 1
        if shares and count is not None and tensor.is_floating_point():  # the mask, not labels
            torch.distributed.all_reduce(count, group=cp_group)
            count = count / cp_group.size()  # gradients are then averaged over as many ranks
        return rolled, None if count is None else count.masked_fill(count == 0, 1)


def _repair_fused_accumulation(linear: type[torch.autograd.Function]) -> None:
    """Make fused gradient accumulation add to the `main_grad` that the parameter has in the backward.

    The fault: it adds to the `main_grad` that the weight had in the *forward*, and sets that buffer again. Under 2bw a
    batch's gradient buffer is chosen at its first backward, so forwards made before would make their backwards add to
    the buffer of the batch before, which the chain is reducing. The parameter itself is remembered, since the weight
    that the backward unpacks may be another tensor: with captured activations it is a detached copy without attributes.
    For such a copy the wheel's backward returns no gradient, so DDP's hook has nothing to add, which is right: the
    kernel has added the gradient.

    Other parts of megatron.core that keep a `main_grad` are not used here: its pipeline schedules, which defer the
    embedding's weight gradients; its CUDA graphs; its FSDP. Transformer Engine's layers are not repaired: training
    turns fusion off for versions with the fault (`megatron.trainer.arguments.platform`).
    """
    forward, backward = linear.forward, linear.backward

    @functools.wraps(forward)
    def forward_with_parameter(ctx, input, weight, *args):
        ctx.parameter = weight
        return forward(ctx, input, weight, *args)

    @functools.wraps(backward)
    def backward_into_shown_gradient(ctx, grad_output):
        if ctx.gradient_accumulation_fusion:
            ctx.main_grad = getattr(ctx.parameter, "main_grad", None)
        return backward(ctx, grad_output)

    linear.forward = staticmethod(forward_with_parameter)
    linear.backward = staticmethod(backward_into_shown_gradient)
