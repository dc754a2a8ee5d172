"""Tiny models in folders, as users have them, and files of samples for them: nothing is downloaded."""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

import torch
import torch.distributed as dist
import transformers
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors

from megatron.finetuning.arguments import parse_args

WORDS = [f"w{number}" for number in range(40)]
_SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
_SHAPE = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}

transformers.logging.set_verbosity_error()


def tokenizer() -> transformers.PreTrainedTokenizerFast:
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate([*_SPECIAL, *WORDS])}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, unk_token="[UNK]", pad_token="[PAD]", cls_token="[CLS]", sep_token="[SEP]",
        eos_token="[SEP]", chat_template=TEMPLATE, model_input_names=["input_ids", "attention_mask"],
    )  # fmt: skip


TEMPLATE = (
    "{% for message in messages %}{{ '[CLS] ' if message.role == 'user' else 'w39 ' }}{{ message.content }} [SEP]\n"
    "{% endfor %}{% if add_generation_prompt %}w39 {% endif %}"
)
"""A chat template: the user's messages begin with [CLS], answers with w39, and [SEP] ends both."""

PARTS_TEMPLATE = TEMPLATE.replace(
    "{{ message.content }}",
    "{% for part in message.content %}{{ '<image> ' if part.type == 'image' else part.text }}{% endfor %}",
)
"""The same for messages of parts, which are images or texts."""


def _bert(cls: type, dropout: float, **labels: object):
    config = transformers.BertConfig(
        vocab_size=44, **_SHAPE, max_position_embeddings=32, hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout, **labels,
    )  # fmt: skip
    return cls(config)


def _t5(dropout: float):
    config = transformers.T5Config(
        vocab_size=44, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, dropout_rate=dropout,
        decoder_start_token_id=0, pad_token_id=0, eos_token_id=3,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config)


def _gpt2(dropout: float):
    config = transformers.GPT2Config(
        vocab_size=44, n_embd=16, n_layer=2, n_head=2, n_positions=32, resid_pdrop=dropout, embd_pdrop=dropout,
        attn_pdrop=dropout, bos_token_id=2, eos_token_id=3,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def _llama(dropout: float):
    config = transformers.LlamaConfig(
        vocab_size=44, **_SHAPE, max_position_embeddings=32, attention_dropout=dropout, pad_token_id=0, eos_token_id=3
    )
    return transformers.LlamaForCausalLM(config)


def _vit(dropout: float):
    config = transformers.ViTConfig(
        **_SHAPE, image_size=8, patch_size=4, num_channels=1, hidden_dropout_prob=dropout, num_labels=3
    )
    return transformers.ViTForImageClassification(config)


MODELS = {
    "sequence-classification": lambda dropout: _bert(transformers.BertForSequenceClassification, dropout),
    "masked-lm": lambda dropout: _bert(transformers.BertForMaskedLM, dropout),
    "multiple-choice": lambda dropout: _bert(transformers.BertForMultipleChoice, dropout),
    "regression": lambda dropout: _bert(
        transformers.BertForSequenceClassification, dropout, num_labels=1, problem_type="regression"
    ),
    "token-classification": lambda dropout: _bert(transformers.BertForTokenClassification, dropout),
    "question-answering": lambda dropout: _bert(transformers.BertForQuestionAnswering, dropout),
    "text-to-text": _t5,
    "causal-lm": _gpt2,
    "chat": _llama,
    "dpo": _llama,
    "image-classification": _vit,
}


def _wav2vec2(cls: type, dropout: float, **options: object):
    config = transformers.Wav2Vec2Config(
        **_SHAPE, vocab_size=44, conv_dim=[8, 8], conv_stride=[5, 4], conv_kernel=[10, 3], num_feat_extract_layers=2,
        num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2, apply_spec_augment=False, layerdrop=0.0,
        feat_extract_norm="layer", classifier_proj_size=8, hidden_dropout=dropout, attention_dropout=dropout,
        activation_dropout=dropout, feat_proj_dropout=dropout, final_dropout=dropout, num_labels=2, **options,
    )  # fmt: skip
    return cls(config)


def _clip():
    text = {"vocab_size": 44, "max_position_embeddings": 32, "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3}
    config = transformers.CLIPConfig(
        text_config={**_SHAPE, **text}, vision_config={**_SHAPE, "image_size": 8, "patch_size": 4}, projection_dim=8
    )
    return transformers.CLIPModel(config)


def _llava():
    text = {"model_type": "llama", "vocab_size": 45, **_SHAPE, "max_position_embeddings": 32, "pad_token_id": 0}
    vision = {"model_type": "clip_vision_model", **_SHAPE, "image_size": 8, "patch_size": 4}
    config = transformers.LlavaConfig(text_config=text, vision_config=vision, image_token_id=44)
    return transformers.LlavaForConditionalGeneration(config)


GEMMA_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<turn>{{ 'user' if message.role == 'user' else 'model' }}\n"
    "{% for part in message.content %}{{ '<boi>' if part.type == 'image' else part.text }}{% endfor %}<end>\n"
    "{% endfor %}{% if add_generation_prompt %}<turn>model\n{% endif %}"
)
"""In the form of Gemma 3's: lines begin anew, and its processor puts empty ones around an image."""


def _lines_tokenizer(**options: object) -> transformers.PreTrainedTokenizerFast:
    """Any number of line ends in a row is a token, as in Gemma's; the second text of a pair has the type 1."""
    words = [*_SPECIAL, *WORDS, "\n", "\n\n", "\n\n\n", "user", "model", "<turn>", "<end>"]
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex("\n+|<turn>|<end>"), "isolated"), pre_tokenizers.Split(" ", "removed")]
    )
    made.post_processor = processors.TemplateProcessing(single="$A", pair="$A $B:1", special_tokens=[])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, unk_token="[UNK]", pad_token="[PAD]", bos_token="[CLS]", eos_token="[SEP]",
        model_input_names=["input_ids", "attention_mask"], **options,
    )  # fmt: skip


