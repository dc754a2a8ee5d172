"""A small valid command line of pretrain_t5.py, and the data of BERT's tests, which serve it, too."""

from pathlib import Path

from megatron.trainer.arguments.flags.config import TrainConfig
from tests.trainer.arguments.command_line import configuration

SMALL_T5 = (
    "--encoder-num-layers 2 --decoder-num-layers 2 --hidden-size 32 --num-attention-heads 4 --encoder-seq-length 24 "
    "--decoder-seq-length 16 --max-position-embeddings 24 --micro-batch-size 1 --global-batch-size 8 --train-iters 10 "
    "--lr 1e-3 --vocab-extra-ids 10 --data-path none --vocab-file none"
)


def defaults() -> dict:
    """The defaults of pretrain_t5.py."""
    from megatron.trainer.programs import pretrain_t5

    return pretrain_t5.DEFAULTS


def t5_arguments(extra: str = "", *, world_size: int = 1) -> TrainConfig:
    """The configuration of `SMALL_T5` with `extra` flags, on a machine without CUDA."""
    return configuration(f"{SMALL_T5} {extra}".split(), defaults=defaults(), world_size=world_size)


def write_tokenizer(folder: Path, *, words: int = 40, extra_ids: int = 20, name: str = "<extra_id_{}>") -> Path:
    """A `tokenizer.json` as a T5 of Hugging Face has it: words w0, w1, ..., and extra ids, named so, at the end."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokens = ["<pad>", "</s>", "<unk>", *(f"w{number}" for number in range(words))]
    core = Tokenizer(models.WordLevel({token: number for number, token in enumerate(tokens)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    core.add_special_tokens([name.format(number) for number in reversed(range(extra_ids))])
    core.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"
