"""The configuration of a run: the value of every flag, and what follows from them, checked and completed.

`parse_args` makes `Arguments` of a command line, and the rules of this folder complete them. `TrainConfig.of` then
makes the configuration, in which every value has a name and a type. It never changes: a function that computes another
value returns another configuration (`dataclasses.replace`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, field, fields, make_dataclass
from typing import Any

from megatron.elastic.stages import Arrangement, Stages
from megatron.pipeline.program.lane_order import Residency
from megatron.pipeline.program.weight_policies import WeightPolicy
from megatron.pipeline.schedules import PLACEMENTS, PRESETS, PipelineSchedule, ProgramSchedule
from megatron.planner.memory.architecture import Decoder
from megatron.trainer.arguments.flags import experts, files, model, parallel, refusals, training
from megatron.trainer.arguments.flags.specification import Arguments
from megatron.trainer.arguments.flags.values import BatchSizes


@dataclass(frozen=True)
class MadeProgram:
    """A program that was made for a job.

    Attributes:
        csv: the program's text, as in a file.
        lines: lines about it for the log.
        certificate: its problem, time and bounds, as JSON.
        measures: the job only begins with it, measures its own costs, and goes on with a program for these.
    """

    csv: str
    lines: tuple[str, ...]
    certificate: str
    measures: bool = False


@dataclass(frozen=True, init=False, repr=False, eq=False)
class Derived:
    """What follows from the flags, the job, the files and the machine.

    Attributes:
        architecture: "gpt", "bert", "t5", "vit" or "bert-classify"; the program says it.
        given: the destinations that the command line named.
        unread: a note for each flag on the command line that only Megatron-LM reads.
        virtual_pipeline_model_parallel_size: the most stages of a rank; None for one.
        made_program: the program that was made for --pipeline-schedule auto.
        program: the schedule of --pipeline-program, or of `made_program`.
        moves_activations: saved activations leave their rank, for its pair or for the host, in a batch of any size.
        class_names: the classes of a text classifier.
        changes: the pipeline may change while it trains.
        arrangement, first_arrangement: the present and the first one, where the pipeline changes.
        frozen_stages: the stages of the present arrangement, unless that is the first.
        recorded_changes: what a checkpoint says of changes to the pipeline.
        has_split: whether there are data for training, validation and test.
        data_digest: the digest of a classifier's training data.
    """

    architecture: str = "gpt"
    given: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()
    world_size: int
    rank: int
    data_parallel_size: int
    transformer_pipeline_model_parallel_size: int
    virtual_pipeline_model_parallel_size: int | None
    made_program: MadeProgram | None = None
    program: ProgramSchedule | None
    pipeline_program_sha256: str | None
    schedule: PipelineSchedule
    moves_activations: bool
    batch_sizes: BatchSizes
    class_names: list[str] | None = None
    changes: bool
    arrangement: Arrangement | None
    first_arrangement: Arrangement | None = None
    frozen_stages: Stages | None
    recorded_changes: dict[str, Any] | None = None
    has_split: tuple[bool, ...] = ()
    data_digest: str | None = None


_Unread = make_dataclass(
    "_Unread",
    [(flag.dest, Any, field(default=flag.default))
     for flag in (*refusals.IGNORED.flags, *refusals.REFUSED.flags) if flag.ignored or flag.neutral],
    frozen=True, init=False, repr=False, eq=False,
)  # fmt: skip
"""Flags that are accepted and do nothing; a checkpoint keeps their values."""


@dataclass(frozen=True, init=False, repr=False, eq=False)
class TrainConfig(
    model.Model, model.Attention, model.MultiToken, experts.Experts, parallel.Pipeline, parallel.Distributed,
    training.Freezing, training.Batch, training.Regularization, training.LearningRate, training.Precision,
    training.EightBits, training.Recompute, files.Data, files.Conversations, files.Tokenizer, model.Bert,
    model.EncoderDecoder, model.Classification, model.Vision, files.Checkpoint, files.Logging, files.DryRunFlags,
    Derived, _Unread,
):  # fmt: skip
    """The configuration of a run, by Megatron-LM's names; a part of it is one of the classes that it is made of."""

    def __init__(self, **values: Any) -> None:
        assert values.keys() == _NAMES, values.keys() ^ _NAMES
        vars(self).update(values)  # a search makes thousands; a statement for each field takes fifty times as long

    @classmethod
    def of(cls, args: Arguments, **derived: Any) -> TrainConfig:
        """The configuration that parsed and validated arguments make, with further values."""
        return cls(**{**_LATER, **vars(args), **derived})


