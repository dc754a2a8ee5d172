"""The metrics of a run: `--metrics-file`, outputs that may fail without ending the run, and the arithmetic of a model.

`--metrics-file` has JSON lines with full precision: an object for each iteration and each evaluation; and for a
pipeline that may change, one at the start (`initial_...`) and one for each change; and one for each change of the
ranks with which the run goes on (`membership_change`). One rank writes each line with a system call, so that a killed
run leaves complete lines. A line that cannot be written, for example on a full disk, is kept and written before the
next one. A resumed run appends; if it repeats iterations, the last line of an iteration is valid.

A full disk must not end training because a line of the log cannot be written. A by-product that cannot be written is
reported once, with the reason, and once more when it can be written again. This module imports no torch.
"""

import json
import logging
import math
import os
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from megatron.trainer.arguments.flags.config import TrainConfig, is_gated
from megatron.trainer.arguments.flags.experts import has_experts
from megatron.trainer.arguments.rules.attention import latents_of, windows_of

logger = logging.getLogger(__name__)


class ByProduct:
    """An output whose failure does not end the run.

    Args:
        name: name of the output in warnings.
        consequence: the end of the warning's sentence, about the consequence of a failure.
        failures: the errors that are caught; a library that uses a service raises others than OSError.
    """

    def __init__(self, name: str, *, consequence: str, failures: tuple[type[Exception], ...] = (OSError,)) -> None:
        self.name, self.consequence, self._failures = name, consequence, failures
        self.fails = False

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """Run a block that writes the output. A failure is logged as a warning unless the previous one failed, too."""
        try:
            yield
        except self._failures as error:
            if not self.fails:
                logger.warning("%s cannot be written: %s; training goes on, %s", self.name, _reason(error),
                               self.consequence)  # fmt: skip
            self.fails = True
        else:
            if self.fails:
                logger.warning("%s is written again", self.name)
            self.fails = False


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def flops_per_sample(args: TrainConfig) -> float:
    """The floating-point operations of the forward and the backward of one sequence, without recomputation.

    A multiplication by a weight matrix of n elements costs 2n per token forward and 4n backward. Attention adds two
    products of [s, s] per head and layer; the causal half is not subtracted (as in Megatron-LM; Korthikanti et al.
    2022, appendix A), and a window counts twice what it leaves. Of experts those count that compute a token. A BERT's
    dense layer before its output layer, a twelfth of a transformer layer, is left out; so are the operations of a
    classifier on a single token.
    """
    if args.architecture == "t5":
        return _flops_of_t5(args)
    heads, latents, windows = args.num_attention_heads, latents_of(args), windows_of(args)
    width = 2 * args.kv_channels * heads  # of queries and results
    groups = args.num_query_groups if args.group_query_attention else heads
    projections = args.hidden_size * (width + 2 * args.kv_channels * groups)
    if latents is not None:
        width = heads * (latents.head + latents.rotated + latents.value)
        matrices = (*latents.matrices(args.hidden_size, heads), (args.hidden_size, heads * latents.value))
        projections = sum(rows * columns for rows, columns in matrices)
    of_column = args.hidden_size * (3 if is_gated(args) else 2)
    mlp = mlp_of_last = args.ffn_hidden_size * of_column
    if args.num_experts is not None:
        pattern = has_experts(args.moe_layer_freq, args.num_layers)
        columns = args.moe_router_topk * args.moe_ffn_hidden_size + (args.moe_shared_expert_intermediate_size or 0)
        chosen = columns * of_column + args.hidden_size * args.num_experts
        mlp_of_last = chosen if pattern[-1] else mlp
        mlp += sum(pattern) / args.num_layers * (chosen - mlp)
    ends = args.hidden_size * args.padded_vocab_size
    if args.architecture == "vit":
        ends = args.hidden_size * args.patch_dim**2 * args.num_channels
    elif args.architecture == "bert-classify":
        ends = 0
    weights = args.num_layers * (projections + mlp) + ends
    attended = windows.attended(args.seq_length) if windows else 1.0
    attention = args.num_layers * args.seq_length * width * attended
    if args.mtp_num_layers is not None:
        # Each has a layer like the last one, a matrix that joins two vectors, and logits of its own.
        each = projections + mlp_of_last + 2 * args.hidden_size**2 + ends + args.seq_length * width
        weights += args.mtp_num_layers * each
    return 6.0 * args.seq_length * (weights + attention)