_GEMMA = {**_SHAPE, "max_position_embeddings": 32, "num_key_value_heads": 1, "head_dim": 8, "pad_token_id": 0,
          "initializer_range": 0.3}  # fmt: skip
_SIGLIP = {"model_type": "siglip_vision_model", **_SHAPE, "image_size": 8, "patch_size": 4, "vision_use_head": False}


def _gemma3(folder: Path) -> None:
    own = _lines_tokenizer(
        chat_template=GEMMA_TEMPLATE,
        extra_special_tokens={"boi_token": "<boi>", "eoi_token": "<eoi>", "image_token": "<img>"},
    )
    text = {"model_type": "gemma3_text", "vocab_size": len(own), **_GEMMA, "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention"]}  # fmt: skip
    config = transformers.Gemma3Config(
        text_config=text, vision_config=_SIGLIP, mm_tokens_per_image=4, image_token_id=own.image_token_id,
        boi_token_index=own.boi_token_id, eoi_token_index=own.eoi_token_id,
    )  # fmt: skip
    model = transformers.Gemma3ForConditionalGeneration(config)
    torch.nn.init.normal_(model.model.multi_modal_projector.mm_input_projection_weight)  # else 0, and so is the image
    model.save_pretrained(folder)
    images = transformers.Gemma3ImageProcessorPil(size={"height": 8, "width": 8})
    transformers.Gemma3Processor(images, own, image_seq_length=4).save_pretrained(folder)


def _paligemma(folder: Path) -> None:
    own = _lines_tokenizer(extra_special_tokens={"image_token": "<image>"})
    config = transformers.PaliGemmaConfig(
        text_config={"model_type": "gemma", "vocab_size": len(own), **_GEMMA}, projection_dim=16,
        vision_config={**_SIGLIP, "projection_dim": 16}, image_token_id=own.image_token_id,
    )  # fmt: skip
    transformers.PaliGemmaForConditionalGeneration(config).save_pretrained(folder)
    images = transformers.SiglipImageProcessorPil(size={"height": 8, "width": 8}, image_seq_length=4)
    transformers.PaliGemmaProcessor(images, own).save_pretrained(folder)


