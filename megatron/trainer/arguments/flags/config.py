"""The configuration of a run: the value of every flag and the values derived from them, checked and completed.

`parse_args` parses a command line into `Arguments`, and the rules in `arguments/rules` check and complete them.
`TrainConfig.of` then makes the configuration, in which every value has a name and a type. It never changes: a function
that computes another value returns another configuration (`dataclasses.replace`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, field, fields, make_dataclass
from typing import Any

from megatron.elastic.stages import Arrangement, StageLayers
from megatron.pipeline.program.lane_order import Residency
from megatron.pipeline.program.weight_policies import WeightPolicy
from megatron.pipeline.schedules import PLACEMENTS, PRESETS, PipelineSchedule, ProgramSchedule
from megatron.planner.memory.architecture import Decoder
from megatron.trainer.arguments.flags import experts, files, model, parallel, refusals, training
from megatron.trainer.arguments.flags.specification import Arguments
from megatron.trainer.arguments.flags.values import BatchSizes


@dataclass(frozen=True)
class MadeProgram:
    """A pipeline program that was made for a job (`--pipeline-schedule auto`).

    Attributes:
        csv: the program's text, as in a program file.
        lines: log lines about the program.
        certificate: its problem, time and bounds, as JSON.
        measures: whether the run only starts with this program, measures its own costs, and then switches to a program
            that was made for these costs.
    """

    csv: str
    lines: tuple[str, ...]
    certificate: str
    measures: bool = False


@dataclass(frozen=True, init=False, repr=False, eq=False)
class Derived:
    """The values that are derived from the flags, the job, the files and the machine.

    Attributes:
        architecture: "gpt", "bert", "t5", "vit" or "bert-classify"; set by the training program, not by a flag.
        given: the destinations that the command line named.
        unread: a note for each flag on the command line that only Megatron-LM reads.
        virtual_pipeline_model_parallel_size: the largest number of stages on a rank; None if every rank has one.
        made_program: the program that was made for --pipeline-schedule auto.
        program: the schedule of --pipeline-program, or of `made_program`.
        moves_activations: whether saved activations may leave their rank, for its pair or for the host, in a batch of
            any size.
        class_names: the classes of a text classifier.
        changes: whether the pipeline may change during training.
        arrangement, first_arrangement: the current and the first arrangement of a pipeline that may change.
        frozen_stages: the stages of the current arrangement; None while it is the first one.
        recorded_changes: a checkpoint's record of the changes to the pipeline.
        has_split: for training, validation and test in turn, whether there are data.
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
    frozen_stages: StageLayers | None
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
    """The configuration of a run, with Megatron-LM's names; each base class holds the values of one subject."""

    def __init__(self, **values: Any) -> None:
        assert values.keys() == _NAMES, values.keys() ^ _NAMES
        vars(self).update(values)  # fifty times as fast as a statement per field; a search makes thousands

    @classmethod
    def of(cls, args: Arguments, **derived: Any) -> TrainConfig:
        """Make the configuration from parsed and validated arguments and further values."""
        return cls(**{**_LATER, **vars(args), **derived})


_NAMES = {each.name for each in fields(TrainConfig)}
_LATER = {each.name: each.default for each in fields(Derived) if each.default is not MISSING}
"""Defaults of the derived values that neither the command line nor the rules set."""


# --- the optimizer's state --------------------------------------------------------------------------------------------


def cuts_optimizer_state(args: object) -> bool:
    """Whether a run uses megatron.core's distributed optimizer, which shards the state of single parameters.

    With Muon, replicas own whole parameters instead. `args` may be those of a checkpoint, which may lack some flags.
    """
    return getattr(args, "use_distributed_optimizer", False) and getattr(args, "optimizer", None) != "muon"


# --- replicas ---------------------------------------------------------------------------------------------------------


def num_replicas(args: TrainConfig | Arguments) -> int:
    """The number of ranks with the same weights, whose gradients are reduced: data x context parallel size."""
    return args.data_parallel_size * args.context_parallel_size


def ranks_of_place(args: TrainConfig | Arguments) -> int:
    """The number of consecutive ranks that compute the layers of one pipeline rank together.

    They are of one replica, or under expert parallelism of as many as have whole groups of experts.
    """
    own, sharing = _ranks_of_layers(args), 1
    if args.num_experts is not None:
        sharing = expert_tensor_size(args) * args.expert_model_parallel_size
    return math.lcm(own, sharing)


def replicas_of_place(args: TrainConfig | Arguments) -> int:
    """The number of replicas whose ranks compute layers together (`ranks_of_place`)."""
    return ranks_of_place(args) // _ranks_of_layers(args)


def replica_in_place(args: TrainConfig | Arguments, rank: int) -> int:
    """The replica, among those of its place, to which a rank belongs."""
    return rank % ranks_of_place(args) // _ranks_of_layers(args)


def num_places(args: TrainConfig | Arguments) -> int:
    """The number of places with the same pipeline rank: one for each `replicas_of_place` replicas."""
    return args.data_parallel_size // replicas_of_place(args)


def ranks_of_part(args: TrainConfig | Arguments) -> int:
    """The least distance, in a place, of two ranks with the same weights."""
    if args.num_experts is None:
        return args.tensor_model_parallel_size
    return math.lcm(args.tensor_model_parallel_size, expert_tensor_size(args) * args.expert_model_parallel_size)