_NAMES = {each.name for each in fields(TrainConfig)}
_LATER = {each.name: each.default for each in fields(Derived) if each.default is not MISSING}
"""What neither the command line nor the rules say."""


# --- the optimizer's state --------------------------------------------------------------------------------------------


def cuts_optimizer_state(args: object) -> bool:
    """Whether a run has megatron.core's distributed optimizer, which cuts the state of a parameter.

    With Muon replicas own whole parameters instead. `args` may be those of a checkpoint, which may lack some.
    """
    return getattr(args, "use_distributed_optimizer", False) and getattr(args, "optimizer", None) != "muon"


# --- replicas ---------------------------------------------------------------------------------------------------------


def num_replicas(args: TrainConfig | Arguments) -> int:
    """The ranks with the same weights, whose gradients are reduced: data x context parallel size."""
    return args.data_parallel_size * args.context_parallel_size


def ranks_of_place(args: TrainConfig | Arguments) -> int:
    """The ranks, with consecutive numbers, that compute the layers of a pipeline rank of a replica together."""
    return args.tensor_model_parallel_size * args.context_parallel_size


def expert_tensor_size(args: TrainConfig | Arguments) -> int:
    """The tensor ranks that cut each expert."""
    return args.expert_tensor_parallel_size or args.tensor_model_parallel_size


def num_expert_replicas(args: TrainConfig | Arguments) -> int:
    """The ranks with the same experts."""
    ranks = num_replicas(args) * args.tensor_model_parallel_size
    return ranks // (expert_tensor_size(args) * args.expert_model_parallel_size)


# --- the pipeline -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class PipelineChoice:
    """The facts about a run's pipeline that are needed before the schedule is built.

    Attributes:
        flag: as on the command line, for messages: `--pipeline-schedule 2bw`.
        name: what logs call it.
        policy: which weights a batch uses.
        residency: how weights live on the host; None: they live on the device.
        interleaves: ranks have several stages.
        virtual_stages: the only number of stages on a rank that it supports; None: any.
        recompute: backwards are preceded by a recompute whatever the flags say.
        placement: (ranks, stages on each) -> the rank of each stage.
        deals_out: whether the placement deals out stages in turn, as megatron.core does.
    """

    flag: str
    name: str
    policy: WeightPolicy
    residency: Residency | None
    interleaves: bool
    virtual_stages: int | None
    recompute: bool
    placement: Callable[[int, int], Sequence[int]]
    deals_out: bool


def choice_of(args: TrainConfig) -> PipelineChoice:
    """The pipeline that `args` ask for; `program`: the schedule of their program file, or None."""
    schedule = args.program
    if schedule is None:
        preset = PRESETS[args.pipeline_schedule]
        return PipelineChoice(
            flag=f"--pipeline-schedule {args.pipeline_schedule}", name=args.pipeline_schedule, policy=preset.policy,
            residency=preset.residency, interleaves=preset.interleaves,
            virtual_stages=preset.virtual_stages if preset.interleaves else None, recompute=preset.recompute,
            placement=PLACEMENTS[preset.placement], deals_out=preset.placement == "round-robin",
        )  # fmt: skip
    placement = schedule.rank_of_stage
    in_turn = tuple(stage % schedule.num_ranks for stage in range(schedule.num_stages))
    return PipelineChoice(
        flag=flag_of_program(args), name=f"program {args.pipeline_program}",
        policy=schedule.weights, residency=None, interleaves=schedule.num_stages > schedule.num_ranks,
        virtual_stages=None,
        recompute=schedule.recompute, placement=lambda *_: placement,
        deals_out=placement == in_turn and schedule.num_stages % schedule.num_ranks == 0 and schedule.num_ranks > 1,
    )  # fmt: skip


