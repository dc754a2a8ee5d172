"""The three datasets of `--sft`: conversations that share sequences, with a loss on their answers.

Problem: conversations have any length. A sequence with a single conversation is mostly padding, and conversations that
are cut at the ends of sequences lose their questions.

Solution: each conversation is tokenized whole. Its last token is predicted and predicts nothing, so a conversation of
n + 1 tokens takes n places, and no label comes from another conversation. The longest conversation goes first, to the
sequence in which it leaves the least room (best fit decreasing). The rest of a sequence is padding, a document of its
own without a loss. The data and `--seq-length` alone decide which conversations share a sequence. The order of
sequences differs in each epoch, by the seed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy

from megatron.core import parallel_state
from megatron.core.datasets.blended_megatron_dataset_config import BlendedMegatronDatasetConfig
from megatron.core.datasets.megatron_dataset import MegatronDataset
from megatron.core.tokenizers.base_tokenizer import MegatronTokenizerBase
from megatron.documents import counted
from megatron.pipeline.runtime.failure.agreement import agreed, on_rank_zero
from megatron.trainer.arguments.flags.config import TrainConfig
from megatron.trainer.data.classification import EpochSamples
from megatron.trainer.data.datasets import Datasets, build_blended
from megatron.trainer.files import conversations
from megatron.trainer.files.conversations import best_fit
from megatron.trainer.files.indexed_files import blends

# --- tokens -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Documents:
    """The tokens of a file's conversations.

    Attributes:
        tokens: int32 [tokens], the conversations one after the other.
        has_loss: bool [tokens], whether a token belongs to an answer.
        borders: int64 [conversations + 1], the first token of each conversation, and the number of tokens.
        lines: int64 [lines + 1], the first conversation of each line of the file, and the number of conversations.
        num_cut: number of conversations that were cut to the length of a sequence.
        num_left_out: number of conversations left out because they have no answer within this length.
    """

    tokens: numpy.ndarray
    has_loss: numpy.ndarray
    borders: numpy.ndarray
    lines: numpy.ndarray
    num_cut: int
    num_left_out: int

    @classmethod
    def of(
        cls,
        lines: Sequence[Sequence[conversations.Conversation]],
        tokenizer: MegatronTokenizerBase,
        prompt_format: conversations.PromptFormat,
        *,
        length: int,
    ) -> Documents:
        """Tokenize conversations, each followed by the end-of-document token; `length`: tokens of a sequence."""
        tokens, losses, lengths, firsts = [], [], [], [0]
        num_cut = num_left_out = 0
        for line in lines:
            for conversation in line:
                ids, has_loss = _tokenized(conversation, tokenizer, prompt_format)
                is_cut = len(ids) > length + 1
                ids, has_loss = ids[: length + 1], has_loss[: length + 1]
                if not any(has_loss[1:]):
                    num_left_out += 1
                    continue
                num_cut += is_cut
                tokens.append(numpy.array(ids, dtype=numpy.int32))
                losses.append(numpy.array(has_loss, dtype=bool))
                lengths.append(len(ids))
            firsts.append(len(tokens))
        return cls(
            numpy.concatenate(tokens) if tokens else numpy.empty(0, dtype=numpy.int32),
            numpy.concatenate(losses) if losses else numpy.empty(0, dtype=bool),
            numpy.cumsum([0, *lengths], dtype=numpy.int64),
            numpy.array(firsts, dtype=numpy.int64), num_cut, num_left_out,
        )  # fmt: skip


def _tokenized(
    conversation: conversations.Conversation,
    tokenizer: MegatronTokenizerBase,
    prompt_format: conversations.PromptFormat,
) -> tuple[list[int], list[bool]]:
    """The token ids, and for each token whether it belongs to an answer.

    An end-of-document token belongs to the text before it.
    """
    ids: list[int] = []
    has_loss: list[bool] = []
    is_answer = False
    for text, is_answer in prompt_format.texts(conversation):
        found = tokenizer.tokenize(text)
        ids += found
        has_loss += [is_answer] * len(found)
    if ids and ids[-1] != tokenizer.eod:
        ids.append(tokenizer.eod)
        has_loss.append(is_answer)
    return ids, has_loss


# --- sequences --------------------------------------------------------------------------------------------------------


class PackedDocuments:
    """Sequences of several documents, each a dictionary of arrays (see `gpt_fields`).

    Args:
        documents: the documents of a file.
        lines: the numbers of the lines of the file whose documents are taken.
        length: tokens of a sequence.
        end: the token id of padding.
    """

    def __init__(self, documents: Documents, lines: Sequence[int], *, length: int, end: int) -> None:
        self.documents, self.length, self.end = documents, length, end
        bounds = documents.lines
        self._numbers = [number for line in lines for number in range(bounds[line], bounds[line + 1])]
        lengths = [int(documents.borders[number + 1] - documents.borders[number]) - 1 for number in self._numbers]
        self._sequences = best_fit(lengths, length)
        self.num_documents, self.num_places = len(lengths), sum(lengths)

    def __len__(self) -> int:
        return len(self._sequences)

    def __getitem__(self, index: int) -> dict[str, numpy.ndarray]:
        length, documents = self.length, self.documents
        tokens, labels = (numpy.full(length, self.end, dtype=numpy.int64) for _ in range(2))
        loss_mask, position_ids = numpy.zeros(length, dtype=numpy.float32), numpy.arange(length, dtype=numpy.int64)
        cu_seqlens, begin = numpy.full(length + 1, length, dtype=numpy.int32), 0
        for place, number in enumerate(self._numbers[each] for each in self._sequences[index]):
            own = slice(*documents.borders[number : number + 2])
            ids, end = documents.tokens[own], begin + own.stop - own.start - 1
            cu_seqlens[place] = begin
            tokens[begin:end], labels[begin:end] = ids[:-1], ids[1:]
            loss_mask[begin:end] = documents.has_loss[own][1:]
            position_ids[begin:end] = numpy.arange(end - begin)
            begin = end
        if begin < length:
            cu_seqlens[place + 1] = begin
            position_ids[begin:] = numpy.arange(length - begin)
        return {
            "tokens": tokens, "labels": labels, "loss_mask": loss_mask, "position_ids": position_ids,
            "cu_seqlens": cu_seqlens,
        }  # fmt: skip


# --- the three datasets -----------------------------------------------------------------------------------------------


@dataclass
class ConversationsConfig(BlendedMegatronDatasetConfig):
    """The configuration of the datasets. `documents`: path of a file -> its documents."""

    documents: dict[str, Documents] = field(default_factory=dict)


class ConversationsDataset(MegatronDataset):
    """The sequences of some lines of a file, in the order of epochs."""

    def __init__(self, dataset, dataset_path, indices, num_samples, index_split, config: ConversationsConfig) -> None:
        super().__init__(dataset, dataset_path, indices, num_samples, index_split, config)
        self.packed = PackedDocuments(dataset, indices, length=config.sequence_length, end=config.tokenizer.eod)
        if not len(self.packed):
            raise ValueError(
                f"{dataset_path} has no answers in its {index_split.name} split that begin within --seq-length "
                f"{config.sequence_length}; give more conversations, another --split, or a longer --seq-length"
            )
        self.samples = EpochSamples(self.packed, seed=config.random_seed, length=num_samples or len(self.packed))

    @staticmethod
    def build_low_level_dataset(dataset_path: str, config: ConversationsConfig) -> Documents:
        return config.documents[dataset_path]

    @staticmethod
    def numel_low_level_dataset(low_level_dataset: Documents) -> int:
        return len(low_level_dataset.lines) - 1

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, numpy.ndarray]:
        return self.samples[index]


def build_conversations(args: TrainConfig, tokenizer: MegatronTokenizerBase) -> Datasets:
    """The three datasets of conversations, as `build_blended` returns them, with a note on the sequences.

    Collective: every rank must call it. Raises ValueError as `files.conversations.read` does, too.
    """
    if tokenizer.eod is None:
        raise ValueError("--sft ends each answer with the tokenizer's end token, and it has none; name its eos_token")
    blend, per_split = blends(args)
    paths = {path for each in (blend, *(per_split or ())) if each for path in each[0]}
    prompt_format = conversations.PROMPT_FORMATS[args.sft_tokenizer_prompt_format]
    documents: dict[str, Documents] = {}
    with agreed():
        if parallel_state.get_tensor_model_parallel_rank() == 0:
            for path in sorted(paths):
                lines = conversations.read(path)
                documents[path] = Documents.of(lines, tokenizer, prompt_format, length=args.seq_length)
    num_lines = on_rank_zero(lambda: {path: len(each.lines) - 1 for path, each in documents.items()})
    datasets = build_blended(
        args, ConversationsDataset, ConversationsConfig, reads=True, contents_of=num_lines.get, num_elements=int,
        tokenizer=tokenizer, documents=documents,
    )  # fmt: skip
    note = on_rank_zero(lambda: _note(datasets.parts[0], documents.values()))
    return Datasets(datasets.parts, datasets.has_split, notes=(note,) if note else ())


def _note(training, documents: Sequence[Documents]) -> str | None:
    """A sentence about the packing of the training data; None without training data."""
    if training is None:
        return None
    packed = [each.packed for each in getattr(training, "datasets", [training])]
    places = sum(len(each) * each.length for each in packed)
    cut, left_out = (sum(getattr(each, name) for each in documents) for name in ("num_cut", "num_left_out"))
    return (
        f"{counted(sum(each.num_documents for each in packed), 'conversation')} for training in "
        f"{counted(sum(map(len, packed)), 'sequence')} of {packed[0].length} tokens, "
        f"{1 - sum(each.num_places for each in packed) / places:.1%} of them padding; of all splits {cut} longer ones "
        f"are cut, and {left_out} without an answer within --seq-length left out"
    )
