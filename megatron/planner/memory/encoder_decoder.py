"""Bytes that a microbatch saves in a T5, whose stages are a chain of encoder layers and then decoder layers.

Both kinds of layers save the tensors of activations.py, for their own number of tokens. A decoder layer also attends to
the encoder's output. With s tokens of the encoder, r of the decoder, and e bytes an element, it also saves:

    norm                the input, r e h; the result, which queries are made of, r e h        shared
    queries, result     2 r e q                                                               split
    keys, values        2 s e k                                                               split
    scores              (2 e + 1) r s a, as in activations.py                                 split
    dropout's mask      r h                                                                   shared

Each stage with layers of the decoder saves the encoder's output once, whatever their number. The stage with the
encoder's final norm saves the input of the norm. Stages send one another one tensor of s + r tokens, and a few more
rows with the tables of distances. A stage of the encoder also holds the part of its input that it only passes on: the
decoder's embedded tokens.
"""

from collections.abc import Sequence
from dataclasses import replace

from megatron.planner.memory.activations import Activations, ActivationSetting
from megatron.planner.memory.architecture import Architecture
from megatron.planner.memory.recompute import CORE_ATTENTION, NORM
from megatron.planner.memory.unquantized import UnquantizedEnds


def activations_of(shape: Architecture, setting: ActivationSetting) -> Activations:
    """The activations of a model of one stack, or of a T5."""
    if shape.decoder is not None:
        return T5Activations(shape, setting)
    return (UnquantizedEnds if setting.fp8 and any(setting.unquantized) else Activations)(shape, setting)


class T5Activations(Activations):
    """Bytes of the activations of one microbatch of a T5 on one GPU, by stage."""

    def __init__(self, shape: Architecture, setting: ActivationSetting) -> None:
        super().__init__(shape, setting)
        one = replace(shape, decoder=None)
        self._encoder = Activations(one, setting)
        self._decoder = Activations(replace(one, sequence_length=shape.decoder.sequence_length), setting)

    def by_stage(self, layers: Sequence[float]) -> tuple[list[float], list[float], list[float]]:
        """Saved bytes, workspace and deferred bytes of each stage, as the methods of `Activations` of these names."""
        counts = zip(layers, self.shape.decoder.of_stages(layers), strict=True)
        places = [(count - own, own, stage == 0, stage == len(layers) - 1) for stage, (count, own) in enumerate(counts)]
        saved = [self._saved(*place) for place in places]
        if not self.setting.recompute.whole_stage:  # the input of the encoder's norm
            saved[self.shape.decoder.stage_behind_encoder(layers)] += self._encoder.boundary
        return (saved, [self._workspace(*place) for place in places],
                [self._deferred(*place) for place in places])  # fmt: skip

    @property
    def boundary(self) -> float:
        shape, setting = self.shape, self.setting
        rows = shape.decoder.distance_rows(shape.num_attention_heads, shape.hidden_size)
        of_distances = rows * setting.micro_batch_size * setting.residual_bytes * shape.hidden_size
        return self._encoder.boundary + self._decoder.boundary + of_distances

    def _saved(self, encoder: float, decoder: float, is_first: bool, is_last: bool) -> float:
        if self.setting.recompute.whole_stage:
            return 0.0 if is_first else self.boundary
        method, modules = self.setting.recompute.method, self.setting.recompute.modules
        total = self._encoder._saved_layers(encoder, 0) + self._decoder._saved_layers(decoder, 0)
        if method is None:
            total += decoder * self._cross(modules)
        elif method == "block":
            total += max(0.0, decoder - self.setting.recompute.num_layers) * self._cross(frozenset())
        if is_first:
            total += self._encoder._embedding_mask + self._decoder._embedding_mask
        if decoder or is_last:
            total += self._encoder.boundary  # the encoder's output
        elif not is_first:
            total += self._decoder.boundary  # the decoder's embedded tokens, which are passed on
        if is_last:
            total += self._decoder.head
        return total

    def _workspace(self, encoder: float, decoder: float, is_first: bool, is_last: bool) -> float:
        recompute = self.setting.recompute
        if recompute.whole_stage:
            total = encoder * self._encoder._layer(frozenset()) + decoder * self._decoder_layer(frozenset())
            total += is_first * (self._encoder._embedding_mask + self._decoder._embedding_mask)
            total += is_last * self._decoder.head
        else:
            total = max(
                (
                    self._recomputed(count, whole, kept, inner.boundary)
                    for count, whole, kept, inner in (
                        (encoder, self._encoder._layer(frozenset()), self._encoder._layer(recompute.modules),
                         self._encoder),
                        (decoder, self._decoder_layer(frozenset()), self._decoder_layer(recompute.modules),
                         self._decoder),
                    )
                ),
            )  # fmt: skip
        return total + is_last * self._decoder.logits_gradient

    def _recomputed(self, count: float, whole: float, kept: float, boundary: float) -> float:
        """Bytes that are recomputed at once in `count` layers of a kind, without their saved input."""
        recompute = self.setting.recompute
        if recompute.method == "uniform":
            return max(0.0, min(recompute.num_layers, count) * whole - boundary)
        return (whole - (boundary if recompute.method == "block" else kept)) * (count > 0)

    def _deferred(self, encoder: float, decoder: float, is_first: bool, is_last: bool) -> float:
        shape, setting = self.shape, self.setting
        h, q, e, t = shape.hidden_size, shape.query_width, setting.element_bytes, setting.tensor
        of_queries = self._decoder.tokens * e * (h / self._shared + h + 2 * q / t)  # and of the output projection
        of_keys = self._encoder.tokens * e * 2 * shape.key_width / t
        source = self._encoder.tokens * e * h / self._shared  # the input of keys and values in all layers
        own = self._encoder.deferred(encoder, is_first=is_first, is_last=False)
        own += self._decoder.deferred(decoder, is_first=is_first, is_last=is_last)
        return own + decoder * (of_queries + of_keys) + (decoder > 0) * source

    def _decoder_layer(self, recomputed: frozenset[str]) -> float:
        return self._decoder._layer(recomputed) + self._cross(recomputed)

    def _cross(self, recomputed: frozenset[str]) -> float:
        """Bytes of the cross-attention of a layer that recomputes the given modules, without the encoder's output."""
        shape, setting = self.shape, self.setting
        h, e, inner = shape.hidden_size, setting.element_bytes, self._decoder
        shared = setting.residual_bytes * h + shape.hidden_dropout * inner._mask
        if NORM not in recomputed:
            shared += setting.input_bytes * h
        split = 2 * e * shape.query_width
        if setting.saves_scores and CORE_ATTENTION not in recomputed:
            split += self._score_bytes * shape.num_attention_heads * self._encoder.shape.sequence_length
        keys = self._encoder.tokens * e * 2 * shape.key_width / setting.tensor
        return inner.tokens * (shared / self._shared + split / setting.tensor) + keys
