"""Flags that place the model on ranks, and flags of the pipeline."""

from collections import ChainMap
from dataclasses import dataclass

from megatron.pipeline.program.lane_order import DEVICE, HOST
from megatron.pipeline.schedules import PRESETS
from megatron.trainer.arguments.flags.specification import Group, Role, negation, option, switch

AUTO = "auto"
"""The value of --pipeline-schedule for a program that is made at the start of the job."""
_DEGREE, _PREDICTION = Role.CONFIGURATION | Role.DEGREES, Role.CONFIGURATION | Role.PREDICTION


@dataclass(frozen=True, init=False, repr=False, eq=False)
class Pipeline:
    """The pipeline's program. These flags are this project's own."""

    pipeline_schedule: str = option(
        "flush",
        "gpipe: all forwards, then all backwards. flush: 1F1B with a flush after each batch, exact. 2bw: 1F1B "
        "without flushes on two weight versions, a batch uses the weights of the batch before. pipedream: weight "
        "stashing, one update a microbatch. interleaved: Megatron-LM's order for several stages on each rank, "
        "exact; the default where the flags ask for several. bpipe: flush with saved activations balanced over "
        "pairs of stages, as --balance-activations does. zb-h1: flush whose backwards are split, so that weight "
        "gradients fill bubbles; exact. zb-h2: the same with twice the memory and a smaller bubble. interleaved-zb: "
        "interleaved with split backwards. zbv: two stages on each rank in a V, which leaves next to no bubble. "
        "v-half, v-min: zbv with about half of its memory, and less. docs/zero_bubble.md. l2l: weights, gradients and "
        "optimizer state on the host, weights of few stages, each a layer, on the device; exact. docs/l2l.md. auto: "
        "the program that the costs of --pipeline-profile, or of the job's first batches, and --pipeline-memory-limit "
        "ask for; exact, unless --pipeline-weights says otherwise. docs/synthesis.md.",
        choices=ChainMap({AUTO: None}, PRESETS).keys(),  # a view, since users register more
    )
    pipeline_weights: str = option(
        "flush",
        "With auto: which weights a batch uses. flush: the newest, since batches drain, exact. 2bw: those of the batch "
        "before, as --pipeline-schedule 2bw does, without drains.",
        choices=("flush", "2bw"),
    )
    pipeline_profile: str | None = option(
        None,
        "With auto: where the costs come from: a profile of tools/profile_model.py, or the measured.json of a run with "
        "--pipeline-timeline, whose stages the program then has. Default: the job begins with a named order, measures "
        "its own batches, and goes on with the program for these costs as soon as it is found.",
        metavar="FILE",
    )
    pipeline_measured_batches: int = option(
        5,
        "With auto and without --pipeline-profile: how many batches are measured, after the first one, whose times are "
        "unlike the others'.",
    )
    pipeline_memory_limit: float | None = option(
        None,
        "With auto: the most memory that the job may take on a device, in GiB, as --dry-run estimates it. Default: as "
        "many microbatches on each rank as there are ranks, which flush holds on the first one.",
        metavar="GIB",
    )
    pipeline_synthesis_seconds: float = option(
        30.0, "With auto: how long to search, in seconds. The search ends sooner where no program can be faster."
    )
    pipeline_program: str | None = option(
        None,
        "Train with the rows of this CSV file, one of instructions for each rank, in place of a schedule. They run "
        "for any number of batches: how they repeat is found, and proved. docs/programs.md.",
        metavar="FILE",
    )
    pipeline_extra_warmup: bool = switch(
        "Stage s starts with 2(p-s-1) forwards instead of p-s-1: hides the transfer latency, for more saved "
        "activations."
    )
    pipeline_recompute: bool = switch(
        "Keep only a stage's input per microbatch and recompute its forward before its backward, as instructions "
        "of the program. With auto: those microbatches for which --pipeline-memory-limit leaves no room."
    )
    pipeline_moves: str = option(
        "none",
        "With auto and --pipeline-memory-limit: where saved activations may wait for which the limit leaves no room: "
        "on the host, on the other rank of a pair (stages s and p-1-s), or on the best of these. docs/synthesis.md.",
        choices=("none", "host", "pair", "best"),
    )
    balance_activations: bool = switch(
        "BPipe: stages s < (p-2)/2 lend saved activations to stage p-1-s while both compute, and no stage holds "
        "more than ceil((p+2)/2) microbatches. With flush, 2bw and interleaved; where nothing has to move, the run "
        "says so and goes on without."
    )
    optimistic_steps: bool = switch(
        "With a schedule that flushes: step as soon as a rank has its own gradients, as if nothing overflowed or were "
        "clipped, and begin the next batch while the norm is reduced. Where it was not so, all ranks go back. The same "
        "losses and weights to the last bit, for a second copy of the optimizer's state. docs/optimistic_steps.md."
    )
    pipeline_offload_activations: int | None = option(
        None,
        "Keep at most N microbatches of saved activations on the device of each rank, over all its stages (3 or more); "
        "the others wait in the host's memory, to which they are copied, and back, beside computations. With gpipe, "
        "flush, 2bw and interleaved. docs/schedules_bpipe.md.",
        metavar="N",
    )
    pipeline_2bw_single_gradient_buffer: bool = switch(
        "With 2bw: one gradient buffer instead of two; clipping then uses the norm of the batch before, and a "
        "batch's first backward waits until the gradients of the batch before are reduced.",
        roles=Role.CONFIGURATION,
    )
    pipeline_2bw_provisional: str = option(
        "off",
        "With 2bw: compute a batch at a prediction of its weights instead of the weights before, so that training "
        "converges like flush. The prediction takes the step to come with those microbatches of the batch before "
        "that are done. stage: all that each stage has done. uniform: the same number on every stage, so that "
        "numbers do not depend on the stages. docs/provisional.md.",
        choices=("off", "stage", "uniform"),
        roles=_PREDICTION,
    )
    pipeline_2bw_provisional_microbatches: int | None = option(
        None,
        "With --2bw-provisional uniform: how many microbatches of a replica each prediction reads, at most m-p+1. 0: "
        "none, --2bw-error-feedback.",
        roles=_PREDICTION,
    )
    pipeline_2bw_error_feedback: bool = switch(
        "With 2bw: compute a batch at the weights before with their last update taken once more, in the place of the "
        "one that is missing (docs/error_feedback.md).",
        roles=_PREDICTION,
    )
    pipeline_2bw_provisional_reduce: bool = switch(
        "With --2bw-provisional and replicas: predict from the mean over the replicas, for one more reduction of "
        "the gradients in each batch, which nothing hides on the first stage.",
        roles=_PREDICTION,
    )
    l2l_update: str = option(
        "auto",
        "With l2l: when the host updates a stage. eager: as soon as it has its gradients. deferred: when the norm "
        "of all gradients is known, by which they are clipped. auto: eager where nothing depends on the norm.",
        choices=("auto", "eager", "deferred"),
    )
    l2l_resident_stages: int = option(2, "With l2l: the most stages of a rank whose weights are on the device at once.")
    l2l_stash: str = option(
        DEVICE,
        "With l2l: where the inputs of stages wait for their recompute. device: there, a batch for each stage. "
        "host: they leave and come back, and the device's memory does not grow with depth.",
        choices=(DEVICE, HOST),
    )
    l2l_fetch: str = option(
        "whole",
        "With l2l and replicas on a node, which share the host's store: what each copies to its device. whole: the "
        "weights of a stage. shares: its part of them, and the devices gather the whole from one another, which is "
        "for GPUs with NVLink or with one way to the host.",
        choices=("whole", "shares"),
    )
    pipeline_timeline: str | None = option(
        None,
        "Trace the last iterations and write the timeline here: planned above measured (PNG) and Perfetto JSON.",
        metavar="DIR",
        roles=Role.SHORT_RUN,
    )
    pipeline_timeline_iterations: int = option(
        4, "Number of iterations that --pipeline-timeline traces.", roles=Role.SHORT_RUN
    )


