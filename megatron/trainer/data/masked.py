"""The samples of a BERT and of a T5: sentences with masked words that the model predicts.

Samples come from megatron.core: sentences of one document, up to the sequence length. In a BERT sample some tokens are
masked; at the end of a document, and with the probability of `--short-seq-prob`, the sample is shorter and padded. In a
T5 sample spans of words are masked, and an extra id replaces each span; the decoder predicts the spans, each after its
id; all samples are padded to the two sequence lengths. Every stage has attention, so every stage needs the padding
masks. Each stage reads the samples itself, in the common order.
"""

from collections.abc import Iterator, Sequence

import numpy
import torch
from torch.nn.functional import cross_entropy

from megatron.core.datasets.bert_dataset import BERTMaskedWordPieceDataset, BERTMaskedWordPieceDatasetConfig
from megatron.core.datasets.masked_dataset import MaskedWordPieceDataset, MaskedWordPieceDatasetConfig
from megatron.core.datasets.t5_dataset import T5MaskedWordPieceDataset, T5MaskedWordPieceDatasetConfig
from megatron.core.tokenizers.base_tokenizer import MegatronTokenizerBase
from megatron.trainer.arguments.flags.config import TrainConfig
from megatron.trainer.data.datasets import SPLITS, Datasets, TokenFiles, build_blended
from megatron.trainer.data.microbatches import Field
from megatron.trainer.files.indexed_files import document_lengths
from megatron.trainer.files.text_files import LONGEST_SENTENCE
from megatron.trainer.report.metrics import LOSS

# --- BERT -------------------------------------------------------------------------------------------------------------


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

    The loss is the mean over the microbatch's masked tokens, plus, with the binary head, the mean over its samples of
    the sentence-order loss. Each microbatch has the same weight, whatever its number of masked tokens: the loss of a
    batch, both for gradients and for reports, is the mean over its microbatches and replicas. With `per_token` the
    weight of a microbatch is its number of masked tokens, so the token loss of a batch is the mean over the batch's
    masked tokens.

    Args:
        loss_mask: float32 [b, s], 1 where a token was masked.
        is_random: int64 [b], or None without the binary head.
        output: cross entropy of each token [b, s], and the logits of the sentence order [b, 2] or None.

    Returns the loss, and detached tensors for the log by name: [value, 1] for the masked tokens ([0, 0] if there are
    none), and the value for the sentence order. With `per_token`: the loss times the weight, the weight, and for the
    log [value times weight, weight].
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
    """megatron.core's masked dataset over `TokenFiles`, with an error for unknown tokens that names the remedy."""

    @staticmethod
    def build_low_level_dataset(dataset_path: str, config: MaskedWordPieceDatasetConfig) -> TokenFiles:
        return TokenFiles(dataset_path)

    def __getitem__(self, idx: int) -> dict:
        try:
            return super().__getitem__(idx)
        except KeyError as error:  # megatron.core looks up every token to find where words begin
            raise ValueError(
                f"token id {error.args[0]} in {self.dataset_path} is not in the vocabulary; use the tokenizer that the "
                f"data was made with"
            ) from error


class BertDataset(WordPieceFiles, BERTMaskedWordPieceDataset):
    """megatron.core's dataset, changed so that samples depend only on seed and data.

    megatron.core replaces a tenth of the masked tokens by random tokens from a list in the order of the tokenizer's
    vocabulary. With the `tokenizers` package this order differs between processes, so that stages and resumed runs
    would read different samples.
    """

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        self.token_lookup.sort()


def build_bert_datasets(args: TrainConfig, tokenizer: MegatronTokenizerBase) -> Datasets:
    """The three datasets of a BERT, as `build_blended` returns them. Raises ValueError also for an unfit tokenizer."""
    check_tokenizer(args, tokenizer)
    return _build(
        args, BertDataset, BERTMaskedWordPieceDatasetConfig, tokenizer, least=2 if args.bert_binary_head else 1,
        masking_max_ngram=_LONGEST_NGRAM, masking_use_geometric_distribution=False,
        classification_head=args.bert_binary_head,
    )  # fmt: skip


def _build(
    args: TrainConfig,
    dataset_class: type,
    config_class: type[MaskedWordPieceDatasetConfig],
    tokenizer: MegatronTokenizerBase,
    *,
    least: int,
    **options: object,
) -> Datasets:
    """Build the three datasets. `least`: the fewest sentences in a sample. `options`: further configuration fields."""
    return build_blended(
        args, dataset_class, config_class, reads=True, num_elements=lambda contents: contents.num_documents,
        check=None if args.mock_data else lambda config, has_split: check_documents(config, has_split, least=least),
        tokenizer=tokenizer, masking_probability=args.mask_prob, short_sequence_probability=args.short_seq_prob,
        masking_do_full_word=True, masking_do_permutation=False, masking_use_longer_ngrams=False, **options,
    )  # fmt: skip


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

    `least`: the fewest sentences in a sample. Raises ValueError that names the first split without a usable document.
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
    """Yield (split, prefix, range of its documents) for all data that the run reads."""
    for index, split in enumerate(SPLITS):
        if has_split[index]:
            blend = config.blend or config.blend_per_split[index]
            part = config.split_matrix[index] if config.blend else (0.0, 1.0)
            yield from ((split, prefix, part) for prefix in blend[0])


