"""Flags of the training run: batches, length, regularization, recompute, learning rate, and freezing."""

from megatron.elastic.freeze_rule import RULES
from megatron.trainer.arguments.flags.specification import Group, Role, integer, negation, number, option, switch

BATCH = Group(
    "batch and length",
    "Batch sizes and the length of the run.",
    (
        option(
            "--micro-batch-size",
            integer,
            None,
            "Samples in a microbatch on one data parallel rank.",
            roles=Role.CONFIGURATION,
        ),
        option(
            "--global-batch-size",
            integer,
            None,
            "Samples in a batch over all ranks. Default: microbatch size x data parallel size.",
            roles=Role.CONFIGURATION,
        ),
        option(
            "--rampup-batch-size",
            integer,
            None,
            "Start with batches of START samples and grow by INCREMENT over the first SAMPLES samples.",
            nargs=3,
            metavar=("START", "INCREMENT", "SAMPLES"),
            roles=Role.SHORT_RUN,
        ),
        option(
            "--step-batch-size-schedule",
            str,
            None,
            "Batch sizes by steps: from TOKENS tokens on (2.4B, 300M, 0) batches have SIZE samples. "
            "--global-batch-size may be left out, or be the last size.",
            nargs="+",
            metavar="TOKENS:SIZE",
            roles=Role.SHORT_RUN,
        ),
        switch(
            "--decrease-batch-size-if-needed",
            "Round a batch down to what the data parallel size divides.",
            roles=Role.SHORT_RUN,
        ),
        option("--train-iters", integer, None, "Length of the run in iterations.", roles=Role.SHORT_RUN),
        option("--train-samples", integer, None, "Length of the run in samples.", roles=Role.SHORT_RUN),
        option(
            "--exit-interval",
            integer,
            None,
            "Save and exit when the iteration is divisible by this.",
            roles=Role.SHORT_RUN,
        ),
        option(
            "--exit-duration-in-mins", integer, None, "Save and exit after this many minutes.", roles=Role.SHORT_RUN
        ),
        switch(
            "--exit-signal-handler",
            "Accepted: SIGTERM always drains, saves once and exits with status 0.",
            roles=Role.SHORT_RUN,
        ),
        switch("--skip-train", "Only evaluate.", roles=Role.SHORT_RUN),
        option("--eval-iters", integer, 100, "Batches in an evaluation.", roles=Role.SHORT_RUN),
        option("--eval-interval", integer, 1000, "Iterations between evaluations.", roles=Role.SHORT_RUN),
        negation(
            "--no-check-for-nan-in-loss-and-grad",
            "check_for_nan_in_loss_and_grad",
            "Go on where the loss becomes NaN; otherwise the job ends (FP16 skips the step instead).",
        ),
        switch(
            "--calculate-per-token-loss",
            "The loss of a batch is the mean over its tokens. It is for batches whose microbatches count different "
            "numbers of tokens: without it each microbatch weighs the same, as in Megatron-LM. Here it is a check: "
            "what is trained is always the mean over microbatches, which is the same where every token counts; data "
            "with one that does not end the run, and --eod-mask-loss and BERT are refused.",
        ),
        switch("--cross-entropy-loss-fusion", "Fused cross entropy."),
        option(
            "--cross-entropy-fusion-impl",
            str,
            "native",
            "Implementation of --cross-entropy-loss-fusion.",
            choices=("native", "te"),
        ),
        switch("--deterministic-mode", "Only deterministic kernels."),
        switch("--manual-gc", "Collect garbage only every --manual-gc-interval iterations."),
        option("--manual-gc-interval", integer, 0, "Iterations between manual garbage collections; 0: never."),
        negation("--no-manual-gc-eval", "manual_gc_eval", "No garbage collection around evaluations."),
        option(
            "--empty-unused-memory-level",
            integer,
            0,
            "Return unused CUDA memory: 0 never, 1 or 2 each iteration.",
            choices=(0, 1, 2),
        ),
        switch("--tp-comm-overlap", "Overlap tensor parallel communication. Needs Transformer Engine."),
        negation(
            "--no-gradient-accumulation-fusion",
            "gradient_accumulation_fusion",
            "No fused accumulation of weight gradients (on only where CUDA and Apex's kernel are there).",
        ),
        negation("--no-masked-softmax-fusion", "masked_softmax_fusion", "No fused masked softmax."),
        negation("--no-bias-gelu-fusion", "bias_gelu_fusion", "No fusion of bias and GELU."),
        negation("--no-bias-swiglu-fusion", "bias_swiglu_fusion", "No fusion of bias and SwiGLU."),
        negation("--no-bias-dropout-fusion", "bias_dropout_fusion", "No fusion of bias, dropout and residual."),
        negation("--no-rope-fusion", "apply_rope_fusion", "No fused rotary embedding."),
        negation("--no-persist-layer-norm", "persist_layer_norm", "No persistent fused layer norm."),
    ),
)

