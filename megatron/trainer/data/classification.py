"""The three datasets of a classifier of images or texts, the same on every rank that reads data.

Samples repeat in each epoch, in a new order. A run counts positions: position i is sample i % n of epoch i // n, and
the order of an epoch depends only on the seed and the number of the epoch. It does not depend on replicas, microbatches
or the point at which a run was resumed. A batch may contain the last samples of an epoch and the first ones of the
next, so no sample is left out. There is no random augmentation: a sample is the same in every epoch, and `sample_id`
identifies it.
"""

import hashlib
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy
import torch

from megatron.core import parallel_state
from megatron.core.tokenizers.base_tokenizer import MegatronTokenizerBase
from megatron.pipeline.runtime.failure.agreement import agreed, gathered
from megatron.trainer.arguments.flags.config import TrainConfig
from megatron.trainer.arguments.rules.programs import data_paths
from megatron.trainer.data.datasets import Datasets, needs_some, num_samples
from megatron.trainer.data.masked import check_tokenizer
from megatron.trainer.data.microbatches import Field
from megatron.trainer.files import image_files, text_files

# --- samples in the order of epochs -----------------------------------------------------------------------------------


class _Samples(Protocol):
    """A sequence of samples, each a dictionary of numbers and arrays; `digest` identifies their content."""

    digest: str

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> dict: ...


class _RepeatedSamples(torch.utils.data.Dataset):
    """`length` positions, each with one of the samples."""

    samples: _Samples
    length: int
    samples_repeat = True
    """Whether a sample id means the same sample in every epoch and in every run on the same data."""

    @property
    def digest(self) -> str:
        """The digest of the data; it does not depend on their order in an epoch."""
        return self.samples.digest

    def __len__(self) -> int:
        return self.length


class EpochSamples(_RepeatedSamples):
    """The samples at the positions of a training run.

    Args:
        samples: the samples of one epoch.
        seed: the seed of the run.
        length: the number of positions in the run.
    """

    def __init__(self, samples: _Samples, *, seed: int, length: int) -> None:
        self.samples, self.seed, self.length = samples, seed, length
        self._epoch, self._order = -1, numpy.empty(0, dtype=numpy.int64)

    def sample_id(self, index: int) -> int:
        """The number of the sample at a position, from 0 to the number of samples in an epoch minus 1."""
        epoch, place = divmod(index, len(self.samples))
        if epoch != self._epoch:
            self._epoch, self._order = epoch, order_of_epoch(len(self.samples), seed=self.seed, epoch=epoch)
        return int(self._order[place])

    def __getitem__(self, index: int) -> dict:
        number = self.sample_id(index)
        return {**self.samples[number], "counts": 1.0, "sample_id": number}