# --- T5 ---------------------------------------------------------------------------------------------------------------


_LONGEST_SPAN = 10
"""The largest number of words in a masked span, as in Megatron-LM."""
_MOCK_DOCUMENTS = 10_000


def t5_fields(args: TrainConfig) -> tuple[Field, ...]:
    """The fields that a T5's stages need for b samples of s encoder tokens and r decoder tokens.

    First stage: `text_enc` [b, s] and `text_dec` [b, r]. Last stage: `labels` [b, r] (-1 for no label), `loss_mask`
    (float32 [b, r]). Every stage: `enc_mask` [b, s] and `dec_mask` [b, r] (0 at padding). All but `loss_mask` are
    int64.
    """

    def of_decoder(size: int, _: int) -> tuple[int, int]:
        return size, args.decoder_seq_length

    return (
        Field(name="text_enc", stages="first", least_id=0),
        Field(name="text_dec", stages="first", shape=of_decoder, least_id=0),
        Field(name="labels", stages="last", shape=of_decoder, least_id=-1),
        Field(name="loss_mask", stages="last", shape=of_decoder, dtype=torch.float32),
        Field(name="enc_mask"),
        Field(name="dec_mask", shape=of_decoder),
    )


def t5_inputs(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor | None]:
    """The arguments of T5Stage's forward for a microbatch; None for those that the stage does not need."""
    labels = batch.get("labels")
    return {
        "encoder_tokens": batch.get("text_enc"),
        "decoder_tokens": batch.get("text_dec"),
        "encoder_padding": batch["enc_mask"],
        "decoder_padding": batch["dec_mask"],
        "labels": None if labels is None else labels.clamp(min=0),
    }


class T5Dataset(WordPieceFiles, T5MaskedWordPieceDataset):
    """megatron.core's T5 dataset, with an error for a too long target that names the remedy."""

    def __getitem__(self, idx: int) -> dict:
        try:
            return super().__getitem__(idx)
        except AssertionError as error:  # the padding would be negative
            raise ValueError(
                f"what sample {idx} of {self.dataset_path} takes out is longer than --decoder-seq-length "
                f"{self.config.sequence_length_decoder}; give more, or a lower --mask-prob"
            ) from error


class _MockSentences:
    """Documents of one sentence each: consecutive words of the vocabulary, from a random word on."""

    def __init__(self, config: T5MaskedWordPieceDatasetConfig) -> None:
        self._seed, self._longest = config.random_seed, config.sequence_length
        self._words = numpy.array(
            sorted(number for number, word in config.tokenizer.inv_vocab.items() if not word.startswith(("[", "<")))
        )

    def __getitem__(self, index: int) -> numpy.ndarray:
        random = numpy.random.default_rng((self._seed, index))
        first, length = random.integers(len(self._words)), random.integers(1, self._longest + 1)
        return self._words[(first + numpy.arange(length)) % len(self._words)]


class MockT5Dataset(T5Dataset):
    """Samples without files, for --mock-data."""

    @staticmethod
    def build_low_level_dataset(dataset_path: None, config: T5MaskedWordPieceDatasetConfig) -> _MockSentences:
        return _MockSentences(config)

    @staticmethod
    def numel_low_level_dataset(low_level_dataset: _MockSentences) -> int:
        return _MOCK_DOCUMENTS

    def _build_sample_index(self, sequence_length: int, min_sentences_per_sample: int) -> numpy.ndarray:
        """The index of samples, int64 [samples, 3]: for each its sentence, the next one, and the tokens to take."""
        documents = numpy.resize(self.indices, self.num_samples).astype(numpy.int64)
        return numpy.stack([documents, documents + 1, numpy.full_like(documents, sequence_length)], axis=1)


def build_t5_datasets(args: TrainConfig, tokenizer: MegatronTokenizerBase) -> Datasets:
    """The three datasets of a T5, as `build_blended` returns them."""
    return _build(
        args, MockT5Dataset if args.mock_data else T5Dataset, T5MaskedWordPieceDatasetConfig, tokenizer, least=1,
        masking_max_ngram=_LONGEST_SPAN, masking_use_geometric_distribution=True,
        sequence_length_decoder=args.decoder_seq_length,
    )  # fmt: skip
