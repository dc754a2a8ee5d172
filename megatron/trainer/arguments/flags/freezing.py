"""Flags of training that freezes what has converged (PipeTransformer)."""

from megatron.elastic.freeze_rule import RULES
from megatron.trainer.arguments.flags.specification import Group, integer, number, option, switch

GROUP = Group(
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
