"""BERT's datasets, the parts of its microbatches, and its losses.

Samples come from megatron.core: sentences of one document up to the sequence length, with some tokens masked. At the
end of a document, and with the probability of `--short-seq-prob`, a sample is shorter and padded. Every stage has
attention, so every stage needs the mask of the padding. Each stage reads the samples itself, in the common order.
"""

from collections.abc import Iterator, Sequence

import numpy
import torch
from torch.nn.functional import cross_entropy

from megatron.core.datasets.bert_dataset import BERTMaskedWordPieceDataset, BERTMaskedWordPieceDatasetConfig
from megatron.core.datasets.masked_dataset import MaskedWordPieceDataset, MaskedWordPieceDatasetConfig
from megatron.core.tokenizers.base_tokenizer import MegatronTokenizerBase
from megatron.trainer.arguments.flags.config import TrainConfig
from megatron.trainer.data.datasets import SPLITS, Datasets, TokenFiles, build_blended
from megatron.trainer.data.microbatches import Field
from megatron.trainer.data.sentences import LONGEST_SENTENCE
from megatron.trainer.files.indexed_files import document_lengths
from megatron.trainer.report.metrics import LOSS

ORDER_LOSS = "sop loss"
_LONGEST_NGRAM = 3  # largest number of adjacent words that are masked together, as in Megatron-LM


def loss_names(args: TrainConfig) -> tuple[str, ...]:
    """The names of the losses that `bert_loss` reports."""
    return (LOSS, ORDER_LOSS) if args.bert_binary_head else (LOSS,)


def bert_fields(args: TrainConfig) -> tuple[Field, ...]:
    """The fields that a BERT's stages need for b samples of s tokens, all int64 except `loss_mask`.

    First stage: `text` [b, s], and with the binary head `types` [b, s]. Last stage: `labels` [b, s] (-1 for no label),
    `loss_mask` (float32 [b, s]), and with the binary head `is_random` [b] (1 if the segments are swapped). Every stage:
    `padding_mask` [b, s] (0 at padding).
    """
    fields = (
        Field(name="text", stages="first", least_id=0),
        Field(name="padding_mask"),
        Field(name="labels", stages="last", least_id=-1),
        Field(name="loss_mask", stages="last", dtype=torch.float32),
    )
    if not args.bert_binary_head:
        return fields
    return (
        *fields,
        Field(name="types", stages="first"),
        Field(name="is_random", stages="last", shape=lambda size, length: (size,)),
    )


def bert_inputs(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor | None]:
    """The arguments of BertModel's forward for a microbatch; None for those that the stage does not need."""
    labels = batch.get("labels")
    return {
        "input_ids": batch.get("text"),
        "attention_mask": batch["padding_mask"],
        "tokentype_ids": batch.get("types"),
        "lm_labels": None if labels is None else labels.clamp(min=0),
    }


def bert_loss(
    loss_mask: torch.Tensor | None,
    is_random: torch.Tensor | None,
    output: tuple[torch.Tensor, torch.Tensor | None],
    *,
    per_token: bool = False,
) -> tuple:
    """BERT's loss on one microbatch, weighted as in Megatron-LM.

    It is the mean over the microbatch's masked tokens, plus, with the binary head, the mean over its samples of the
    loss of the order. Each microbatch has the same weight, whatever its number of masked tokens: the loss of a batch,
    both for gradients and for reports, is the mean over its microbatches and replicas. With `per_token` the weight of a
    microbatch is its number of masked tokens, so the first loss of a batch is the mean over the batch's masked tokens.

    Args:
        loss_mask: float32 [b, s], 1 where a token was masked.
        is_random: int64 [b], or None without the binary head.
        output: cross entropy of each token [b, s], and the logits of the order [b, 2] or None.

    Returns the loss, and detached tensors for the log by name: [value, 1] for the masked tokens ([0, 0] if there are
    none), and the value for the order. With `per_token`: the loss times the weight, the weight, and for the log [value
    times weight, weight].
    """
    losses, order_logits = output
    mask = loss_mask.reshape(-1).float()
    num_masked = mask.sum()
    loss = torch.sum(losses.reshape(-1).float() * mask) / num_masked.clamp(min=1)
    numbers = {LOSS: torch.stack([loss.detach(), num_masked.clamp(max=1)])}
    if order_logits is not None:
        order_loss = cross_entropy(order_logits.float(), is_random)
        numbers[ORDER_LOSS] = order_loss.detach()
        loss = loss + order_loss
    if not per_token:
        return loss, numbers
    weighted = {name: torch.stack([value.reshape(-1)[0] * num_masked, num_masked]) for name, value in numbers.items()}
    return loss * num_masked, num_masked, weighted


