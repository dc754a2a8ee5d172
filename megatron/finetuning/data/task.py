"""The description of a task: its model, its conversion of samples to rows, and the outputs that its metrics need."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from torch import Tensor, nn

from megatron.finetuning.data.batches import Rows
from megatron.finetuning.data.files import File

Forward = Callable[[nn.Module, Mapping[str, Tensor]], Mapping[str, Tensor]]


@dataclass(frozen=True)
class Prompts:
    """The prompts from which evaluations generate.

    Attributes:
        texts: the prompts as texts.
        references: the true answers.
        ids: the token ids of each prompt.
        encoded: for a model with an encoder, the prompts as it reads them, [prompts, tokens]; otherwise empty.
        notes: sentences for the user on how the samples were prepared.
    """

    texts: Sequence[str]
    references: Sequence[str]
    ids: Sequence[Sequence[int]]
    encoded: Mapping[str, Tensor] = field(default_factory=dict)
    notes: Sequence[str] = ()


@dataclass(frozen=True)
class Prepared:
    """The result of a task's preparation with a file.

    Attributes:
        rows: makes rows of a file with the same columns.
        changes: changes to the model's configuration.
        prompts: makes the prompts of a file with the same columns; None: the task has none.
        forward: (model, microbatch) -> the model's output with its loss; None: the model computes its own loss.
        pieces: makes the same rows of a file that comes in pieces; None: each piece makes its rows by itself.
    """

    rows: Callable[[File], Rows]
    changes: Mapping[str, object] = field(default_factory=dict)
    _: KW_ONLY
    prompts: Callable[[File], Prompts] | None = None
    forward: Forward | None = None
    pieces: Callable[[Iterable[File]], Iterator[Rows]] | None = None

    def rows_of_pieces(self, files: Iterable[File]) -> Iterator[Rows]:
        """The rows of a file that comes in pieces."""
        return map(self.rows, files) if self.pieces is None else self.pieces(files)


@dataclass(frozen=True)
class Task:
    """A row of the table of tasks.

    Attributes:
        auto_model: the class of transformers that opens the model.
        prepare: (arguments, processor, file, classes) -> `Prepared`. The file is the training file if there is one;
            classes: name -> number of the classes that the model already knows.
        keep: fields of the model's output, besides the loss, that metrics need.
        summary: (name, tensor, microbatch) -> the part of a kept field that metrics need.
        auto_processor: the class of transformers that opens the tokenizer, or the processor of images or sound.
        couples_rows: the loss of a row depends on the other rows of its microbatch, so no row can fill up a microbatch.
        new_head: initialise a head that the model's folder lacks at random, and ignore the head of another task.
    """

    auto_model: str
    prepare: Callable[[argparse.Namespace, Any, File, Mapping[str, int]], Prepared]
    keep: tuple[str, ...] = ()
    summary: Callable[[str, Tensor, Mapping[str, Tensor]], Tensor] = lambda name, tensor, batch: tensor
    auto_processor: str = "AutoTokenizer"
    new_head: bool = True
    couples_rows: bool = False


def most_likely(name: str, tensor: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    """The index of the largest score in the last dimension, as the summary of an output."""
    return tensor.argmax(-1)


def padded(
    tokenizer: Any, texts: Sequence[str], pairs: Sequence[str] | None = None, *, length: int, **returned: bool
) -> dict[str, Tensor]:
    """Token ids of texts, or pairs of texts, padded or cut to `length`.

    Returns `input_ids`, `attention_mask` and, if the tokenizer makes them, `token_type_ids`: int64 [texts, length];
    and what `returned` asks the tokenizer for.

    Raises ValueError if `length` leaves no room for a text, or the tokenizer cannot pad.
    """
    give_padding(tokenizer)
    special = tokenizer.num_special_tokens_to_add(pair=pairs is not None)
    if special >= length:
        raise ValueError(
            f"{length} tokens leave no room for a text, as {special} are special; give a larger --max_seq_length"
        )
    options = {"truncation": True, "max_length": length, "padding": "max_length", "return_tensors": "pt"}
    return dict(tokenizer(texts, pairs, **options, **returned))


def give_padding(tokenizer: Any) -> None:
    """Let a tokenizer without a padding token, such as GPT-2's, pad with its end token.

    Raises ValueError if the tokenizer has neither token.
    """
    if tokenizer.pad_token_id is None:
        if tokenizer.eos_token_id is None:
            raise ValueError(
                "the tokenizer has neither a padding token nor one for the end; set pad_token in its configuration"
            )
        tokenizer.pad_token = tokenizer.eos_token


def require_fast(tokenizer: Any, who: str, knows: str = "which characters a token is") -> None:
    """Raise ValueError unless the tokenizer is a fast one. `who`: the task that needs it. `knows`: what the task has to
    know."""
    if not getattr(tokenizer, "is_fast", False):
        raise ValueError(
            f"{who} has to know {knows}, and the model's tokenizer does not say; give its folder a tokenizer.json"
        )


def parts_of(processor: Any, names: Sequence[str], folder: str) -> tuple[Any, ...]:
    """The parts of a processor, such as its tokenizer. Raises ValueError if it lacks one of them."""
    parts = tuple(getattr(processor, name, None) for name in names)
    if None in parts:
        raise ValueError(
            f"{folder} has no processor with its {' and '.join(name.replace('_', ' ') for name in names)}; save it "
            "there with processor.save_pretrained"
        )
    return parts


def config_of(folder: str) -> Any:
    """The configuration in a model's folder, which `read_data` has found readable."""
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(folder, local_files_only=True)
