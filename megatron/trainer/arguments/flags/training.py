"""Flags of the training run: batches, length, regularization, recompute, learning rate, and freezing."""

from dataclasses import dataclass

from megatron.elastic.freezing import RULES
from megatron.trainer.arguments.flags.specification import Group, Role, negation, option, switch


@dataclass(frozen=True, init=False, repr=False, eq=False)
class Batch:
    """Batch sizes and the length of the run."""

    micro_batch_size: int = option(None, "Samples in a microbatch on one data parallel rank.", roles=Role.CONFIGURATION)
    global_batch_size: int = option(
        None,
        "Samples in a batch over all ranks. Default: microbatch size x data parallel size.",
        roles=Role.CONFIGURATION,
    )
    rampup_batch_size: list[int] | None = option(
        None,
        "Start with batches of START samples and grow by INCREMENT over the first SAMPLES samples.",
        nargs=3,
        metavar=("START", "INCREMENT", "SAMPLES"),
        roles=Role.SHORT_RUN,
    )
    step_batch_size_schedule: list[str] | None = option(
        None,
        "Batch sizes by steps: from TOKENS tokens on (2.4B, 300M, 0) batches have SIZE samples. "
        "--global-batch-size may be left out, or be the last size.",
        nargs="+",
        metavar="TOKENS:SIZE",
        roles=Role.SHORT_RUN,
    )
    decrease_batch_size_if_needed: bool = switch(
        "Round a batch down to what the data parallel size divides.", roles=Role.SHORT_RUN
    )
    train_iters: int = option(None, "Length of the run in iterations.", roles=Role.SHORT_RUN)
    train_samples: int | None = option(None, "Length of the run in samples.", roles=Role.SHORT_RUN)
    exit_interval: int | None = option(
        None, "Save and exit when the iteration is divisible by this.", roles=Role.SHORT_RUN
    )
    exit_duration_in_mins: int | None = option(None, "Save and exit after this many minutes.", roles=Role.SHORT_RUN)
    exit_signal_handler: bool = switch(
        "Accepted: SIGTERM always drains, saves once and exits with status 0.", roles=Role.SHORT_RUN
    )
    skip_train: bool = switch("Only evaluate.", roles=Role.SHORT_RUN)
    eval_iters: int = option(100, "Batches in an evaluation.", roles=Role.SHORT_RUN)
    eval_interval: int = option(1000, "Iterations between evaluations.", roles=Role.SHORT_RUN)
    check_for_nan_in_loss_and_grad: bool = negation(
        "--no-check-for-nan-in-loss-and-grad",
        "Go on where the loss becomes NaN; otherwise the job ends (FP16 skips the step instead).",
    )
    calculate_per_token_loss: bool = switch(
        "The loss of a batch is the mean over its tokens with a loss (of BERT: over its masked tokens). Without it "
        "each microbatch of each replica weighs the same, whatever the number of its tokens, as in Megatron-LM."
    )
    cross_entropy_loss_fusion: bool = switch("Fused cross entropy.")
    cross_entropy_fusion_impl: str = option(
        "native", "Implementation of --cross-entropy-loss-fusion.", choices=("native", "te")
    )
    deterministic_mode: bool = switch("Only deterministic kernels.")
    manual_gc: bool = switch("Collect garbage only every --manual-gc-interval iterations.")
    manual_gc_interval: int = option(0, "Iterations between manual garbage collections; 0: never.")
    manual_gc_eval: bool = negation(
        "--no-manual-gc-eval", "No garbage collection around evaluations.", aliases=("--disable-manual-gc-eval",)
    )
    empty_unused_memory_level: int = option(
        0, "Return unused CUDA memory: 0 never, 1 or 2 each iteration.", choices=(0, 1, 2)
    )
    tp_comm_overlap: bool = switch("Overlap tensor parallel communication. Needs Transformer Engine.")
    gradient_accumulation_fusion: bool = negation(
        "--no-gradient-accumulation-fusion",
        "No fused accumulation of weight gradients (on only where CUDA and Apex's kernel are there).",
    )
    masked_softmax_fusion: bool = negation("--no-masked-softmax-fusion", "No fused masked softmax.")
    bias_gelu_fusion: bool = negation(
        "--no-bias-gelu-fusion",
        "No fusion of bias and GELU, which is then exact; fused it is the tanh approximation.",
        roles=Role.SAVED,
    )
    bias_swiglu_fusion: bool = negation("--no-bias-swiglu-fusion", "No fusion of bias and SwiGLU.")
    bias_dropout_fusion: bool = negation("--no-bias-dropout-fusion", "No fusion of bias, dropout and residual.")
    apply_rope_fusion: bool = negation("--no-rope-fusion", "No fused rotary embedding.")
    persist_layer_norm: bool = negation("--no-persist-layer-norm", "No persistent fused layer norm.")


