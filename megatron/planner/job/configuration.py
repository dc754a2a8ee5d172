"""A configuration: one way to train a model on a number of GPUs. A search chooses one, an estimate prices one.

Each field has a `Setting`, the only place that says how the field is written elsewhere: as a flag of the training
programs, as a variable of a script, in the name of a run, and in a sentence. All code that lists settings reads these
records. So a new setting needs only a field here with its rules, and code that prices it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Annotated, Any, get_type_hints

from megatron.pipeline.placement.mapping import NAMES, Degrees
from megatron.pipeline.program.lane_order import DEFERRED, DEVICE, Residency
from megatron.pipeline.program.weight_policies import TWO_BW
from megatron.pipeline.schedules import ORDERS, PLACEMENTS, PRESETS, Preset, Schedule
from megatron.planner.memory.architecture import ExpertDegrees
from megatron.planner.memory.hosted import Hosting
from megatron.planner.memory.recompute import RecomputeScope

STAGES = (2, 3)
"""The ZeRO stages that split gradients (2), and weights as well (3)."""


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """A split of a model over replicas by ZeRO 2 or 3, which PyTorch calls FSDP. ZeRO 1 is `distributed_optimizer`.

    Attributes:
        stage: the ZeRO stage. 2 splits gradients and optimizer state; weights are gathered for the forward and kept for
            the backward (FSDP without resharding). 3 also splits weights, which are gathered for each use.
        shards: number of replicas that together hold one copy of the model. With more replicas, several groups of this
            size hold a copy each (HSDP).

    Raises:
        ValueError: `stage` is not 2 or 3, or `shards` is below 2.
    """

    stage: int = 3
    shards: int

    def __post_init__(self) -> None:
        if self.stage not in STAGES:
            raise ValueError(f"ZeRO's stage {self.stage} splits no weights and gradients; give 2 or 3")
        if self.shards < 2:
            raise ValueError(f"{self.shards} replicas split nothing; give 2 shards or more, or leave sharding out")

    @property
    def name(self) -> str:
        """The name that frameworks use for this sharding."""
        return "FSDP (ZeRO-3)" if self.stage == 3 else "ZeRO-2"


PROVISIONAL_MODES = ("off", "stage", "uniform")

Flags = dict[str, int | str]
"""Flag -> value; the value of a switch is True."""

_RECOMPUTE: dict[RecomputeScope, Flags] = {
    RecomputeScope.NONE: {},
    RecomputeScope.ATTENTION: {"--recompute-granularity": "selective"},
    RecomputeScope.LAYER: {
        "--recompute-granularity": "full", "--recompute-method": "uniform", "--recompute-num-layers": 1,
    },
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Setting:
    """How a field of a configuration is written elsewhere.

    Attributes:
        short: the abbreviation of a size, such as t. Every field with one is a number of at least 1.
        flag: the flag of the training programs (a switch for a boolean field), or a function from a configuration to
            flags with their values.
        variable: the variable of examples/cluster/job.sh. A field without one is written as a flag in a script.
        word: text before the value in the name of a run.
        always: whether flag and name of a run are written for the default value, too.
        remark: a clause about a configuration in which the field is true.
    """

    short: str = ""
    flag: "str | Callable[[Configuration], Flags] | None" = None
    variable: str | None = None
    word: str = ""
    always: bool = False
    remark: str = ""


def even_layers(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """The number of layers of each stage, as equal as possible, if no layout is given.

    If the stages do not divide the layers, the stages just before the last one have one more: the last stage has the
    loss, and the first stages have the embedding and save the most microbatches.
    """
    count, rest = divmod(num_layers, num_stages)
    return tuple(count + (num_stages - 1 - rest <= stage < num_stages - 1) for stage in range(num_stages))


def layout_text(layers: Sequence[int], further: int = 0) -> str:
    """The stages in the notation of `--pipeline-model-parallel-layout`. `further`: layers of multi-token prediction, on
    the last stage."""
    return f"E{'|'.join('t' * count for count in layers)}{'m' * further}L"


def _stage_flags(configuration: "Configuration") -> Flags:
    """Return the flags of the stages: a layout if layers are given, since it also implies the number of stages."""
    if configuration.layers is not None and configuration.num_stages > 1:
        return {"--pipeline-model-parallel-layout": layout_text(configuration.layers)}
    return {"--num-virtual-stages-per-pipeline-rank": configuration.virtual} if configuration.virtual > 1 else {}


def _balance_flags(configuration: "Configuration") -> Flags:
    moves_more = configuration.balance and not PRESETS[configuration.schedule].balance
    return {"--balance-activations": True} if moves_more else {}


def _host_flags(configuration: "Configuration") -> Flags:
    if not configuration.is_hosted:
        return {}
    return {"--l2l-update": configuration.host_update, "--l2l-resident-stages": configuration.resident_stages}


def _fetch_flags(configuration: "Configuration") -> Flags:
    return {"--l2l-fetch": "shares"} if configuration.gathers_fetch else {}


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """Parallel degrees, batch sizes, schedule, recomputation, and further choices for training a model.

    Attributes:
        tensor, pipeline, data: t, p, d. Their product times `context` is the number of GPUs.
        virtual: v, the number of stages on each rank; above 1 only with an interleaved schedule.
        micro_batch_size: sequences in a microbatch of one pipeline.
        global_batch_size: sequences in a batch of all pipelines.
        recompute: none, attention (the core of attention) or layer (whole layers), in BPipe's words.
        schedule: a name in `PRESETS`.
        balance: saved activations move between the ranks of a pair, even if the preset itself does not balance.
        sequence_parallel: activations that are not split by heads or columns are split along the sequence.
        distributed_optimizer: optimizer state is split over the replicas (ZeRO-1).
        rank_mapping: a name in `placement.mapping.NAMES`.
        layers: number of layers of each of the p * v stages; None: as equal as can be (`even_layers`).
        provisional: the gradients from which 2bw predicts weights: "stage" (those of the microbatches that each stage
            has done), "uniform" (those of the same number of microbatches on all stages), or "off" (no predictions).
        provisional_microbatches: the number of microbatches for "uniform".
        provisional_reduce: replicas predict from the mean of their gradients.
        resident_stages: K, with weights on the host (l2l): the most stages of a rank on the device at once.
        host_update: when the host updates a stage: eager or deferred (`Residency`).
        stash: with weights on the host, where inputs of stages wait for their recompute: device or host.
        gathers_fetch: each replica on a node fetches a share of a stage's weights and gathers the rest from the others.
        single_gradient_buffer: 2bw without its second gradient buffer. The first backward of a batch waits until the
            gradients of the previous batch are reduced. Gradients are clipped by the norm of the batch before theirs.
        sharding: how weights, gradients and optimizer state are split over replicas, without a pipeline (FSDP, ZeRO);
            None: they are not split.
        context: context parallel size (cp): the number of ranks that share the sequences of a microbatch.
        expert: expert parallel size (ep): the number of ranks of a stage that hold different experts of a layer.
        expert_tensor: expert tensor parallel size (etp): the number of ranks that hold a part of each expert; None: t.

    Raises:
        ValueError: a number is below 1, a name is unknown, the batch does not divide into microbatches, settings of
            predictions are missing or contradict each other, or ranks cannot share sequences or experts in this way.
    """

    tensor: Annotated[int, Setting(short="t", flag="--tensor-model-parallel-size", variable="TP", always=True)] = 1
    pipeline: Annotated[int, Setting(short="p", flag="--pipeline-model-parallel-size", variable="PP", always=True)] = 1
    data: Annotated[int, Setting(short="d", always=True)] = 1
    virtual: Annotated[int, Setting(short="v", flag=_stage_flags, variable="VP", always=True)] = 1
    micro_batch_size: Annotated[int, Setting(short="b", flag="--micro-batch-size", variable="MICRO_BATCH", always=True)]
    global_batch_size: Annotated[
        int, Setting(short="B", flag="--global-batch-size", variable="GLOBAL_BATCH", always=True)
    ]
    recompute: Annotated[
        RecomputeScope, Setting(flag=lambda each: _RECOMPUTE[each.recompute], variable="RECOMPUTE", always=True)
    ] = RecomputeScope.NONE
    schedule: Annotated[str, Setting(flag="--pipeline-schedule", variable="SCHEDULE", always=True)] = "flush"
    balance: Annotated[bool, Setting(flag=_balance_flags, variable="BALANCE", word="balanced")] = False
    sequence_parallel: Annotated[
        bool, Setting(flag="--sequence-parallel", variable="SEQUENCE_PARALLEL", word="sequence")
    ] = False
    distributed_optimizer: Annotated[
        bool, Setting(flag="--use-distributed-optimizer", variable="DISTRIBUTED_OPTIMIZER", word="distributed")
    ] = False
    rank_mapping: Annotated[
        str, Setting(flag=lambda each: {"--rank-mapping": each.rank_mapping}, variable="RANK_MAPPING")
    ] = "standard"
    provisional: Annotated[str, Setting(flag="--2bw-provisional", word="provisional-")] = "off"
    provisional_microbatches: Annotated[int | None, Setting(flag="--2bw-provisional-microbatches", word="read")] = None
    provisional_reduce: Annotated[bool, Setting(flag="--2bw-provisional-reduce", word="reduced")] = False
    layers: Annotated[tuple[int, ...] | None, Setting(word="layers")] = None
    resident_stages: Annotated[int, Setting(word="resident")] = 2
    host_update: Annotated[str, Setting(flag=_host_flags)] = DEFERRED
    stash: Annotated[str, Setting(flag="--l2l-stash", word="stash-")] = DEVICE
    gathers_fetch: Annotated[bool, Setting(flag=_fetch_flags, word="shares")] = False
    single_gradient_buffer: Annotated[
        bool, Setting(flag="--2bw-single-gradient-buffer", word="one-buffer", remark="one gradient buffer")
    ] = False
    sharding: Annotated[Sharding | None, Setting(word="sharded")] = None
    context: Annotated[int, Setting(short="cp", flag="--context-parallel-size")] = 1
    expert: Annotated[int, Setting(short="ep", flag="--expert-model-parallel-size")] = 1
    expert_tensor: Annotated[int | None, Setting(flag="--expert-tensor-parallel-size", word="etp")] = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "recompute", RecomputeScope(self.recompute))
        for name in _SIZES:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} {getattr(self, name)} is below 1; give 1 or more")
        if self.schedule not in PRESETS:
            raise ValueError(f"there is no schedule {self.schedule!r}; choose from {', '.join(PRESETS)}")
        if self.rank_mapping not in NAMES:
            raise ValueError(f"there is no rank mapping {self.rank_mapping!r}; choose from {', '.join(NAMES)}")
        if self.layers is not None and (len(self.layers) != self.num_stages or min(self.layers) < 0):
            raise ValueError(f"layers {self.layers} are not a number for each of {self.num_stages} stages; give those")
        if self.global_batch_size % (self.micro_batch_size * self.data):
            raise ValueError(
                f"a global batch of {self.global_batch_size} sequences does not divide into microbatches of "
                f"{self.micro_batch_size} on {self.data} replicas; change one of them"
            )
        self._check_predictions()
        if self.single_gradient_buffer and (PRESETS[self.schedule].policy != TWO_BW or self.predicts):
            raise ValueError(
                f"single_gradient_buffer goes with 2bw whose weights are not predicted, not with {self.schedule}"
                f"{' and provisional ' + self.provisional if self.predicts else ''}; leave one out"
            )
        self._check_hosting()
        self._check_sharding()
        self._check_shares()

    def _check_predictions(self) -> None:
        if self.provisional not in PROVISIONAL_MODES:
            raise ValueError(f"provisional is {self.provisional!r}; choose from {', '.join(PROVISIONAL_MODES)}")
        if self.provisional == "off" and (self.provisional_microbatches is not None or self.provisional_reduce):
            raise ValueError("provisional is off, so nothing is read for predictions; choose stage or uniform")
        if self.provisional != "off" and PRESETS[self.schedule].policy != TWO_BW:
            raise ValueError(f"provisional {self.provisional} goes with the weights of 2bw, not {self.schedule}")
        if (self.provisional == "uniform") != (self.provisional_microbatches is not None):
            raise ValueError(
                f"provisional_microbatches is {self.provisional_microbatches} with provisional {self.provisional}; "
                "uniform needs a number, and nothing else takes one"
            )
        if self.provisional_microbatches is not None and self.provisional_microbatches < 0:
            raise ValueError(f"provisional_microbatches {self.provisional_microbatches} is below 0; give 0 or more")
        if self.provisional_microbatches == 0 and self.provisional_reduce:
            raise ValueError("predictions that read 0 microbatches have nothing to reduce; drop provisional_reduce")
        if self.provisional_reduce and self.replicas == 1:
            raise ValueError("provisional_reduce needs replicas, and there is one; leave it out")

    def _check_hosting(self) -> None:
        given = (self.resident_stages, self.host_update, self.stash, self.gathers_fetch)
        if not self.is_hosted:
            if given != (2, DEFERRED, DEVICE, False):
                raise ValueError(
                    f"resident_stages, host_update, stash and gathers_fetch are {given} with weights on the device; "
                    "leave them out, or choose l2l"
                )
            return
        if self.gathers_fetch and self.data == 1:
            raise ValueError("gathers_fetch needs replicas, and there is one; leave it out")
        Residency(self.resident_stages, self.host_update, self.stash)
        for is_asked, name, reason in (
            (self.recompute is RecomputeScope.LAYER, "recompute layer", "recomputes what is recomputed already"),
            (self.distributed_optimizer, "distributed_optimizer", "shards the optimizer on the devices"),
            (self.balance, "balance", "moves saved activations to ranks that save few"),
        ):
            if is_asked:
                raise ValueError(f"{name} does not go with {self.schedule}: it {reason}; leave it out")

    def _check_shares(self) -> None:
        degrees, of_stage = self.expert_degrees, self.tensor * self.replicas
        if degrees.tensor < 1 or of_stage % (degrees.parallel * degrees.tensor):
            raise ValueError(
                f"expert {degrees.parallel} times expert_tensor {degrees.tensor} does not divide the {of_stage} ranks "
                "of a stage; change one of them"
            )
        if (self.context, self.expert, self.expert_tensor) in ((1, 1, None), (1, 1, self.tensor)):
            return
        shared = "context" if self.context > 1 else "expert" if self.expert > 1 else "expert_tensor"
        if self.is_hosted:
            raise ValueError(f"{shared} {getattr(self, shared)} does not go with {self.schedule}; leave it out")
        if self.sharding is not None:
            raise ValueError(
                f"{shared} {getattr(self, shared)} beside weights that are split over replicas (FSDP, ZeRO) is not "
                "modelled; leave one out"
            )
        if self.rank_mapping == "optimized":
            raise ValueError(
                f"rank mapping optimized does not know what ranks send with {shared} {getattr(self, shared)}; choose "
                "standard or pair-adjacent"
            )

    def _check_sharding(self) -> None:
        if self.sharding is None:
            return
        if self.pipeline > 1:
            raise ValueError(
                f"weights are split over replicas (fully sharded, ZeRO-{self.sharding.stage}) and p is "
                f"{self.pipeline}, of which the time of both together is not modelled; give p 1"
            )
        if self.data % self.sharding.shards:
            raise ValueError(
                f"{self.data} replicas do not divide into groups of {self.sharding.shards} shards; change one of them"
            )
        if self.schedule != "flush" or self.virtual > 1:
            stages = f"{self.virtual} stages" if self.virtual > 1 else "one stage"
            raise ValueError(
                f"schedule {self.schedule} with {stages} on a rank does not split weights over replicas; give flush, "
                "v 1"
            )
        if self.distributed_optimizer:
            raise ValueError("the optimizer is split by sharding already; leave the distributed optimizer out")

    @property
    def num_gpus(self) -> int:
        return self.tensor * self.pipeline * self.replicas

    @property
    def replicas(self) -> int:
        """The number of ranks with the same weights, which reduce their gradients: d times cp.

        In Megatron's order of ranks the context rank changes faster than the data rank.
        """
        return self.data * self.context

    @property
    def expert_degrees(self) -> ExpertDegrees:
        return ExpertDegrees(
            parallel=self.expert, tensor=self.tensor if self.expert_tensor is None else self.expert_tensor
        )

    @property
    def expert_replicas(self) -> int:
        """The number of ranks with the same experts."""
        degrees = self.expert_degrees
        return self.tensor * self.replicas // (degrees.parallel * degrees.tensor)

    @property
    def num_microbatches(self) -> int:
        """m, the number of microbatches of one pipeline in a batch."""
        return self.global_batch_size // (self.micro_batch_size * self.data)

    @property
    def num_stages(self) -> int:
        return self.pipeline * self.virtual

    @property
    def is_hosted(self) -> bool:
        """Whether weights live on the host."""
        return PRESETS[self.schedule].residency is not None

    @property
    def hosting(self) -> Hosting | None:
        """The settings of weights on the host on which memory depends; None: weights live on the device."""
        if not self.is_hosted:
            return None
        return Hosting(stages=self.resident_stages, stash=self.stash, num_microbatches=self.num_microbatches)

    @property
    def gathers_in_step(self) -> bool:
        """Whether replicas gather their shares of new weights in STEP; predicted weights they gather in PREDICT."""
        return self.distributed_optimizer and not self.predicts

    @property
    def predicts(self) -> bool:
        """Whether batches are computed at predicted weights."""
        return self.provisional != "off"

    def flags(self, *names: str) -> Flags:
        """Return the flags of the training programs for the fields `names` (default: all fields)."""
        return {flag: value for name in names or SETTINGS for flag, value in self._flags_of(name).items()}

    def _flags_of(self, name: str) -> Flags:
        setting, value = SETTINGS[name], getattr(self, name)
        if callable(setting.flag):
            return setting.flag(self)
        return {setting.flag: value} if setting.flag and (setting.always or value != DEFAULTS[name]) else {}

    def argv(self, *names: str) -> tuple[str, ...]:
        """Return `flags` as words of a command line."""
        pairs = self.flags(*names).items()
        return tuple(str(word) for flag, value in pairs for word in ((flag,) if value is True else (flag, value)))

    @property
    def degrees(self) -> Degrees:
        """The parallel degrees. Ranks that share sequences count among the replicas (`replicas`)."""
        return Degrees(tensor=self.tensor, pipeline=self.pipeline, data=self.replicas)

    @property
    def preset(self) -> Preset:
        """The preset of the schedule's name, with moves of activations if `balance` is set."""
        preset = PRESETS[self.schedule]
        return replace(preset, balance=True) if self.balance else preset

    @property
    def splits_backward(self) -> bool:
        """Whether the schedule splits backwards into I and W. Raises ValueError as `pipeline_schedule`."""
        return self.pipeline_schedule(tied_embeddings=False).splits_backward

    def pipeline_schedule(self, *, tied_embeddings: bool) -> Schedule:
        """Return the schedule whose programs would run. Raises ValueError if the choices do not fit together."""
        return _schedule(
            self.schedule, meaning(PRESETS[self.schedule]), num_stages=self.num_stages,
            num_virtual_stages=self.virtual, balance=self.balance,
            tied_embeddings=tied_embeddings and self.num_stages > 1,
            data_parallel=max(self.replicas, self.expert_replicas) > 1,
            predict=self.predicts, provisional_microbatches=self.provisional_microbatches,
            reduce_partial=self.provisional_reduce,
            residency=Residency(self.resident_stages, self.host_update, self.stash) if self.is_hosted else None,
        )  # fmt: skip


