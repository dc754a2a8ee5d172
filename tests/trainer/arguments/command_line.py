"""A small valid command line, for tests that change one thing about it."""

from megatron.pipeline.start_up.core_version import TRAINED
from megatron.trainer.arguments import Platform, parse_args, resolve_platform, validate_args
from megatron.trainer.arguments.flags.config import TrainConfig

SMALL = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 "
    "--micro-batch-size 1 --global-batch-size 8 --train-iters 10 --lr 1e-3 --mock-data "
    "--tokenizer-type NullTokenizer --vocab-size 100"
)
# What megatron.core 0.16 does, with the HybridModel of later versions.
CORE = TRAINED[0, 16]._replace(has_hybrid_model=True)
CPU = Platform(is_cuda=False, has_transformer_engine=False, has_apex=False, core=CORE)
GPU = Platform(is_cuda=True, has_transformer_engine=True, has_apex=True)


def argv(extra: str = "", without: str = "") -> list[str]:
    """SMALL as words, without the flags named in `without` (and their values), followed by `extra`."""
    kept, dropping = [], False
    for word in SMALL.split():
        if word.startswith("--"):
            dropping = word in without.split()
        if not dropping:
            kept.append(word)
    return kept + extra.split()


def arguments(extra: str = "", *, without: str = "", world_size: int = 1, platform: Platform = CPU) -> TrainConfig:
    """The configuration of SMALL, changed as `words` does, on a machine like `platform`."""
    return configuration(argv(extra, without), world_size=world_size, platform=platform)


def configuration(
    words: list[str], *, defaults: dict | None = None, world_size: int = 1, platform: Platform = CPU, **values: object
) -> TrainConfig:
    """The configuration of a command line, with further values."""
    args = parse_args(words, defaults=defaults)
    validate_args(args, world_size=world_size)
    resolve_platform(args, platform)
    return TrainConfig.of(args, **values)