def typed_folder(folder: Path, kind: str) -> Path:
    """A model of images and texts that attends by the types of tokens: `gemma3` or `paligemma`."""
    path = folder / kind
    torch.manual_seed(0)
    {"gemma3": _gemma3, "paligemma": _paligemma}[kind](path)
    return path


def _whisper(dropout: float):
    config = transformers.WhisperConfig(
        vocab_size=44, d_model=16, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32, max_source_positions=50,
        max_target_positions=16, num_mel_bins=4, pad_token_id=0, bos_token_id=2, eos_token_id=3,
        decoder_start_token_id=2, dropout=dropout,
    )  # fmt: skip
    return transformers.WhisperForConditionalGeneration(config)


MODELS |= {
    "audio-classification": lambda dropout: _wav2vec2(transformers.Wav2Vec2ForSequenceClassification, dropout),
    "ctc": lambda dropout: _wav2vec2(transformers.Wav2Vec2ForCTC, dropout, ctc_loss_reduction="mean"),
    "speech-to-text": _whisper,
    "contrastive-image-text": lambda dropout: _clip(),
    "image-text-to-text": lambda dropout: _llava(),
}


def _letters(folder: Path) -> transformers.Wav2Vec2CTCTokenizer:
    letters = ["[PAD]", "[UNK]", "|", *map(chr, range(97, 123)), *map(str, range(10)), *"ABCDE"]
    (folder / "vocab.json").write_text(json.dumps({letter: number for number, letter in enumerate(letters)}))
    return transformers.Wav2Vec2CTCTokenizer(
        str(folder / "vocab.json"), unk_token="[UNK]", pad_token="[PAD]", bos_token=None, eos_token=None
    )


def save_processor(folder: Path, task: str) -> None:
    """Write what makes the model's inputs: a tokenizer, a feature extractor, or both. Images have none."""
    waves = transformers.Wav2Vec2FeatureExtractor(sampling_rate=100, return_attention_mask=True)
    if task == "audio-classification":
        waves.save_pretrained(folder)
    elif task == "ctc":
        transformers.Wav2Vec2Processor(waves, _letters(folder)).save_pretrained(folder)
    elif task == "speech-to-text":
        spectra = transformers.WhisperFeatureExtractor(feature_size=4, hop_length=160, chunk_length=1, n_fft=400)
        spectra.save_pretrained(folder)
        tokenizer().save_pretrained(folder)
    elif task == "contrastive-image-text":
        sides = {"height": 8, "width": 8}
        transformers.CLIPImageProcessorPil(size=sides, crop_size=sides).save_pretrained(folder)
        tokenizer().save_pretrained(folder)
    elif task == "image-text-to-text":
        sides = {"height": 8, "width": 8}
        images, own = transformers.CLIPImageProcessorPil(size=sides, crop_size=sides), tokenizer()
        own.add_special_tokens({"additional_special_tokens": ["<image>"]})
        transformers.LlavaProcessor(
            images, own, patch_size=4, vision_feature_select_strategy="default", num_additional_image_tokens=1,
            chat_template=PARTS_TEMPLATE,
        ).save_pretrained(folder)  # fmt: skip
    elif task != "image-classification":
        own = tokenizer()
        own.mask_token = "[UNK]" if task == "masked-lm" else None
        own.save_pretrained(folder)


def model_folder(folder: Path, task: str = "sequence-classification", *, dropout: float = 0.0) -> Path:
    """A model of the task with its tokenizer, saved as users have them. In a job every rank asks: transformers writes
    on the first alone, so the others wait.
    """
    path = folder / f"{task}-{dropout}"
    if not path.exists() and (not dist.is_initialized() or dist.get_rank() == 0):
        torch.manual_seed(0)
        MODELS[task](dropout).save_pretrained(path)
        save_processor(path, task)
    if dist.is_initialized():
        dist.barrier()
    return path