REGULARIZATION = Group(
    "optimizer",
    "Optimizer and regularization.",
    (
        option(
            "--optimizer",
            str,
            "adam",
            "Optimizer. lamb: LAMB with --adam-beta1, --adam-beta2 and --adam-eps, without tensor parallelism.",
            choices=("adam", "sgd", "lamb"),
        ),
        option(
            "--optimizer-kernel",
            str,
            "loop",
            "On a CPU, the kernel of the optimizer's steps. fused: each parameter in one pass, several times faster; "
            "the last bits may differ.",
            choices=("loop", "fused"),
        ),
        option("--weight-decay", number, 0.01, "Weight decay."),
        option("--start-weight-decay", number, None, "Weight decay at the start, with --weight-decay-incr-style."),
        option("--end-weight-decay", number, None, "Weight decay at the end, with --weight-decay-incr-style."),
        option(
            "--weight-decay-incr-style",
            str,
            "constant",
            "How weight decay grows.",
            choices=("constant", "linear", "cosine"),
        ),
        option("--clip-grad", number, 1.0, "Clip gradients to this global norm; 0: off."),
        option("--adam-beta1", number, 0.9, "First coefficient of Adam and LAMB."),
        option("--adam-beta2", number, 0.999, "Second coefficient of Adam and LAMB."),
        option("--adam-eps", number, 1e-8, "Epsilon of Adam and LAMB."),
        option("--sgd-momentum", number, 0.9, "Momentum of SGD."),
    ),
)

LEARNING_RATE = Group(
    "learning rate",
    "Learning rate schedule.",
    (
        option("--lr", number, None, "Peak learning rate.", roles=Role.NONE),
        option("--min-lr", number, 0.0, "Smallest learning rate.", roles=Role.NONE),
        option(
            "--lr-decay-style",
            str,
            "linear",
            "Shape of the decay.",
            choices=("constant", "linear", "cosine", "inverse-square-root", "WSD"),
        ),
        option(
            "--lr-wsd-decay-style",
            str,
            "exponential",
            "Shape of WSD's final decay.",
            choices=("exponential", "linear", "cosine", "minus_sqrt"),
        ),
        option("--lr-decay-iters", integer, None, "Iterations until --min-lr. Default: --train-iters."),
        option("--lr-decay-samples", integer, None, "Samples until --min-lr. Default: --train-samples."),
        option("--lr-wsd-decay-iters", integer, None, "Iterations of WSD's final decay."),
        option("--lr-wsd-decay-samples", integer, None, "Samples of WSD's final decay."),
        option("--lr-warmup-fraction", number, None, "Warm-up as a share of the decay."),
        option("--lr-warmup-iters", integer, 0, "Warm-up in iterations."),
        option("--lr-warmup-samples", integer, 0, "Warm-up in samples."),
        option("--lr-warmup-init", number, 0.0, "Learning rate at the start of the warm-up."),
        option("--decoupled-lr", number, None, "A learning rate of its own for embedding and output layer."),
        option("--decoupled-min-lr", number, None, "Smallest learning rate for embedding and output layer."),
        switch(
            "--override-opt_param-scheduler",
            "Use this command line's schedule, not the checkpoint's.",
            aliases=("--override-opt-param-scheduler", "--override-lr-scheduler"),
        ),
        switch(
            "--use-checkpoint-opt_param-scheduler",
            "Use the checkpoint's schedule, not this command line's.",
            aliases=("--use-checkpoint-opt-param-scheduler", "--use-checkpoint-lr-scheduler"),
        ),
    ),
    Role.SHORT_RUN,
)

PRECISION = Group(
    "precision",
    "Number formats and loss scaling.",
    (
        switch("--fp16", "FP16 with FP32 masters and loss scaling."),
        switch("--bf16", "BF16 with FP32 masters."),
        option("--loss-scale", number, None, "Static loss scale; default: dynamic."),
        option("--initial-loss-scale", number, float(2**32), "First dynamic loss scale."),
        option("--min-loss-scale", number, 1.0, "Smallest dynamic loss scale."),
        option("--loss-scale-window", number, 1000.0, "Batches without overflow before the scale is raised."),
        option("--hysteresis", integer, 2, "Overflows before the scale is lowered."),
        switch("--fp32-residual-connection", "Keep the residual stream in FP32. Needs Transformer Engine."),
        switch(
            "--accumulate-allreduce-grads-in-fp32",
            "Accumulate and reduce gradients in FP32 (always on with --bf16 unless --grad-reduce-in-bf16).",
        ),
        switch("--grad-reduce-in-bf16", "Reduce gradients in BF16."),
        switch("--fp16-lm-cross-entropy", "Cross entropy in FP16."),
    ),
)

