"""Flags of `pretrain_vision_classify.py` and `finetune_bert.py`."""

from megatron.trainer.arguments.flags.specification import Group, Role, integer, negation, option

CLASSIFIERS = ("vit", "bert-classify")
"""Architectures that tell classes."""

GROUP = Group(
    "classification",
    "What `pretrain_vision_classify.py` and `finetune_bert.py` learn, and for how long. The other programs refuse "
    "these flags.",
    (
        option(
            "--num-classes",
            integer,
            None,
            "Number of classes. Default: of pretrain_vision_classify.py 1000, of finetune_bert.py those of the "
            "training data.",
            roles=Role.SHAPE,
        ),
        option(
            "--epochs",
            integer,
            None,
            "Length of the run in passes over the training data, in place of --train-iters or --train-samples. One "
            "epoch follows the other in the same batch; only the last batch of the run is filled up, with samples of "
            "the epoch that would follow.",
        ),
    ),
)

VISION = Group(
    "vision",
    "The images of `pretrain_vision_classify.py`, and how they become a sequence. The other programs refuse these "
    "flags.",
    (
        option("--img-h", integer, 224, "Height of an image, in pixels."),
        option("--img-w", integer, 224, "Width of an image, in pixels."),
        option("--num-channels", integer, 3, "Numbers of a pixel."),
        option("--patch-dim", integer, 16, "Height and width of a patch, which becomes a token, in pixels."),
        negation(
            "--disable-vision-class-token",
            "vision_class_token",
            "Tell the class from the mean over all patches, and not from a token of its own.",
        ),
    ),
    Role.SHAPE,
)
