"""Flags that place the model on ranks, and flags of the pipeline."""

from megatron.pipeline.program.lane_order import DEVICE, HOST
from megatron.pipeline.schedules import PRESETS
from megatron.trainer.arguments.flags.specification import Group, Role, integer, negation, number, option, switch

PIPELINE = Group(
    "pipeline",
    "The pipeline's program. These flags are this project's own.",
    (
        option(
            "--pipeline-schedule",
            str,
            "flush",
            "gpipe: all forwards, then all backwards. flush: 1F1B with a flush after each batch, exact. 2bw: 1F1B "
            "without flushes on two weight versions, a batch uses the weights of the batch before. pipedream: weight "
            "stashing, one update a microbatch. interleaved: Megatron-LM's order for several stages on each rank, "
            "exact; the default where the flags ask for several. bpipe: flush with saved activations balanced over "
            "pairs of stages, as --balance-activations does. zb-h1: flush whose backwards are split, so that weight "
            "gradients fill bubbles; exact. zbv: the same with two stages on each rank in a V, which leaves next to no "
            "bubble. docs/zero_bubble.md. l2l: weights, gradients and optimizer state on the host, weights of few "
            "stages, each a layer, on the device; exact. docs/l2l.md.",
            choices=PRESETS.keys(),  # those that are registered later, too
        ),
        option(
            "--pipeline-program",
            str,
            None,
            "Train with the rows of this CSV file, one of instructions for each rank, in place of a schedule. They run "
            "for any number of batches: how they repeat is found, and proved. docs/programs.md.",
            metavar="FILE",
        ),
        switch(
            "--pipeline-extra-warmup",
            "Stage s starts with 2(p-s-1) forwards instead of p-s-1: hides the transfer latency, for more saved "
            "activations.",
        ),
        switch(
            "--pipeline-recompute",
            "Keep only a stage's input per microbatch and recompute its forward before its backward, as instructions "
            "of the program.",
        ),
        switch(
            "--balance-activations",
            "BPipe: stages s < (p-2)/2 lend saved activations to stage p-1-s while both compute, and no stage holds "
            "more than ceil((p+2)/2) microbatches. With flush, 2bw and interleaved; where nothing has to move, the run "
            "says so and goes on without.",
        ),
        switch(
            "--2bw-single-gradient-buffer",
            "With 2bw: one gradient buffer instead of two; clipping then uses the norm of the batch before, and a "
            "batch's first backward waits until the gradients of the batch before are reduced.",
            roles=Role.CONFIGURATION,
        ),
        option(
            "--2bw-provisional",
            str,
            "off",
            "With 2bw: compute a batch at a prediction of its weights instead of the weights before, so that training "
            "converges like flush. The prediction takes the step to come with those microbatches of the batch before "
            "that are done. stage: all that each stage has done. uniform: the same number on every stage, so that "
            "numbers do not depend on the stages. docs/provisional.md.",
            choices=("off", "stage", "uniform"),
            roles=Role.CONFIGURATION | Role.PREDICTION,
        ),
        option(
            "--2bw-provisional-microbatches",
            integer,
            None,
            "With --2bw-provisional uniform: how many microbatches of a replica each prediction reads, at most m-p+1.",
            roles=Role.CONFIGURATION | Role.PREDICTION,
        ),
        switch(
            "--2bw-provisional-reduce",
            "With --2bw-provisional and replicas: predict from the mean over the replicas, for one more reduction of "
            "the gradients in each batch, which nothing hides on the first stage.",
            roles=Role.CONFIGURATION | Role.PREDICTION,
        ),
        option(
            "--l2l-update",
            str,
            "auto",
            "With l2l: when the host updates a stage. eager: as soon as it has its gradients. deferred: when the norm "
            "of all gradients is known, by which they are clipped. auto: eager where nothing depends on the norm.",
            choices=("auto", "eager", "deferred"),
        ),
        option(
            "--l2l-resident-stages",
            integer,
            2,
            "With l2l: the most stages of a rank whose weights are on the device at once.",
        ),
        option(
            "--l2l-stash",
            str,
            DEVICE,
            "With l2l: where the inputs of stages wait for their recompute. device: there, a batch for each stage. "
            "host: they leave and come back, and the device's memory does not grow with depth.",
            choices=(DEVICE, HOST),
        ),
        option(
            "--l2l-fetch",
            str,
            "whole",
            "With l2l and replicas on a node, which share the host's store: what each copies to its device. whole: the "
            "weights of a stage. shares: its part of them, and the devices gather the whole from one another, which is "
            "for GPUs with NVLink or with one way to the host.",
            choices=("whole", "shares"),
        ),
        option(
            "--pipeline-timeline",
            str,
            None,
            "Trace the last iterations and write the timeline here: planned above measured (PNG) and Perfetto JSON.",
            metavar="DIR",
            roles=Role.SHORT_RUN,
        ),
        option(
            "--pipeline-timeline-iterations",
            integer,
            4,
            "Number of iterations that --pipeline-timeline traces.",
            roles=Role.SHORT_RUN,
        ),
    ),
    Role.CONFIGURATION,
)