class WordPieceFiles(MaskedWordPieceDataset):
    """A masked dataset of megatron.core that reads its files as the other datasets do, and whose error says what to
    change."""

    @staticmethod
    def build_low_level_dataset(dataset_path: str, config: MaskedWordPieceDatasetConfig) -> TokenFiles:
        return TokenFiles(dataset_path)

    def __getitem__(self, idx: int) -> dict:
        try:
            return super().__getitem__(idx)
        except KeyError as error:  # megatron.core looks up every token, to find the beginnings of words
            raise ValueError(
                f"token id {error.args[0]} in {self.dataset_path} is not in the vocabulary; use the tokenizer that the "
                f"data was made with"
            ) from error


class BertDataset(WordPieceFiles, BERTMaskedWordPieceDataset):
    """megatron.core's dataset, changed so that samples depend only on seed and data.

    megatron.core replaces a tenth of the masked tokens by random ones from a list in the order of the tokenizer's
    vocabulary. With the `tokenizers` package this order differs from process to process, so that stages and resumed
    runs would see different samples.
    """

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        self.token_lookup.sort()


def build_bert_datasets(args: TrainConfig, tokenizer: MegatronTokenizerBase) -> Datasets:
    """The three datasets of a BERT, as `build_blended` returns them. Raises ValueError also for a wrong tokenizer."""
    check_tokenizer(args, tokenizer)
    return build_blended(
        args,
        BertDataset,
        BERTMaskedWordPieceDatasetConfig,
        reads=True,
        num_elements=lambda contents: contents.num_documents,
        check=lambda config, has_split: check_documents(config, has_split, least=2 if args.bert_binary_head else 1),
        tokenizer=tokenizer,
        masking_probability=args.mask_prob,
        short_sequence_probability=args.short_seq_prob,
        masking_max_ngram=_LONGEST_NGRAM,
        masking_do_full_word=True,
        masking_do_permutation=False,
        masking_use_longer_ngrams=False,
        masking_use_geometric_distribution=False,
        classification_head=args.bert_binary_head,
    )


def check_tokenizer(args: TrainConfig, tokenizer: MegatronTokenizerBase) -> None:
    """Check that a tokenizer has the tokens that BERT's samples need. Raises ValueError if not."""
    numbers = {}
    for name in ("cls", "sep", "mask", "pad"):
        try:
            numbers[name] = getattr(tokenizer, name)
        except (AttributeError, NotImplementedError, RecursionError):  # some of megatron.core's tokenizers recurse
            numbers[name] = None
    missing = [f"[{name.upper()}]" for name, number in numbers.items() if number is None]
    if missing:
        raise ValueError(
            f"--tokenizer-type {args.tokenizer_type} has no {', '.join(missing)}; use BertWordPieceLowerCase or "
            f"BertWordPieceCase with --vocab-file"
        )
    if numbers["pad"] != 0:
        raise ValueError(
            f"--tokenizer-type {args.tokenizer_type} has [PAD] as {numbers['pad']}, but megatron.core pads samples "
            "of BERT with 0; give a vocabulary that begins with [PAD]"
        )


def check_documents(config: MaskedWordPieceDatasetConfig, has_split: Sequence[bool], *, least: int) -> None:
    """Check that every split of every file has a usable document, since megatron.core would search for one forever.

    `least`: sentences that a sample needs. Raises ValueError naming the first split without one.
    """
    for split, prefix, part in _parts(config, has_split):
        if not any(_is_usable(lengths, least) for lengths in document_lengths(prefix, part)):
            remedy = "; preprocess with --split-sentences, or train with --bert-no-binary-head" if least == 2 else ""
            raise ValueError(
                f"{prefix} has no document of at least {least} sentence{'s' if least > 1 else ''} of at most "
                f"{LONGEST_SENTENCE} tokens for the {split} split{remedy}"
            )


def _is_usable(lengths: numpy.ndarray, least: int) -> bool:
    return len(lengths) >= least and (len(lengths) == 1 or int(lengths.max()) <= LONGEST_SENTENCE)


def _parts(
    config: MaskedWordPieceDatasetConfig, has_split: Sequence[bool]
) -> Iterator[tuple[str, str, tuple[float, float]]]:
    """Yield (split, prefix, part of the documents) for all data that the run reads."""
    for index, split in enumerate(SPLITS):
        if has_split[index]:
            blend = config.blend or config.blend_per_split[index]
            part = config.split_matrix[index] if config.blend else (0.0, 1.0)
            yield from ((split, prefix, part) for prefix in blend[0])