class EvaluationSamples(_RepeatedSamples):
    """All samples once, in order, and then filler samples with weight 0 up to a whole number of batches.

    Args:
        samples: the samples of the data.
        batch_size: samples in a batch over all replicas.
        per_evaluation: samples in an evaluation, a multiple of `batch_size`.
    """

    def __init__(self, samples: _Samples, *, batch_size: int, per_evaluation: int) -> None:
        self.samples = samples
        self.length = max(per_evaluation, -(-len(samples) // batch_size) * batch_size)
        self.starts_over = self.length == per_evaluation
        """Whether every evaluation begins with the first sample."""

    def sample_id(self, index: int) -> int:
        """The number of the sample at a position; a filler repeats an earlier sample."""
        return index % len(self.samples)

    def __getitem__(self, index: int) -> dict:
        number = self.sample_id(index)
        return {**self.samples[number], "counts": float(index < len(self.samples)), "sample_id": number}


def order_of_epoch(num_samples: int, *, seed: int, epoch: int) -> numpy.ndarray:
    """The numbers of the samples of an epoch in their order, int64 [num_samples]."""
    return numpy.random.RandomState([seed, epoch]).permutation(num_samples)  # which numpy keeps stable


# --- the three datasets -----------------------------------------------------------------------------------------------

_COMMON_FIELDS = (
    Field(name="sample_id", stages="first", shape=lambda size, length: (size,)),
    Field(name="labels", stages="last", shape=lambda size, length: (size,)),
    Field(name="counts", stages="last", shape=lambda size, length: (size,), dtype=torch.float32),
)
"""The fields of every classifier, for b samples: `sample_id` (int64 [b]) on the first stage, `labels` (int64 [b]) and
`counts` (float32 [b]) on the last."""


def _build_datasets(args: TrainConfig, fields: Sequence[Field], read: Callable[[list[str]], _Samples]) -> Datasets:
    """The datasets for training, validation and test, with the digest of the training data.

    Collective: every rank must call it.

    Args:
        fields: the fields of a sample, with the stages that need them.
        read: reads the samples of files and folders; raises ValueError if it cannot.

    Raises ValueError for data that cannot be read, and on every rank if ranks find different data.
    """
    paths, wanted = data_paths(args), num_samples(args)
    has_split = tuple(bool(each) and number > 0 for each, number in zip(paths.values(), wanted, strict=True))
    chosen = [each if there else [] for each, there in zip(paths.values(), has_split, strict=True)]
    found, digest = _read_alike(read, chosen if _reads(args, fields) else [[] for _ in chosen])
    train, *others = found
    parts = [
        train and EpochSamples(train, seed=args.seed, length=wanted[0]),
        *(
            each and EvaluationSamples(
                each, batch_size=args.global_batch_size, per_evaluation=args.eval_iters * args.global_batch_size
            )
            for each in others
        ),
    ]  # fmt: skip
    return Datasets(parts, has_split, digest)


def _digest(*arrays: numpy.ndarray) -> str:
    """A digest of the content, dtypes and shapes of arrays."""
    hashed = hashlib.blake2b(digest_size=16)
    for array in arrays:
        hashed.update(f"{array.dtype.str}{array.shape}".encode())
        hashed.update(numpy.ascontiguousarray(array).tobytes())
    return hashed.hexdigest()


def _reads(args: TrainConfig, fields: Sequence[Field]) -> bool:
    """Whether this rank reads data: it is the first of its tensor group, and one of its stages needs a field."""
    needed = args.activation_cache is not None or needs_some(args, fields)  # with it any rank may get the first stage
    return needed and parallel_state.get_tensor_model_parallel_rank() == 0


def _read_alike(
    read: Callable[[list[str]], _Samples], paths: list[list[str]]
) -> tuple[list[_Samples | None], str | None]:
    """Read the samples of each list of paths, and check that all ranks that read find the same data.

    Collective: every rank must call it.

    Returns:
        The samples of each list, None for an empty list; and the digest of the first list's samples, also on ranks that
        read nothing.

    Raises:
        ValueError: on every rank, if a rank cannot read, or if ranks find different data. The first and the last stage
            read the data separately, so inputs and labels would not match.
    """
    with agreed():
        found = [read(each) if each else None for each in paths]
    own = [None if each is None else each.digest for each in found]
    readers = [(rank, digests) for rank, digests in enumerate(gathered(own)) if any(digests)]
    for rank, digests in readers:
        if digests != readers[0][1]:
            raise ValueError(
                f"rank {rank} finds other data than rank {readers[0][0]} under the same names; give all hosts the same "
                "files"
            )
    return found, readers[0][1][0] if readers else None


# --- a ViT's images ---------------------------------------------------------------------------------------------------


def vision_fields(args: TrainConfig) -> tuple[Field, ...]:
    """The fields of a ViT: `images` (float32 [b, height, width, channels]) on the first stage, and common fields."""
    shape = (args.img_h, args.img_w, args.num_channels)
    images = Field(
        name="images", stages="first", shape=lambda size, length: (size, *shape), dtype=torch.float32
    )  # fmt: skip
    return (images, *_COMMON_FIELDS)


class ImageSamples:
    """Images and labels in memory."""

    def __init__(self, images: image_files.Images) -> None:
        self.images = images
        self.digest = _digest(images.pixels, images.labels)

    def __len__(self) -> int:
        return len(self.images.labels)

    def __getitem__(self, index: int) -> dict:
        return {"images": image_files.as_float(self.images.pixels[index]), "labels": self.images.labels[index]}


def build_vision_datasets(args: TrainConfig, tokenizer: None) -> Datasets:
    """The three datasets of a ViT. Raises ValueError for images or labels that do not fit the flags."""
    return _build_datasets(args, vision_fields(args), lambda paths: ImageSamples(_read_images(args, paths)))


def _read_images(args: TrainConfig, paths: list[str]) -> image_files.Images:
    images = image_files.read(paths)
    expected, found = (args.img_h, args.img_w, args.num_channels), images.pixels.shape[1:]
    if found != expected:
        raise ValueError(
            f"{' '.join(paths)} has images of {' x '.join(map(str, found))}, not {' x '.join(map(str, expected))}; "
            f"give --img-h {found[0]} --img-w {found[1]} --num-channels {found[2]}, or prepare other images"
        )
    if not len(images.labels):
        raise ValueError(f"{' '.join(paths)} has no images; prepare it again")
    if (largest := int(numpy.max(images.labels))) >= args.num_classes:
        raise ValueError(
            f"{' '.join(paths)} has class {largest}, but --num-classes {args.num_classes} go from 0 to "
            f"{args.num_classes - 1}; give --num-classes {largest + 1} or more"
        )
    return images


# --- a BERT's texts: [CLS], the text, [SEP], and padding up to --seq-length -------------------------------------------


def text_fields(args: TrainConfig) -> tuple[Field, ...]:
    """The fields of a BERT that classifies, for b samples of s tokens.

    First stage: `text` (int64 [b, s]). Every stage: `padding_mask` (int64 [b, s], 0 at padding). And the common fields.
    """
    return (Field(name="text", stages="first", least_id=0), Field(name="padding_mask"), *_COMMON_FIELDS)


class TextSamples:
    """Token ids and classes in memory. A text that is too long is cut at its end.

    Args:
        samples: texts and the names of their classes, which must be among `classes`.
        length: tokens of a sample, including [CLS], [SEP] and padding.
    """

    def __init__(
        self,
        samples: Sequence[text_files.Sample],
        tokenizer: MegatronTokenizerBase,
        *,
        length: int,
        classes: Sequence[str],
    ) -> None:
        self.tokens = numpy.full((len(samples), length), tokenizer.pad, dtype=numpy.int32)
        self.lengths = numpy.zeros(len(samples), dtype=numpy.int32)
        for row, (text, _) in enumerate(samples):
            ids = [tokenizer.cls, *tokenizer.tokenize(text)[: length - 2], tokenizer.sep]
            self.tokens[row, : len(ids)], self.lengths[row] = ids, len(ids)
        numbers = {name: number for number, name in enumerate(classes)}
        self.labels = numpy.array([numbers[label] for _, label in samples], dtype=numpy.int64)
        self.digest = _digest(self.tokens, self.lengths, self.labels)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict:
        mask = numpy.arange(self.tokens.shape[1]) < self.lengths[index]
        return {
            "text": self.tokens[index].astype(numpy.int64),
            "padding_mask": mask.astype(numpy.int64),
            "labels": self.labels[index],
        }


def build_text_datasets(args: TrainConfig, tokenizer: MegatronTokenizerBase) -> Datasets:
    """The three datasets of a BERT that classifies. Raises ValueError for files or a tokenizer that do not fit."""
    check_tokenizer(args, tokenizer)
    return _build_datasets(args, text_fields(args), lambda paths: _read_texts(args, tokenizer, paths))


def _read_texts(args: TrainConfig, tokenizer: MegatronTokenizerBase, paths: list[str]) -> TextSamples:
    samples = text_files.read(paths)
    known = set(args.class_names)
    for _, label in samples:
        if label not in known:
            raise ValueError(
                f"{' '.join(paths)} has the class {label}, which the training data have not: they have "
                f"{', '.join(args.class_names[:8])}; leave those samples out, or train on some of them"
            )
    return TextSamples(samples, tokenizer, length=args.seq_length, classes=args.class_names)