def _flops_of_t5(args: TrainConfig) -> float:
    """Encoder, decoder and output layer each count their own tokens. Of a cross-attention, keys and values are made of
    the encoder's tokens."""
    s, r, h, q = args.seq_length, args.decoder_seq_length, args.hidden_size, args.kv_channels * args.num_attention_heads
    layer = 4 * h * q + h * args.ffn_hidden_size * (3 if is_gated(args) else 2)
    encoder = s * (layer + 2 * s * q)
    decoder = r * (layer + 2 * r * q) + r * (2 * h * q + 2 * s * q) + s * 2 * h * q
    layers = args.encoder_num_layers * encoder + args.decoder_num_layers * decoder
    return 6.0 * (layers + r * h * args.padded_vocab_size)


def flops_of_output_layer(args: TrainConfig) -> float:
    """The floating-point operations of the output layer, as counted in `flops_per_sample`."""
    return 6.0 * args.seq_length * args.hidden_size * args.padded_vocab_size


LOSS = "lm loss"
"""The name of every language model's loss; a BERT with sentence order also has "sop loss"."""
CLASS_LOSS = "loss"
"""The name of a classifier's loss; it also reports "accuracy"."""
SAVED_ACTIVATIONS = "saved_activation_bytes"
DEFERRED = "deferred_bytes"
"""The name of the bytes kept between I and W of split backwards, which saved activations do not include."""
ALLOCATED = "peak_allocated_bytes"


class MetricsFile:
    """A metrics file to which objects are appended. Raises ValueError if the file cannot be opened."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._waiting: deque[bytes] = deque()  # lines that are not in the file yet
        self._by_product = ByProduct(f"--metrics-file {path}", consequence="and its lines are kept until it can be")
        try:
            os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
            torn = _ends_mid_line(path)
            self._file = open(path, "ab", buffering=0)  # noqa: SIM115
        except OSError as error:
            raise ValueError(f"--metrics-file {path} cannot be written: {error.strerror}") from error
        if torn:
            self._waiting.append(b"\n")

    def write(self, **values: float | int | str | list[int] | None) -> None:
        """Append an object. A number that is not finite becomes null, since JSON cannot express it."""
        plain = {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in values.items()
        }
        self._waiting.append(json.dumps(plain).encode() + b"\n")
        with self._by_product.attempt():
            self._write_waiting()

    def _write_waiting(self) -> None:
        while self._waiting:
            line, size = self._waiting[0], os.fstat(self._file.fileno()).st_size
            try:
                written = self._file.write(line)
                while written < len(line):  # a nearly full disk takes a part; the next call raises the error
                    written += self._file.write(line[written:])
            except OSError:
                with suppress(OSError):  # remove the incomplete line, if the file can be truncated
                    self._file.truncate(size)
                raise
            self._waiting.popleft()

    def close(self) -> None:
        """Write the lines that could not be written before, or log their loss, and close the file."""
        with self._by_product.attempt():
            self._write_waiting()
        if self._waiting:
            logger.warning("--metrics-file %s lacks its last %d lines", self._path, len(self._waiting))
        with suppress(OSError):  # all written lines are with the system already
            self._file.close()


def _ends_mid_line(path: str) -> bool:
    if not os.path.exists(path) or os.path.getsize(path) == 0:
        return False
    with open(path, "rb") as stream:
        stream.seek(-1, os.SEEK_END)
        return stream.read(1) != b"\n"


def read_metrics(path: str | os.PathLike) -> list[dict]:
    """Read all complete objects of a metrics file in order; an incomplete line is left out.

    Raises:
        ValueError: if the file cannot be read.
    """
    records = []
    try:
        with open(path, encoding="utf-8") as stream:
            for line in stream:
                with suppress(json.JSONDecodeError):
                    records.append(json.loads(line))
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    return records