SETTINGS: Mapping[str, Setting] = {each.name: each.type.__metadata__[0] for each in fields(Configuration)}
DEFAULTS: Mapping[str, Any] = {each.name: each.default for each in fields(Configuration)}
KINDS: Mapping[str, Any] = get_type_hints(Configuration)
_SIZES = tuple(name for name, setting in SETTINGS.items() if setting.short)

CHOSEN = (
    "tensor", "pipeline", "data", "micro_batch_size", "global_batch_size", "schedule", "virtual", "recompute",
    "distributed_optimizer", "rank_mapping", "provisional", "provisional_microbatches", "provisional_reduce",
    "single_gradient_buffer", "context", "expert", "expert_tensor",
)  # fmt: skip
"""The fields that a search chooses, in the order of its records."""


def remarks(chosen: object) -> tuple[str, ...]:
    """Return the remarks on a configuration, or on another object with some of its fields."""
    return tuple(each.remark for name, each in SETTINGS.items() if each.remark and getattr(chosen, name, False))


def meaning(preset: Preset) -> tuple[object, ...]:
    """Return the preset with its current order, policy and placement, as a cache key: the tables can change."""
    return preset, ORDERS.get(preset.order), preset.policy, PLACEMENTS.get(preset.placement)


@lru_cache(maxsize=1024)
def _schedule(name: str, _: tuple[object, ...], **choices: Any) -> Schedule:
    """Return the schedule of a preset, cached since a search asks ten times for each configuration."""
    return Schedule.preset(name, **choices)
