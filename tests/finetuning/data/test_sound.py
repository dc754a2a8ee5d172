"""Sound: its files, rates and lengths, the loss and the scores of recognised speech, and what is refused."""

import json

import numpy
import pytest
import torch
import transformers
from scipy.io import wavfile

from megatron.finetuning.data import ctc
from megatron.finetuning.data.sound import resampled
from megatron.finetuning.pretrained import capture_model, read_config
from megatron.finetuning.samples import read_data
from tests.finetuning import tiny

CLASSES = "audio-classification"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("sound")


def read(folder, task, samples, *argv):
    path = folder / "sounds.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in samples), encoding="utf-8")
    return read_data(tiny.arguments(folder, task, "--train_file", path, *argv))


def tone(rate: int, hertz: float = 5.0, seconds: float = 3.0) -> numpy.ndarray:
    return numpy.sin(2 * numpy.pi * hertz * numpy.arange(int(rate * seconds)) / rate) / 2


@pytest.mark.parametrize(
    ("dtype", "scale", "zero"), [("int16", 2**15, 0), ("int32", 2**31, 0), ("uint8", 2**7, 2**7), ("float32", 1, 0)]
)
def test_files_are_what_their_numbers_are(folder, dtype, scale, zero):
    """A WAV file of either type, of two channels, and the same numbers as a list or an object: the same inputs, which
    are those of the feature extractor; an attention mask says where the sound ends."""
    wave = tone(100)
    stored = (wave * scale + zero).astype(dtype)
    wavfile.write(folder / "tone.wav", 100, numpy.stack([stored, stored], 1))
    numbers = ((stored.astype(float) - zero) / scale).tolist()
    forms = [
        {"audio": "tone.wav"}, {"audio": numbers, "sampling_rate": 100},
        {"audio": {"array": numbers, "sampling_rate": 100}},
    ]  # fmt: skip
    samples = [{**each, "label": number % 2} for number, each in enumerate(forms)]
    batch = read(folder, CLASSES, samples, "--max_seconds", 4).training.batch(range(3), 3)
    extractor = transformers.Wav2Vec2FeatureExtractor(sampling_rate=100)
    expected = extractor(numpy.array(numbers, numpy.float32), sampling_rate=100)["input_values"][0]
    assert batch["input_values"].shape == (3, 400) and batch["attention_mask"].sum(1).tolist() == [300] * 3
    for row in batch["input_values"]:
        numpy.testing.assert_allclose(row[:300], expected, atol=1e-5)
        assert not row[300:].any()


def test_other_rates_are_resampled():
    """A tone stays the tone, in the middle where the filter sees both sides."""
    for rate in (50, 160, 441):
        found = resampled(tone(rate), rate, 100)
        assert abs(len(found) - 300) <= 1 and found.dtype == numpy.float32
        numpy.testing.assert_allclose(found[50:250], tone(100)[50:250], atol=0.01)


def test_long_sounds_are_cut(folder):
    samples = [{"audio": tone(100, seconds=n + 1).tolist(), "sampling_rate": 100, "label": n} for n in range(2)]
    data = read(folder, CLASSES, samples, "--max_seconds", 1.5)
    assert data.training.batch([0, 1], 2)["attention_mask"].sum(1).tolist() == [100, 150]
    assert data.notes == (f"{folder / 'sounds.jsonl'}: 1 sound of 2 cut to 1.5 s",)


def test_spectra_have_the_length_of_the_feature_extractor(folder):
    """AST's, whose frames are those of the whole sound; a model of it is captured."""
    path = folder / "ast"
    config = transformers.ASTConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, patch_size=4,
        frequency_stride=4, time_stride=4, max_length=32, num_mel_bins=8,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.ASTForAudioClassification(config).save_pretrained(path)
    extractor = transformers.ASTFeatureExtractor(num_mel_bins=8, max_length=32)
    extractor.save_pretrained(path)
    waves = [tone(16000, 440.0, seconds) for seconds in (0.2, 0.4)]
    samples = [{"audio": each.tolist(), "sampling_rate": 16000, "label": n} for n, each in enumerate(waves)]
    data = read(folder, CLASSES, samples, "--model_name_or_path", path)
    batch = data.training.batch([0, 1], 2)
    expected = extractor([each.astype(numpy.float32) for each in waves], sampling_rate=16000, return_tensors="pt")
    torch.testing.assert_close(batch["input_values"], expected["input_values"])
    assert data.notes == (f"{folder / 'sounds.jsonl'}: 1 sound of 2 cut to 0.335 s",)
    model = transformers.ASTForAudioClassification.from_pretrained(path)
    loss, _ = capture_model(model, batch, data.task.keep).run(batch)
    assert loss.item() == pytest.approx(model(**batch).loss.item(), rel=1e-6)


def recognition(folder):
    args = tiny.arguments(folder, "ctc", "--max_seconds", 4)
    data = read_data(args)
    torch.manual_seed(0)
    return data, transformers.Wav2Vec2ForCTC(read_config(args.model_name_or_path, data.changes)).eval()


