"""T5's datasets, and the parts of its microbatches.

Samples come from megatron.core: sentences of one document up to the encoder's length. Runs of words are taken out, an
extra id stands for each, and the decoder says them, each behind its id. All samples are padded to the two lengths.
Every stage attends, so every stage needs the masks of the padding, and each reads the samples itself, in the common
order.
"""

import numpy
import torch

from megatron.core.datasets.t5_dataset import T5MaskedWordPieceDataset, T5MaskedWordPieceDatasetConfig
from megatron.core.tokenizers.base_tokenizer import MegatronTokenizerBase
from megatron.trainer.arguments.flags.config import TrainConfig
from megatron.trainer.data.bert import WordPieceFiles, check_documents
from megatron.trainer.data.datasets import Datasets, build_blended
from megatron.trainer.data.microbatches import Field

_LONGEST_SPAN = 10
"""The largest number of words that are taken out together, as in Megatron-LM."""
_MOCK_DOCUMENTS = 10_000


def t5_fields(args: TrainConfig) -> tuple[Field, ...]:
    """The fields that a T5's stages need for b samples of s tokens of the encoder and r of the decoder.

    First stage: `text_enc` [b, s] and `text_dec` [b, r]. Last stage: `labels` [b, r] (-1 for no label), `loss_mask`
    (float32 [b, r]). Every stage: `enc_mask` [b, s] and `dec_mask` [b, r] (0 at padding). All but one are int64.
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
    """megatron.core's dataset, whose errors say what to change."""

    def __getitem__(self, idx: int) -> dict:
        try:
            return super().__getitem__(idx)
        except AssertionError as error:  # of the padding, which would be negative
            raise ValueError(
                f"what sample {idx} of {self.dataset_path} takes out is longer than --decoder-seq-length "
                f"{self.config.sequence_length_decoder}; give more, or a lower --mask-prob"
            ) from error


class _MockSentences:
    """Documents of one sentence each, of words that follow each other in the vocabulary, from a random one on."""

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
        """Each document in turn: (its sentence, the next one, the tokens to take), int64 [samples, 3]."""
        documents = numpy.resize(self.indices, self.num_samples).astype(numpy.int64)
        return numpy.stack([documents, documents + 1, numpy.full_like(documents, sequence_length)], axis=1)


def build_t5_datasets(args: TrainConfig, tokenizer: MegatronTokenizerBase) -> Datasets:
    """The three datasets of a T5, as `build_blended` returns them."""
    return build_blended(
        args,
        MockT5Dataset if args.mock_data else T5Dataset,
        T5MaskedWordPieceDatasetConfig,
        reads=True,
        num_elements=lambda contents: contents.num_documents,
        check=None if args.mock_data else lambda config, has_split: check_documents(config, has_split, least=1),
        tokenizer=tokenizer,
        sequence_length_decoder=args.decoder_seq_length,
        masking_probability=args.mask_prob,
        short_sequence_probability=args.short_seq_prob,
        masking_max_ngram=_LONGEST_SPAN,
        masking_do_full_word=True,
        masking_do_permutation=False,
        masking_use_longer_ngrams=False,
        masking_use_geometric_distribution=True,
    )