BATCH = Group.of(Batch, "batch and length")


_OF_MOMENTS = ("fp32", "fp16", "bf16", "fp8")


@dataclass(frozen=True, init=False, repr=False, eq=False)
class Regularization:
    """Optimizer and regularization."""

    optimizer: str = option(
        "adam",
        "Optimizer. lamb: LAMB with --adam-beta1, --adam-beta2 and --adam-eps, without tensor parallelism. muon: Muon "
        "for the matrices of layers, AdamW for the rest (docs/muon.md).",
        choices=("adam", "sgd", "lamb", "muon"),
    )
    optimizer_kernel: str = option(
        "loop",
        "On a CPU, the kernel of the optimizer's steps. fused: each parameter in one pass, several times faster; "
        "the last bits may differ. --2bw-provisional predicts by the same kernel.",
        choices=("loop", "fused"),
    )
    weight_decay: float = option(0.01, "Weight decay.")
    start_weight_decay: float = option(None, "Weight decay at the start, with --weight-decay-incr-style.")
    end_weight_decay: float = option(None, "Weight decay at the end, with --weight-decay-incr-style.")
    weight_decay_incr_style: str = option(
        "constant", "How weight decay grows.", choices=("constant", "linear", "cosine")
    )
    clip_grad: float = option(1.0, "Clip gradients to this global norm; 0: off.")
    adam_beta1: float = option(0.9, "First coefficient of Adam and LAMB.")
    adam_beta2: float = option(0.999, "Second coefficient of Adam and LAMB.")
    adam_eps: float = option(1e-8, "Epsilon of Adam and LAMB.")
    use_precision_aware_optimizer: bool = switch(
        "Adam with moments of --exp-avg-dtype and --exp-avg-sq-dtype, which steps in FP32. Needs "
        "--use-distributed-optimizer, or --pipeline-schedule l2l."
    )
    exp_avg_dtype: str = option("fp32", "Type of the first moment: fp32 or bf16.", choices=_OF_MOMENTS)
    exp_avg_sq_dtype: str = option("fp32", "Type of the second moment: fp32 or bf16.", choices=_OF_MOMENTS)
    sgd_momentum: float = option(0.9, "Momentum of SGD.")
    muon_momentum: float = option(0.95, "Momentum of Muon.")
    muon_use_nesterov: bool = switch("Muon with Nesterov's momentum.", aliases=("--muon-nesterov",))
    muon_split_qkv: bool = negation(
        "--muon-no-split-qkv",
        "Muon orthogonalises the matrix of queries, keys and values as one, not each of the three by itself.",
    )
    muon_scale_mode: str = option(
        "spectral",
        "Factor of Muon's steps for a matrix of r rows and c columns. spectral: sqrt(max(r, c)). unit_rms_norm: "
        "sqrt(r / c). shape_scaling: sqrt(max(1, r / c)).",
        choices=("spectral", "unit_rms_norm", "shape_scaling"),
    )
    muon_extra_scale_factor: float = option(
        1.0, "Another factor of Muon's steps. With spectral, 0.2 gives steps of about AdamW's size."
    )
    muon_num_ns_steps: int = option(5, "Iterations of Newton-Schulz, by which Muon orthogonalises.")
    muon_coefficient_type: str = option(
        "quintic",
        "Coefficients of these iterations. simple: torch.optim.Muon's.",
        choices=("simple", "quintic", "polar_express", "aol"),
    )
    muon_fp32_matmul_prec: str = option(
        "medium", "Precision of these iterations. medium: bfloat16. high: FP32.", choices=("medium", "high")
    )
    muon_tp_mode: str = option(
        "blockwise",
        "Where tensor ranks share a matrix. blockwise: each orthogonalises its part by itself, so the result depends "
        "on their number. duplicated: each gathers the matrix and orthogonalises it.",
        choices=("blockwise", "duplicated", "distributed"),
    )
    muon_scalar_lr: float | None = option(
        None, "Peak learning rate of what AdamW steps beside Muon; without, --lr (embeddings may have --decoupled-lr)."
    )
    muon_scalar_min_lr: float | None = option(None, "Smallest learning rate of --muon-scalar-lr; without, --min-lr.")


REGULARIZATION = Group.of(Regularization, "optimizer")