def edge_length(args: TrainConfig | Arguments) -> int:
    """Tokens of the tensor that stages send each other: of a T5 the encoder's and, behind them, the decoder's and the
    rows of the tables of distances."""
    if args.architecture != "t5":
        return args.seq_length
    parts = args.tensor_model_parallel_size if args.sequence_parallel else 1
    return args.seq_length + args.decoder_seq_length + parts * rows_of_distances(args)


def rows_of_distances(args: TrainConfig | Arguments) -> int:
    """How many vectors of the hidden size hold a T5's two tables of distances, which each stage of a chain sends on."""
    return decoder_of(args).distance_rows(args.num_attention_heads, args.hidden_size)


def decoder_of(args: TrainConfig | Arguments) -> Decoder:
    """The decoder of a T5, as the planner knows it."""
    has_distances = args.position_embedding_type == "relative"
    return Decoder(
        first=args.encoder_num_layers,
        sequence_length=args.decoder_seq_length,
        distances=args.relative_attention_num_buckets * has_distances,
        output_bias=has_output_bias(args),
    )


def has_output_bias(args: TrainConfig | Arguments) -> bool:
    """Whether the logits of a T5 have a bias: megatron.core's have one where the output layer is the embedding."""
    return not args.untie_embeddings_and_output_weights and not args.scaled_tied_head


def runs_of_sample(args: TrainConfig | Arguments) -> int:
    """The most runs of words that are taken out of a sample of a T5, for each of which an extra id stands."""
    return max(1, int(args.mask_prob * (args.encoder_seq_length - 2)))


def is_gated(args: TrainConfig | Arguments) -> bool:
    """Whether an MLP multiplies two products of its input."""
    return args.swiglu or args.quick_geglu or args.gated_gelu


def flag_of_program(args: TrainConfig | Arguments) -> str:
    """The flag that a run's program comes from, for messages."""
    return f"{'--pipeline-program' if args.made_program is None else '--pipeline-schedule'} {args.pipeline_program}"


def schedule_text(args: TrainConfig) -> str:
    """The name of the choice in a run's first lines: `schedule 2bw`, or `program rows.csv (sha256 0123456789ab)`."""
    if args.program is None:
        return f"schedule {args.pipeline_schedule}"
    return f"program {args.pipeline_program} (sha256 {args.program.short_hash})"


# --- how many rows an embedding has -----------------------------------------------------------------------------------

USUAL = {
    "gpt": ("GPT-2's", 50257), "bert": ("BERT's", 30522), "bert-classify": ("BERT's", 30522),
    "t5": ("BERT's with [BOS] and [EOS]", 30524),
}  # fmt: skip
"""By architecture: whose vocabulary is taken where none is given, and its size."""
_OF_ONE_MODEL = {"Llama2Tokenizer": ("Llama 2's", 32000)}


def usual_vocabulary(args: TrainConfig) -> tuple[str, int]:
    """The name and size of the vocabulary that is assumed where neither a tokenizer nor --vocab-size gives one."""
    return _OF_ONE_MODEL.get(args.tokenizer_type, USUAL[args.architecture])


def assumed_vocabulary(args: TrainConfig) -> int:
    """The number of token ids without a tokenizer: that of --vocab-size, or of the usual vocabulary."""
    return (args.vocab_size or usual_vocabulary(args)[1]) + args.vocab_extra_ids


def padded_vocabulary(args: TrainConfig, size: int) -> int:
    """The rows of the embedding: as --padded-vocab-size says, else `size` rounded up to a multiple of
    --make-vocab-size-divisible-by x tensor parallel size."""
    if "padded_vocab_size" in args.given:
        return args.padded_vocab_size
    multiple = args.make_vocab_size_divisible_by * args.tensor_model_parallel_size
    return -(-size // multiple) * multiple