@pytest.mark.parametrize("has_mask", [True, False])
def test_the_loss_of_recognised_speech(folder, has_mask):
    """It is transformers' own, with the mask of padding and without one."""
    data, model = recognition(folder)
    batch = data.training.batch(range(20), 20)
    if not has_mask:
        del batch["attention_mask"]
    assert ctc.forward(model, batch)["loss"].item() == pytest.approx(model(**batch).loss.item(), rel=1e-5)


def test_the_frames_of_a_sound(folder):
    _, model = recognition(folder)
    points = torch.arange(30, 400, 7)
    assert torch.equal(ctc.num_frames(model.config, points), model._get_feat_extract_output_lengths(points))


def test_words_and_characters_that_are_wrong(folder):
    """Counted by hand; what stands behind the end of a sound is not read."""
    samples = [{"audio": tone(100).tolist(), "sampling_rate": 100, "text": text} for text in ("ab a", "bb")]
    samples[1]["audio"] = samples[1]["audio"][:200]
    rows = read(folder, "ctc", samples, "--max_seconds", 3).training
    letters = {"a": 3, "b": 4, " ": 2, "-": 0}
    frames = rows.batch([0, 1], 2)["attention_mask"].sum(1)
    assert ctc.num_frames(recognition(folder)[1].config, frames).tolist() == [15, 10]
    found = torch.tensor([[letters[each] for each in text] for text in ("aa-bb-  -a-----", "b-bb--a---bbbbb")])
    scores = rows.metrics({"logits": found}, 0.0)
    assert scores == {"wer": 1 / 3, "cer": 1 / 6}, "bba is one character more than bb"
    assert ctc.edits("kitten", "sitting") == 3 and ctc.edits([], ["a", "b"]) == 2 and ctc.edits("ab", "ab") == 0


def test_the_decoders_start_stands_once(folder):
    """The tokenizer writes [CLS], which the model itself puts before the labels it is given."""
    samples = [{"audio": tone(8000, 200.0, 0.05).tolist(), "sampling_rate": 8000, "text": "w1 w2"}]
    data = read(folder, "speech-to-text", samples)
    batch = data.training.batch([0], 1)
    assert batch["labels"].tolist() == [[5, 6, 3, -100, -100, -100]] and batch["input_features"].shape == (1, 4, 100)
    scores = data.training.metrics({"logits": torch.tensor([[5, 7, 3, 0, 0, 0]])}, 0.0)
    assert scores == {"perplexity": 1.0, "token_accuracy": pytest.approx(2 / 3), "exact_match": 0.0}


GOOD = {"audio": [0.0, 0.5] * 100, "sampling_rate": 100, "label": 0, "text": "ab"}


@pytest.mark.parametrize(
    ("task", "changes", "sentence"),
    [
        (CLASSES, {"sampling_rate": None}, r"sample 2: 'audio' is no path .*, and its sampling_rate is None, where a"),
        (CLASSES, {"audio": [[1.0], [2.0, 3.0]]}, r"sample 2: 'audio' is no row of numbers; mend it, or leave"),
        (CLASSES, {"audio": []}, r"sample 2: 'audio' is no row of numbers"),
        (CLASSES, {"audio": "none.wav"}, r"sample 2: the sound .*none\.wav cannot be read as a WAV file \("),
        (CLASSES, {"audio": "text.wav"}, r"sample 2: the sound .*text\.wav cannot be read as a WAV file \("),
        ("ctc", {"text": ""}, r"sample 2: the text has no token; leave it out"),
        ("ctc", {"text": "abcdefg"}, r"sample 2: the text has 7 tokens; give a --max_target_length of as many"),
        ("ctc", {"text": "aaaa", "audio": [0.5] * 130}, r"sample 2: the text needs 7 frames, and its sound has 6;"),
        ("ctc", {"text": 7}, r"sample 2: 'text' is 7, and a text is wanted"),
        ("speech-to-text", {"text": 7}, r"sample 2: 'text' is 7, and a text is wanted"),
    ],
)
def test_refused_in_one_sentence(folder, task, changes, sentence):
    (folder / "text.wav").write_text("no sound")
    with pytest.raises(ValueError, match=sentence):
        read(folder, task, [GOOD, {**GOOD, "label": 1, **changes}])


@pytest.mark.parametrize(
    ("task", "sentence"),
    [
        (CLASSES, "has no feature extractor of sound; save it there with its save_pretrained"),
        ("ctc", "has no processor with its feature extractor and tokenizer; save it there with processor.save_pret"),
        ("speech-to-text", "has no processor with its feature extractor and tokenizer; save it there"),
    ],
)
def test_a_folder_without_a_processor_is_refused(tmp_path, task, sentence):
    for path in tiny.model_folder(tmp_path, task).iterdir():
        if path.name not in ("config.json", "model.safetensors"):
            path.unlink()
    with pytest.raises(ValueError, match=sentence):
        read_data(tiny.arguments(tmp_path, task))


def test_masks_of_numpy_are_refused(tmp_path):
    path = tiny.model_folder(tmp_path, CLASSES) / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "apply_spec_augment": True}))
    with pytest.raises(ValueError, match=r"would repeat; set apply_spec_augment to false in its config\.json"):
        read_data(tiny.arguments(tmp_path, CLASSES))