@dataclass(frozen=True, init=False, repr=False, eq=False)
class LearningRate:
    """Learning rate schedule."""

    lr: float = option(None, "Peak learning rate.", roles=Role.NONE)
    min_lr: float = option(0.0, "Smallest learning rate.", roles=Role.NONE)
    lr_decay_style: str = option(
        "linear", "Shape of the decay.", choices=("constant", "linear", "cosine", "inverse-square-root", "WSD")
    )
    lr_wsd_decay_style: str = option(
        "exponential", "Shape of WSD's final decay.", choices=("exponential", "linear", "cosine", "minus_sqrt")
    )
    lr_decay_iters: int | None = option(None, "Iterations until --min-lr. Default: --train-iters.")
    lr_decay_samples: int | None = option(None, "Samples until --min-lr. Default: --train-samples.")
    lr_wsd_decay_iters: int | None = option(None, "Iterations of WSD's final decay.")
    lr_wsd_decay_samples: int | None = option(None, "Samples of WSD's final decay.")
    lr_warmup_fraction: float | None = option(None, "Warm-up as a share of the decay.")
    lr_warmup_iters: int = option(0, "Warm-up in iterations.")
    lr_warmup_samples: int = option(0, "Warm-up in samples.")
    lr_warmup_init: float = option(0.0, "Learning rate at the start of the warm-up.")
    decoupled_lr: float | None = option(None, "A learning rate of its own for embedding and output layer.")
    decoupled_min_lr: float | None = option(None, "Smallest learning rate for embedding and output layer.")
    override_opt_param_scheduler: bool = switch(
        "Use this command line's schedule, not the checkpoint's.",
        name="--override-opt_param-scheduler",
        aliases=("--override-opt-param-scheduler", "--override-lr-scheduler"),
    )
    use_checkpoint_opt_param_scheduler: bool = switch(
        "Use the checkpoint's schedule, not this command line's.",
        name="--use-checkpoint-opt_param-scheduler",
        aliases=("--use-checkpoint-opt-param-scheduler", "--use-checkpoint-lr-scheduler"),
    )


LEARNING_RATE = Group.of(LearningRate, "learning rate", Role.SHORT_RUN)


@dataclass(frozen=True, init=False, repr=False, eq=False)
class Precision:
    """Number formats and loss scaling."""

    fp16: bool = switch("FP16 with FP32 masters and loss scaling.")
    bf16: bool = switch("BF16 with FP32 masters.")
    loss_scale: float | None = option(None, "Static loss scale; default: dynamic.")
    initial_loss_scale: float = option(float(2**32), "First dynamic loss scale.")
    min_loss_scale: float = option(1.0, "Smallest dynamic loss scale.")
    loss_scale_window: float = option(1000.0, "Batches without overflow before the scale is raised.")
    hysteresis: int = option(2, "Overflows before the scale is lowered.")
    fp32_residual_connection: bool = switch("Keep the residual stream in FP32. Needs Transformer Engine.")
    accumulate_allreduce_grads_in_fp32: bool = switch(
        "Accumulate and reduce gradients in FP32 (always on with --bf16 unless --grad-reduce-in-bf16)."
    )
    grad_reduce_in_bf16: bool = switch("Reduce gradients in BF16.")
    fp16_lm_cross_entropy: bool = switch("Cross entropy in FP16.")


PRECISION = Group.of(Precision, "precision")


FP8_RECIPES = ("delayed", "tensorwise", "blockwise", "mxfp8")


@dataclass(frozen=True, init=False, repr=False, eq=False)
class EightBits:
    """Products of layers in FP8, which Transformer Engine computes. Weights that the optimizer steps stay in the
    model's precision. docs/fp8.md."""

    fp8: str | None = option(
        None,
        "e4m3: all tensors. hybrid: gradients of outputs in e5m2, all others in e4m3.",
        name="--fp8-format",
        choices=("e4m3", "hybrid"),
    )
    fp8_recipe: str = option(
        "delayed",
        "Where scales come from. delayed: one for each tensor, by the largest values of earlier microbatches. "
        "tensorwise: one for each tensor, by its own. blockwise, mxfp8: one for each block of 128 or 32 elements.",
        choices=(*FP8_RECIPES, "custom"),
    )
    fp8_margin: int = option(0, "With delayed scaling, the powers of two by which scales are smaller.")
    fp8_amax_history_len: int = option(1, "With delayed scaling, the microbatches whose largest values are kept.")
    fp8_amax_compute_algo: str = option(
        "most_recent",
        "With delayed scaling, the value that a scale is of: the last one, or the largest of all that are kept.",
        choices=("most_recent", "max"),
    )
    first_last_layers_bf16: bool = switch("Keep layers at both ends of the model in the model's precision.")
    num_layers_at_start_in_bf16: int = option(1, "Layers in front that --first-last-layers-bf16 keeps.")
    num_layers_at_end_in_bf16: int = option(1, "Layers at the end that --first-last-layers-bf16 keeps.")