PIPELINE = Group.of(Pipeline, "pipeline", Role.CONFIGURATION)


@dataclass(frozen=True, init=False, repr=False, eq=False)
class Distributed:
    """Degrees of parallelism. Data parallel size = world size / (tensor x context x pipeline)."""

    tensor_model_parallel_size: int = option(1, "Ranks that share each layer (t).", roles=_DEGREE)
    pipeline_model_parallel_size: int = option(1, "Pipeline stages (p).", roles=_DEGREE)
    context_parallel_size: int = option(
        1, "Ranks that share the sequences of a microbatch (cp). docs/context_parallel.md.", roles=_DEGREE
    )
    cp_comm_type: list[str] = option(
        ["p2p"],
        "How context parallel ranks attend to each other's keys. all_gather: they gather keys and values. a2a: they "
        "trade parts of sequences for heads, before and after. p2p: keys and values go round a ring, which is "
        "Transformer Engine's; local layers gather.",
        nargs="+",
        roles=Role.NONE,
    )
    num_layers_per_virtual_pipeline_stage: int | None = option(
        None, "Layers of each stage where a rank has several (v); v follows from it.", roles=_DEGREE
    )
    num_virtual_stages_per_pipeline_rank: int | None = option(
        None,
        "Stages of each rank (v): its share of the layers is cut into v parts, dealt out in turn. zbv has 2.",
        roles=_DEGREE,
    )
    microbatch_group_size_per_virtual_pipeline_stage: int | None = option(
        None,
        "Microbatches that a rank takes through one of its stages before it turns to the next; at least the "
        "pipeline parallel size, which is the default.",
        roles=_DEGREE,
    )
    pipeline_model_parallel_layout: str | None = option(
        None,
        "What each stage holds, divided by |: E embedding, t layer, m layer of multi-token prediction, L loss; t*3 is "
        "ttt and (tt|)*2 is tt|tt|. "
        "The schedule says which rank has which stages; interleaved deals them out in turn. For example "
        "'Et|(tt|)*2tL'.",
        metavar="LAYOUT",
        roles=_DEGREE,
    )
    num_layer_list: str | None = option(
        None,
        "MindSpeed-LLM's way to say the layers of each stage: 2,3 is --pipeline-model-parallel-layout Ett|tttL.",
        metavar="N,N,...",
        roles=Role.CONFIGURATION,
    )
    decoder_first_pipeline_num_layers: int | None = option(
        None,
        "Layers on the first rank of the pipeline; the others share the rest. Where a schedule does not deal out "
        "its stages in turn: in the first stage.",
        roles=_DEGREE,
    )
    decoder_last_pipeline_num_layers: int | None = option(
        None,
        "Layers on the last rank of the pipeline; the others share the rest. Where a schedule does not deal out "
        "its stages in turn: in the last stage.",
        roles=_DEGREE,
    )
    account_for_embedding_in_pipeline_split: bool = switch(
        "Count the embedding as a layer when splitting.", roles=_DEGREE
    )
    account_for_loss_in_pipeline_split: bool = switch("Count the loss as a layer when splitting.", roles=_DEGREE)
    sequence_parallel: bool = switch(
        "Split activations along the sequence between tensor parallel ranks.", roles=Role.CONFIGURATION
    )
    rank_mapping: str = option(
        "standard",
        "Which GPU runs which rank. standard: as the launcher counts. pair-adjacent: tensor ranks together, then "
        "stages s and p-1-s, then replicas. optimized: least transfer time over --rank-topology. Or a JSON or YAML "
        "file with the rank of each slot. See placement.md.",
        metavar="MAPPING",
        roles=Role.CONFIGURATION,
    )
    rank_topology: str | None = option(
        None,
        "JSON or YAML file with the cluster's nodes, GPUs and bandwidths; see placement.md.",
        metavar="FILE",
        roles=Role.CONFIGURATION,
    )
    distributed_backend: str = option(None, "Default: nccl on CUDA, gloo elsewhere.", choices=("nccl", "gloo"))
    distributed_timeout_minutes: float = option(
        10, "A collective or transfer that takes longer ends the job, naming who waits for whom.", roles=Role.SHORT_RUN
    )
    go_on_without_lost_ranks: bool = switch(
        "If ranks are lost, the others go on: ranks with the same stages in other replicas take the lost ranks' "
        "microbatches, and the batch in flight is repeated, exactly. Ranks that compute layers together (tensor, "
        "context and expert parallelism) are lost together. Start with tools/launch.py. docs/recovery.md."
    )
    failure_timeout: float = option(
        10.0,
        "With --go-on-without-lost-ranks: seconds of silence after which a rank counts as lost. Who is slow but alive "
        "stays.",
        roles=Role.SHORT_RUN,
    )
    minimum_speed: float = option(
        0.0,
        "With --go-on-without-lost-ranks: end the job when the program without the lost ranks has less than this share "
        "of the speed before, as simulated; a number from 0 to 1.",
        roles=Role.SHORT_RUN,
    )
    redundant_optimizer: bool = switch(
        "With --use-distributed-optimizer and --go-on-without-lost-ranks: a peer keeps a copy of each rank's shard of "
        "the optimizer on its host, from which a lost shard is rebuilt. docs/recovery_optimizer.md."
    )
    local_rank: int = option(
        None, "Accepted; LOCAL_RANK from the environment is used.", aliases=("--local_rank",), roles=Role.SHORT_RUN
    )
    use_distributed_optimizer: bool = switch(
        "Shard optimizer state over data parallel ranks; with --optimizer muon each owns whole parameters.",
        roles=Role.CONFIGURATION,
    )
    overlap_grad_reduce: bool = switch(
        "Accepted: the program's REDUCE_GRAD reduces gradients, beside compute where the schedule has slack."
    )
    overlap_param_gather: bool = switch(
        "Accepted: parameters of the distributed optimizer are gathered in the program's STEP. Needs "
        "--use-distributed-optimizer and --overlap-grad-reduce.",
        roles=Role.CONFIGURATION,
    )
    overlap_p2p_comm: bool = negation(
        "--no-overlap-p2p-communication",
        "Accepted without effect: transfers are posted by the program and always run beside compute.",
    )
    overlap_p2p_communication_warmup_flush: bool = switch("Accepted without effect, as the flag before.")
    ddp_bucket_size: int | None = option(
        None, "Accepted without effect: a batch's gradients are reduced in one piece, beside compute."
    )
    ddp_num_buckets: int | None = option(None, "Accepted without effect, as the flag before.")
    ddp_pad_buckets_for_high_nccl_busbw: bool = switch("Pad buckets to a multiple of 2^16.")
    align_grad_reduce: bool = negation(
        "--no-align-grad-reduce",
        "Accepted without effect: the program places reductions.",
        aliases=("--disable-align-grad-reduce",),
    )
    align_param_gather: bool = negation("--no-align-param-gather", "Accepted without effect, as the flag before.")


DISTRIBUTED = Group.of(Distributed, "parallelism")
