"""Sound: waves from files of samples, as the inputs of a model, and a class for each.

A wave is a WAV file, or a list of numbers with its sampling rate. The feature extractor of the model's folder makes the
inputs, of one length for all rows.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy
from torch import Tensor

from megatron.documents import counted
from megatron.finetuning.data.batches import Rows
from megatron.finetuning.data.classification import Labels, class_rows
from megatron.finetuning.data.files import File, Sample
from megatron.finetuning.data.task import Prepared, Task, config_of, most_likely
from megatron.finetuning.data.task_arguments import MAX_SECONDS

AUDIO = ("audio", "audio_path", "path", "file_name", "speech")
RATE = "sampling_rate"
"""The field with the sampling rate, beside a list of numbers, or beside `ARRAY` in an object."""
ARRAY = "array"


class Sounds:
    """The waves of files as a model's inputs.

    Raises ValueError if the file has no sound, the model's folder has no feature extractor, or the model masks sound at
    random.
    """

    def __init__(self, args: argparse.Namespace, extractor: Any, file: File) -> None:
        self._column = file.column(args.audio_column, AUDIO, "audio")
        self._extractor, self._seconds = extractor, args.max_seconds
        if getattr(extractor, "sampling_rate", None) is None:
            raise ValueError(
                f"{args.model_name_or_path} has no feature extractor of sound; save it there with its save_pretrained"
            )
        config = config_of(args.model_name_or_path)
        masks = any(getattr(config, f"mask_{what}_prob", 0.0) > 0 for what in ("time", "feature"))
        if getattr(config, "apply_spec_augment", False) and masks:
            raise ValueError(
                f"{args.model_name_or_path} masks parts of the sound by numpy's random numbers, which a captured graph "
                "would repeat; set apply_spec_augment to false in its config.json"
            )

    def inputs(self, file: File) -> tuple[dict[str, Tensor], list[str]]:
        """The model's inputs, [samples, ...], and a sentence for the user if sounds are cut.

        An attention mask, int64 [samples, points of the wave], is among them if the feature extractor makes one.
        """
        file.column(self._column, (), "audio")
        rate = self._extractor.sampling_rate
        found = (_wave(sample, self._column, file.path, number) for number, sample in enumerate(file.samples, start=1))
        waves, own = [resampled(*wave, rate) for wave in found], own_length(self._extractor)
        seconds = self._seconds or (MAX_SECONDS if own is None else own / rate)
        length = min(math.ceil(seconds * rate), own or math.inf)
        num_cut = sum(len(wave) > length for wave in waves)
        padded = {"padding": "max_length", "max_length": length, "truncation": True} if own is None else {}
        waves = [wave[:length] for wave in waves]
        found = self._extractor(waves, sampling_rate=rate, return_tensors="pt", **padded)
        cut = f"{file.path}: {counted(num_cut, 'sound')} of {len(waves)} cut to {length / rate:g} s"
        inputs = {name: each.long() if name == "attention_mask" else each for name, each in found.items()}
        return inputs, [cut] if num_cut else []


def own_length(extractor: Any) -> int | None:
    """The number of points to which a feature extractor itself pads or cuts each wave; None if it does not."""
    if hasattr(extractor, "n_samples"):  # as Whisper's
        return extractor.n_samples
    frames = getattr(extractor, "max_length", None)  # as AST's, of 25 ms each and 10 ms apart
    return None if frames is None else (10 * (frames - 1) + 25) * extractor.sampling_rate // 1000


def _wave(sample: Sample, column: str, path: str, number: int) -> tuple[numpy.ndarray, int]:
    """The wave of a sample, float64 [points], and its sampling rate. Raises ValueError for a value that is no sound."""
    value, where = sample[column], f"{path}, sample {number}"
    if isinstance(value, str):
        return _read(Path(path).parent / value, where)
    numbers, rate = value, sample.get(RATE)
    if isinstance(value, Mapping):
        numbers, rate = value.get(ARRAY), value.get(RATE)
    if isinstance(rate, bool) or not isinstance(rate, int) or rate < 1:
        raise ValueError(
            f"{where}: {column!r} is no path of a WAV file, and its {RATE} is {rate!r}, where a whole number of points "
            "a second is wanted; mend it"
        )
    try:
        wave = numpy.asarray(numbers, dtype=numpy.float64)
    except (TypeError, ValueError):
        wave = numpy.empty((0, 0))
    return _checked(wave, f"{where}: {column!r}"), rate


def _read(path: Path, where: str) -> tuple[numpy.ndarray, int]:
    """The wave of a WAV file between -1 and 1, the mean of its channels."""
    from scipy.io import wavfile

    try:
        rate, found = wavfile.read(path)
    except (OSError, ValueError, EOFError) as error:
        raise ValueError(f"{where}: the sound {path} cannot be read as a WAV file ({error}); mend it") from error
    wave = found.astype(numpy.float64)
    if found.dtype == numpy.uint8:
        wave = (wave - 128) / 128
    elif found.dtype.kind == "i":
        wave /= -float(numpy.iinfo(found.dtype).min)
    return _checked(wave.mean(1) if wave.ndim == 2 else wave, f"{where}: the sound {path}"), rate


def _checked(wave: numpy.ndarray, where: str) -> numpy.ndarray:
    if wave.ndim != 1 or not len(wave) or not numpy.isfinite(wave).all():
        raise ValueError(f"{where} is no row of numbers; mend it, or leave the sample out")
    return wave


def resampled(wave: numpy.ndarray, rate: int, wanted: int) -> numpy.ndarray:
    """A wave resampled from `rate` to `wanted` points a second, float32 [points]."""
    from scipy.signal import resample_poly

    if rate != wanted:
        common = math.gcd(rate, wanted)
        wave = resample_poly(wave, wanted // common, rate // common)
    return wave.astype(numpy.float32)


def _prepare(args: argparse.Namespace, extractor: Any, file: File, classes: Mapping[str, int]) -> Prepared:
    sounds, labels = Sounds(args, extractor, file), Labels(file, args.label_column, classes)

    def rows(file: File) -> Rows:
        own = labels.of(file)
        inputs, notes = sounds.inputs(file)
        return class_rows(inputs, own, notes)

    return Prepared(rows, labels.changes)


CLASSES = Task(
    "AutoModelForAudioClassification", _prepare, keep=("logits",), summary=most_likely,
    auto_processor="AutoFeatureExtractor",
)  # fmt: skip