EIGHT_BITS = Group.of(EightBits, "FP8")


@dataclass(frozen=True, init=False, repr=False, eq=False)
class Recompute:
    """Activation recomputation inside a layer or over layers."""

    recompute_activations: bool = switch("Short for --recompute-granularity selective.")
    checkpoint_activations: bool = switch(
        "Old name of --recompute-granularity full --recompute-method uniform --recompute-num-layers 1."
    )
    recompute_granularity: str | None = option(
        None, "full: whole layers. selective: the modules of --recompute-modules.", choices=("full", "selective")
    )
    recompute_method: str | None = option(
        None,
        "With full. uniform: chunks of --recompute-num-layers layers. block: only the first --recompute-num-layers "
        "layers of a stage.",
        choices=("uniform", "block"),
    )
    recompute_num_layers: int | None = option(None, "Layers in a chunk (uniform) or layers recomputed (block).")
    recompute_modules: list[str] | None = option(
        None,
        "Modules of selective recomputation. Default: core_attn.",
        nargs="*",
        choices=("core_attn", "mlp", "layernorm", "mla_up_proj", "moe"),
    )


RECOMPUTE = Group.of(Recompute, "recompute", Role.CONFIGURATION)


# --- training that freezes converged layers (PipeTransformer) ---------------------------------------------------------


@dataclass(frozen=True, init=False, repr=False, eq=False)
class Freezing:
    """Training that freezes layers from the input on as they converge. These flags are this project's own.
    docs/pipetransformer.md."""

    freeze_training: bool = switch(
        "Decide at the end of each --freeze-interval how many layers in front are frozen from now on. They compute "
        "forwards only, without dropout; their weights stay as they are, and the embedding's with the first one's."
    )
    freeze_interval: int | None = option(None, "Iterations between two decisions.")
    freeze_start: int = option(0, "Iterations before the first interval begins.")
    freeze_rule: str = option(
        "gradients",
        "gradients: the layers in front of the one whose gradients are least, and at most --freeze-alpha of those "
        "that are left. schedule: as --freeze-schedule says; the default where that is given.",
        choices=RULES.keys(),
    )
    freeze_alpha: float = option(1 / 3, "Of the layers that are left, the largest part that an interval freezes.")
    freeze_schedule: str | None = option(
        None, "How many layers are frozen behind interval 1, 2, ..., such as 0,4,6; the last number stays."
    )
    freeze_watch_validation: float | None = option(
        None,
        "End freezing, and train all layers again, when an evaluation with frozen layers is worse than the best "
        "before it by more than this: of the validation accuracy a difference, such as 0.02, or where there is no "
        "accuracy a share of the best validation loss. Below 0: when it is not better by so much. Default: only "
        "warn.",
        metavar="TOLERANCE",
    )
    activation_cache: str | None = option(
        None,
        "Keep what the frozen layers put out for each sample in this folder, on a disk of each node, and read it "
        "in the epochs that follow. For programs whose samples come again: pretrain_vision_classify.py and "
        "finetune_bert.py.",
        metavar="DIR",
    )
    activation_cache_gib: float = option(16.0, "The most GiB that --activation-cache takes on a node.")
    activation_cache_use: str = option(
        "auto",
        "When --activation-cache is read. auto: where that takes less than computing, as measured on that disk. "
        "always: whatever it takes.",
        choices=("auto", "always"),
    )
    elastic_pipeline: bool = switch(
        "Decide then, too, how many ranks the pipeline has, up to as many as at first, and which layers each: by "
        "measured times, simulated, in no more memory than a rank had at first. The other ranks become replicas."
    )
    elastic_cut: str = option(
        "exact",
        "exact: layers are cut so that the busiest rank has as little work as can be. greedy: PipeTransformer's "
        "way, rank after rank up to the mean.",
        choices=("exact", "greedy"),
    )
    elastic_schedule: str | tuple[int, ...] | None = option(
        None,
        "How many ranks the pipeline has behind interval 1, 2, ..., such as 4,2,1, whatever was measured; the last "
        "number stays.",
    )
    elastic_batch: str = option(
        "constant",
        "constant: a batch has as many samples whatever the number of replicas. grow: as many for each replica, as "
        "in PipeTransformer; the learning rate goes by samples, and the run ends behind --train-samples.",
        choices=("constant", "grow"),
    )
    elastic_micro_batch_size: str | tuple[int, ...] | None = option(
        None, "Samples of a microbatch behind interval 1, 2, ..., such as 2,4,8; the last number stays."
    )


FREEZING = Group.of(Freezing, "freezing")
