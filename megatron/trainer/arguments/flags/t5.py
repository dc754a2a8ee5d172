"""Flags of `pretrain_t5.py`: two stacks of layers, and the lengths of what they read."""

from dataclasses import dataclass

from megatron.trainer.arguments.flags.specification import Group, Role, option


@dataclass(frozen=True, init=False, repr=False, eq=False)
class EncoderDecoder:
    """The two stacks of `pretrain_t5.py`, in place of --num-layers and --seq-length. The other programs refuse these
    flags."""

    encoder_num_layers: int | None = option(None, "Number of layers of the encoder.", roles=Role.SHAPE)
    decoder_num_layers: int | None = option(
        None, "Number of layers of the decoder. Default: as many as the encoder has.", roles=Role.SHAPE
    )
    encoder_seq_length: int | None = option(
        None, "Tokens that the encoder reads in a sample.", roles=Role.SAVED | Role.ORDER
    )
    decoder_seq_length: int | None = option(
        None, "Tokens that the decoder reads in a sample.", roles=Role.SAVED | Role.ORDER
    )


T5 = Group.of(EncoderDecoder, "encoder and decoder")