def sample(task: str, choose: random.Random) -> dict:
    words = choose.choices(WORDS, k=choose.randint(3, 9))
    text = " ".join(words)
    if task == "sequence-classification":
        return {"text": text, "label": "odd" if int(words[0][1:]) % 2 else "even"}
    if task == "text-to-text":
        return {"source": text, "target": " ".join(words[:3])}
    if task in ("causal-lm", "masked-lm"):
        return {"text": text}
    if task == "multiple-choice":
        place = choose.randrange(3)
        return {"text": text, "choices": [words[(place + at) % 3] for at in range(3)], "label": "ABC"[-place % 3]}
    if task == "regression":
        return {"text": text, "score": len(words) / 10}
    if task == "chat":
        parts = [" ".join(choose.choices(WORDS[:39], k=choose.randint(1, 3))) for _ in range(choose.choice((2, 4)))]
        return {"messages": [{"role": ("user", "assistant")[n % 2], "content": part} for n, part in enumerate(parts)]}
    if task == "dpo":
        chosen, rejected = (" ".join(choose.choices(WORDS[:39], k=choose.randint(1, 3))) for _ in range(2))
        return {"prompt": " ".join(words[:5]), "chosen": chosen, "rejected": rejected}
    if task == "token-classification":
        return {"tokens": words, "ner_tags": [("O", "B-odd")[int(word[1:]) % 2] for word in words]}
    if task == "question-answering":
        answers = {"text": [words[1]], "answer_start": [len(words[0]) + 1]}
        return {"question": words[1], "context": text, "answers": answers}
    if task in ("audio-classification", "ctc", "speech-to-text"):
        wave = [round(choose.gauss(0, 1), 3) for _ in range(choose.randint(260, 400))]
        texts = [word[1:] for word in words[:2]] if task == "ctc" else words[:2]
        label = {"label": choose.randrange(2)} if task == "audio-classification" else {"text": " ".join(texts)}
        return {"audio": wave, "sampling_rate": 8000 if task == "speech-to-text" else 100, **label}
    if task in ("contrastive-image-text", "image-text-to-text"):
        image = [[[choose.randrange(256) for _ in range(3)] for _ in range(8)] for _ in range(8)]
        if task == "contrastive-image-text":
            return {"text": text, "image": image}
        return {"prompt": " ".join(words[: 1 + len(words) % 3]), "completion": words[2], "image": image}
    return {"image": [[choose.random() for _ in range(8)] for _ in range(8)], "label": choose.randrange(3)}


def data_file(folder: Path, task: str = "sequence-classification", *, num_samples: int = 20, seed: int = 0) -> Path:
    path = folder / f"{task}-{num_samples}-{seed}.jsonl"
    choose = random.Random(seed)
    samples = [sample(task, choose) for _ in range(num_samples)]
    path.write_text("".join(json.dumps(each) + "\n" for each in samples), encoding="utf-8")
    return path


def arguments(folder: Path, task: str = "sequence-classification", *argv: object, dropout: float = 0.0, **files):
    """The arguments of a run, parsed: the tiny model, its data, sequences of 12 tokens."""
    return parse_args(command(folder, task, *argv, dropout=dropout, **files))


def command(
    folder: Path, task: str = "sequence-classification", *argv: object, dropout: float = 0.0, num_samples: int = 20
) -> list[str]:
    return [
        "--model_name_or_path", str(model_folder(folder, task, dropout=dropout)), "--task", task,
        "--train_file", str(data_file(folder, task, num_samples=num_samples)), "--output_dir", str(folder / "out"),
        "--max_seq_length", "12", "--max_target_length", "6", "--doc_stride", "2",
        "--per_device_train_batch_size", "3", *map(str, argv),
    ]  # fmt: skip


def namespace(args: argparse.Namespace, **changes: object) -> argparse.Namespace:
    return argparse.Namespace(**{**vars(args), **changes})
