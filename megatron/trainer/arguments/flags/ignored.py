"""Flags of Megatron-LM that change neither the training nor what it leaves behind: accepted, and said once."""

from megatron.trainer.arguments.flags.specification import Group, ignored

_RERUN = "results are not recomputed to find faults; a loss or gradient that is not finite ends the job"
_GRADIENTS = "gradients lie in contiguous buffers that the pipeline's program reduces"
_SUM = "the value would need another reduction over all ranks; grad_norm is in the log line and in --metrics-file"

GROUP = Group(
    "without effect",
    "Known from Megatron-LM, about logging, checks and speed of what is done otherwise here. Each is accepted, and the "
    "run says once that it has no effect.",
    (
        ignored("--log-params-norm", _SUM),
        ignored("--log-num-zeros-in-grad", _SUM),
        ignored("--log-straggler", "--pipeline-timeline shows where each rank's time goes"),
        ignored("--log-batch-size-to-tensorboard", "the batch size is always recorded"),
        ignored("--enable-one-logger", "that service is not connected"),
        ignored("--no-one-logger", "that service is not connected"),
        ignored("--check-for-spiky-loss", _RERUN),
        ignored("--check-for-large-grads", _RERUN),
        ignored("--rerun-mode", _RERUN, takes=None, neutral=("disabled",)),
        ignored("--no-barrier-with-level-1-timing", "timers do not wait for other ranks"),
        ignored("--overlap-p2p-communication", "transfers are posted by the program and always run beside compute"),
        ignored("--no-scatter-gather-tensors-in-pipeline", "transfers are not split over tensor ranks"),
        ignored("--no-async-tensor-model-parallel-allreduce", "megatron.core decides what runs beside compute"),
        ignored("--DDP-impl", _GRADIENTS, takes=None, choices=("local", "torch")),
        ignored("--use-contiguous-buffers-in-ddp", _GRADIENTS),
        ignored("--no-contiguous-buffers-in-local-ddp", _GRADIENTS),
        ignored("--use-persistent-ckpt-worker", "--async-save has a worker for each save"),
        ignored("--vision-pretraining", "pretrain_vision_classify.py trains for classes in any case"),
        ignored(
            "--no-mmap-bin-files", ".bin files are always read through file handles, so that one cut short is named"
        ),
        ignored("--no-data-sharding", "all replicas take the samples of one order in turns"),
        ignored("--keep-last", "an epoch's last samples begin a batch that the next epoch fills up, so none is lost"),
        ignored("--no-query-key-layer-scaling", "it is off unless --apply-query-key-layer-scaling is given"),
    ),
)