RECOMPUTE = Group(
    "recompute",
    "Activation recomputation inside a layer or over layers.",
    (
        switch("--recompute-activations", "Short for --recompute-granularity selective."),
        switch(
            "--checkpoint-activations",
            "Old name of --recompute-granularity full --recompute-method uniform --recompute-num-layers 1.",
        ),
        option(
            "--recompute-granularity",
            str,
            None,
            "full: whole layers. selective: the modules of --recompute-modules.",
            choices=("full", "selective"),
        ),
        option(
            "--recompute-method",
            str,
            None,
            "With full. uniform: chunks of --recompute-num-layers layers. block: only the first --recompute-num-layers "
            "layers of a stage.",
            choices=("uniform", "block"),
        ),
        option("--recompute-num-layers", integer, None, "Layers in a chunk (uniform) or layers recomputed (block)."),
        option(
            "--recompute-modules",
            str,
            None,
            "Modules of selective recomputation. Default: core_attn.",
            nargs="*",
            choices=("core_attn", "mlp", "layernorm"),
        ),
    ),
    Role.CONFIGURATION,
)


# --- training that freezes what has converged (PipeTransformer) -------------------------------------------------------

FREEZING = Group(
    "freezing",
    "Training that freezes layers from the input on as they converge. These flags are this project's own. "
    "docs/pipetransformer.md.",
    (
        switch(
            "--freeze-training",
            "Decide at the end of each --freeze-interval how many layers in front are frozen from now on. They compute "
            "forwards only, without dropout; their weights stay as they are, and the embedding's with the first one's.",
        ),
        option("--freeze-interval", integer, None, "Iterations between two decisions."),
        option("--freeze-start", integer, 0, "Iterations before the first interval begins."),
        option(
            "--freeze-rule",
            str,
            "gradients",
            "gradients: the layers in front of the one whose gradients are least, and at most --freeze-alpha of those "
            "that are left. schedule: as --freeze-schedule says; the default where that is given.",
            choices=RULES.keys(),  # those that are registered later, too
        ),
        option(
            "--freeze-alpha", number, 1 / 3, "Of the layers that are left, the largest part that an interval freezes."
        ),
        option(
            "--freeze-schedule",
            str,
            None,
            "How many layers are frozen behind interval 1, 2, ..., such as 0,4,6; the last number stays.",
        ),
        option(
            "--freeze-watch-validation",
            number,
            None,
            "End freezing, and train all layers again, when an evaluation with frozen layers is worse than the best "
            "before it by more than this: of the validation accuracy a difference, such as 0.02, or where there is no "
            "accuracy a share of the best validation loss. Below 0: when it is not better by so much. Default: only "
            "warn.",
            metavar="TOLERANCE",
        ),
        option(
            "--activation-cache",
            str,
            None,
            "Keep what the frozen layers put out for each sample in this folder, on a disk of each node, and read it "
            "in the epochs that follow. For programs whose samples come again: pretrain_vision_classify.py and "
            "finetune_bert.py.",
            metavar="DIR",
        ),
        option("--activation-cache-gib", number, 16.0, "The most GiB that --activation-cache takes on a node."),
        option(
            "--activation-cache-use",
            str,
            "auto",
            "When --activation-cache is read. auto: where that takes less than computing, as measured on that disk. "
            "always: whatever it takes.",
            choices=("auto", "always"),
        ),
        switch(
            "--elastic-pipeline",
            "Decide then, too, how many ranks the pipeline has, up to as many as at first, and which layers each: by "
            "measured times, simulated, in no more memory than a rank had at first. The other ranks become replicas.",
        ),
        option(
            "--elastic-cut",
            str,
            "exact",
            "exact: layers are cut so that the busiest rank has as little work as can be. greedy: PipeTransformer's "
            "way, rank after rank up to the mean.",
            choices=("exact", "greedy"),
        ),
        option(
            "--elastic-schedule",
            str,
            None,
            "How many ranks the pipeline has behind interval 1, 2, ..., such as 4,2,1, whatever was measured; the last "
            "number stays.",
        ),
        option(
            "--elastic-batch",
            str,
            "constant",
            "constant: a batch has as many samples whatever the number of replicas. grow: as many for each replica, as "
            "in PipeTransformer; the learning rate goes by samples, and the run ends behind --train-samples.",
            choices=("constant", "grow"),
        ),
        option(
            "--elastic-micro-batch-size",
            str,
            None,
            "Samples of a microbatch behind interval 1, 2, ..., such as 2,4,8; the last number stays.",
        ),
    ),
)