DISTRIBUTED = Group(
    "parallelism",
    "Degrees of parallelism. Data parallel size = world size / (tensor x pipeline).",
    (
        option(
            "--tensor-model-parallel-size",
            integer,
            1,
            "Ranks that share each layer (t).",
            roles=Role.CONFIGURATION | Role.DEGREES,
        ),
        option(
            "--pipeline-model-parallel-size",
            integer,
            1,
            "Pipeline stages (p).",
            roles=Role.CONFIGURATION | Role.DEGREES,
        ),
        option(
            "--num-layers-per-virtual-pipeline-stage",
            integer,
            None,
            "Layers of each stage where a rank has several (v); v follows from it.",
            roles=Role.CONFIGURATION | Role.DEGREES,
        ),
        option(
            "--num-virtual-stages-per-pipeline-rank",
            integer,
            None,
            "Stages of each rank (v): its share of the layers is cut into v parts, dealt out in turn. zbv has 2.",
            roles=Role.CONFIGURATION | Role.DEGREES,
        ),
        option(
            "--microbatch-group-size-per-virtual-pipeline-stage",
            integer,
            None,
            "Microbatches that a rank takes through one of its stages before it turns to the next; at least the "
            "pipeline parallel size, which is the default.",
            roles=Role.CONFIGURATION | Role.DEGREES,
        ),
        option(
            "--pipeline-model-parallel-layout",
            str,
            None,
            "What each stage holds, divided by |: E embedding, t layer, L loss; t*3 is ttt and (tt|)*2 is tt|tt|. "
            "The schedule says which rank has which stages; interleaved deals them out in turn. For example "
            "'Et|(tt|)*2tL'.",
            metavar="LAYOUT",
            roles=Role.CONFIGURATION | Role.DEGREES,
        ),
        option(
            "--decoder-first-pipeline-num-layers",
            integer,
            None,
            "Layers on the first rank of the pipeline; the others share the rest. Where a schedule does not deal out "
            "its stages in turn: in the first stage.",
            roles=Role.CONFIGURATION | Role.DEGREES,
        ),
        option(
            "--decoder-last-pipeline-num-layers",
            integer,
            None,
            "Layers on the last rank of the pipeline; the others share the rest. Where a schedule does not deal out "
            "its stages in turn: in the last stage.",
            roles=Role.CONFIGURATION | Role.DEGREES,
        ),
        switch(
            "--account-for-embedding-in-pipeline-split",
            "Count the embedding as a layer when splitting.",
            roles=Role.CONFIGURATION | Role.DEGREES,
        ),
        switch(
            "--account-for-loss-in-pipeline-split",
            "Count the loss as a layer when splitting.",
            roles=Role.CONFIGURATION | Role.DEGREES,
        ),
        switch(
            "--sequence-parallel",
            "Split activations along the sequence between tensor parallel ranks.",
            roles=Role.CONFIGURATION,
        ),
        option(
            "--rank-mapping",
            str,
            "standard",
            "Which GPU runs which rank. standard: as the launcher counts. pair-adjacent: tensor ranks together, then "
            "stages s and p-1-s, then replicas. optimized: least transfer time over --rank-topology. Or a JSON or YAML "
            "file with the rank of each slot. See placement.md.",
            metavar="MAPPING",
            roles=Role.CONFIGURATION,
        ),
        option(
            "--rank-topology",
            str,
            None,
            "JSON or YAML file with the cluster's nodes, GPUs and bandwidths; see placement.md.",
            metavar="FILE",
            roles=Role.CONFIGURATION,
        ),
        option("--distributed-backend", str, None, "Default: nccl on CUDA, gloo elsewhere.", choices=("nccl", "gloo")),
        option(
            "--distributed-timeout-minutes",
            number,
            10,
            "A collective or transfer that takes longer ends the job, naming who waits for whom.",
            roles=Role.SHORT_RUN,
        ),
        option(
            "--local-rank",
            integer,
            None,
            "Accepted; LOCAL_RANK from the environment is used.",
            aliases=("--local_rank",),
            roles=Role.SHORT_RUN,
        ),
        switch(
            "--use-distributed-optimizer", "Shard optimizer state over data parallel ranks.", roles=Role.CONFIGURATION
        ),
        switch(
            "--overlap-grad-reduce",
            "Accepted: the program's REDUCE_GRAD reduces gradients, beside compute where the schedule has slack.",
        ),
        switch(
            "--overlap-param-gather",
            "Accepted: parameters of the distributed optimizer are gathered in the program's STEP. Needs "
            "--use-distributed-optimizer and --overlap-grad-reduce.",
            roles=Role.CONFIGURATION,
        ),
        negation(
            "--no-overlap-p2p-communication",
            "overlap_p2p_comm",
            "Accepted without effect: transfers are posted by the program and always run beside compute.",
        ),
        switch("--overlap-p2p-communication-warmup-flush", "Accepted without effect, as the flag before."),
        option(
            "--ddp-bucket-size",
            integer,
            None,
            "Accepted without effect: a batch's gradients are reduced in one piece, beside compute.",
        ),
        option("--ddp-num-buckets", integer, None, "Accepted without effect, as the flag before."),
        switch("--ddp-pad-buckets-for-high-nccl-busbw", "Pad buckets to a multiple of 2^16."),
        negation(
            "--no-align-grad-reduce", "align_grad_reduce", "Accepted without effect: the program places reductions."
        ),
        negation("--no-align-param-gather", "align_param_gather", "Accepted without effect, as the flag before."),
    ),
)