def _ranks_of_layers(args: TrainConfig | Arguments) -> int:
    return args.tensor_model_parallel_size * args.context_parallel_size


def expert_tensor_size(args: TrainConfig | Arguments) -> int:
    """The number of tensor parallel ranks that shard each expert."""
    return args.expert_tensor_parallel_size or args.tensor_model_parallel_size


def num_expert_replicas(args: TrainConfig | Arguments) -> int:
    """The number of ranks with the same experts."""
    ranks = num_replicas(args) * args.tensor_model_parallel_size
    return ranks // (expert_tensor_size(args) * args.expert_model_parallel_size)


# --- the pipeline -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class PipelineChoice:
    """The facts about a run's pipeline that are needed before the schedule is built.

    Attributes:
        flag: the choice as on the command line, for messages: `--pipeline-schedule 2bw`.
        name: its name in logs.
        policy: which weights a batch uses.
        residency: how the host keeps the weights; None: the device keeps them.
        interleaves: whether ranks have several stages.
        virtual_stages: the only supported number of stages on a rank; None: any number.
        recompute: whether every backward is preceded by a recompute, whatever the flags say.
        placement: (ranks, stages on each) -> the rank of each stage.
        deals_out: whether the placement assigns stages round-robin, as megatron.core does.
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
    """The pipeline that `args` choose: a schedule's, or that of their program (`args.program`)."""
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
    """The length, in tokens, of the tensor that stages send each other.

    A T5's tensor holds the encoder's tokens, then the decoder's, then the tables of relative position biases.
    """
    if args.architecture != "t5":
        return args.seq_length
    parts = args.tensor_model_parallel_size if args.sequence_parallel else 1
    return args.seq_length + args.decoder_seq_length + parts * rows_of_distances(args)


def rows_of_distances(args: TrainConfig | Arguments) -> int:
    """The number of vectors of the hidden size that hold a T5's two tables of relative position biases.

    Each stage sends them on to the next.
    """
    return decoder_of(args).distance_rows(args.num_attention_heads, args.hidden_size)


def decoder_of(args: TrainConfig | Arguments) -> Decoder:
    """The decoder of a T5, in the planner's form."""
    has_distances = args.position_embedding_type == "relative"
    return Decoder(
        first=args.encoder_num_layers,
        sequence_length=args.decoder_seq_length,
        distances=args.relative_attention_num_buckets * has_distances,
        output_bias=has_output_bias(args),
    )


def has_output_bias(args: TrainConfig | Arguments) -> bool:
    """Whether the logits of a T5 have a bias: megatron.core adds one if the output layer shares the embedding."""
    return not args.untie_embeddings_and_output_weights and not args.scaled_tied_head


def runs_of_sample(args: TrainConfig | Arguments) -> int:
    """The largest number of spans that are masked in a T5 sample; an extra id replaces each span."""
    return max(1, int(args.mask_prob * (args.encoder_seq_length - 2)))


def is_gated(args: TrainConfig | Arguments) -> bool:
    """Whether an MLP is gated: it multiplies two projections of its input."""
    return args.swiglu or args.quick_geglu or args.gated_gelu


def flag_of_program(args: TrainConfig | Arguments) -> str:
    """The flag, with its value, that a run's program comes from, for messages."""
    return f"{'--pipeline-program' if args.made_program is None else '--pipeline-schedule'} {args.pipeline_program}"


def schedule_text(args: TrainConfig) -> str:
    """The schedule or program in a run's first log lines: `schedule 2bw`, `program rows.csv (sha256 0123456789ab)`."""
    if args.program is None:
        return f"schedule {args.pipeline_schedule}"
    return f"program {args.pipeline_program} (sha256 {args.program.short_hash})"


# --- how many rows an embedding has -----------------------------------------------------------------------------------

USUAL = {
    "gpt": ("GPT-2's", 50257), "bert": ("BERT's", 30522), "bert-classify": ("BERT's", 30522),
    "t5": ("BERT's with [BOS] and [EOS]", 30524),
}  # fmt: skip
"""Architecture -> the name and size of the vocabulary that is assumed if none is given."""
_OF_ONE_MODEL = {"Llama2Tokenizer": ("Llama 2's", 32000)}


def usual_vocabulary(args: TrainConfig) -> tuple[str, int]:
    """The name and size of the vocabulary that is assumed where neither a tokenizer nor --vocab-size gives one."""
    return _OF_ONE_MODEL.get(args.tokenizer_type, USUAL[args.architecture])


def assumed_vocabulary(args: TrainConfig) -> int:
    """The number of token ids without a tokenizer: that of --vocab-size, or of the usual vocabulary."""
    return (args.vocab_size or usual_vocabulary(args)[1]) + args.vocab_extra_ids


def padded_vocabulary(args: TrainConfig, size: int) -> int:
    """The number of rows of the embedding: --padded-vocab-size if given, else `size` rounded up to a multiple of
    --make-vocab-size-divisible-by x tensor parallel size."""
    if "padded_vocab_size" in args.given:
        return args.padded_vocab_size
    multiple = args.make_vocab_size_divisible_by * args.tensor_model_parallel_size
    return -(-size // multiple) * multiple
