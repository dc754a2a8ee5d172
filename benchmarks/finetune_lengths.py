"""What shorter microbatches save in fine-tuning: --pad_to_multiple_of against rows padded to one length.

    python benchmarks/finetune_lengths.py [--length 256] [--rounds 3] [--layers 4] [--hidden 256]

A Llama of random weights learns texts whose lengths are spread (log-normal, the longest of --length tokens), in one
process. The three kinds of padding take turns, so that drift meets all alike. The figures are the tokens of the
microbatches and the mean seconds of a step, both as parts of those with one length.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WAYS = {
    "one length": (),
    "multiples of 32": ("--pad_to_multiple_of", "32"),
    "and by length": ("--pad_to_multiple_of", "32", "--group_by_length"),
}


def make(folder: Path, options: argparse.Namespace) -> None:
    """A model, its tokenizer and the texts."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = [f"w{number}" for number in range(1000)]
    made = Tokenizer(models.WordLevel({word: at for at, word in enumerate(["[PAD]", *words])}, unk_token="w0"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="[PAD]", model_input_names=["input_ids", "attention_mask"]
    ).save_pretrained(folder)
    config = transformers.LlamaConfig(
        vocab_size=1001, hidden_size=options.hidden, intermediate_size=4 * options.hidden, pad_token_id=0,
        num_hidden_layers=options.layers, num_attention_heads=4, max_position_embeddings=options.length,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    choose = random.Random(0)
    lengths = [min(max(int(choose.lognormvariate(4.0, 0.8)), 4), options.length) for _ in range(options.steps * 16)]
    texts = [{"text": " ".join(choose.choices(words, k=length))} for length in lengths]
    (folder / "texts.jsonl").write_text("".join(json.dumps(text) + "\n" for text in texts), encoding="utf-8")


def run(folder: Path, flags: tuple[str, ...], options: argparse.Namespace) -> tuple[float, float]:
    """The tokens of an epoch as a part of those with one length, and the mean seconds of its steps."""
    metrics = folder / "metrics.jsonl"
    command = [
        sys.executable, "finetune.py", "--model_name_or_path", folder, "--task", "causal-lm", "--no_group_texts",
        "--train_file", folder / "texts.jsonl", "--max_seq_length", options.length, "--num_train_epochs", 1,
        "--per_device_train_batch_size", 4, "--gradient_accumulation_steps", 4, "--pipeline_schedule", "flush",
        "--output_dir", folder / "out", "--overwrite_output_dir", "--metrics_file", metrics, *flags,
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    ran = subprocess.run([*map(str, command)], cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if ran.returncode:
        sys.exit(ran.stdout + ran.stderr)
    said = [line for line in ran.stdout.splitlines() if "an epoch has" in line]
    part = float(said[0].split("an epoch has ")[1].split("%")[0]) / 100 if said else 1.0
    seconds = [json.loads(line)["step_time_ms"] / 1000 for line in metrics.read_text().splitlines()]
    metrics.unlink()
    return part, statistics.mean(seconds[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("length", 256), ("rounds", 3), ("layers", 4), ("hidden", 256), ("steps", 12)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        make(Path(name), options)
        found: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
        for _ in range(options.rounds):
            for way, flags in WAYS.items():
                found[way].append(run(Path(name), flags, options))
        base = [seconds for _, seconds in found["one length"]]
        for way, rounds in found.items():
            ratio = statistics.median(seconds / its for (_, seconds), its in zip(rounds, base, strict=True))
            print(f"{way:16} tokens {100 * rounds[0][0]:5.1f}%   seconds of a step {100 * ratio:5.1f}%")


if __name__ == "__main__":
    main()
