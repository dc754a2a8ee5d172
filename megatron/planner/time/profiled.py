"""Costs from a profile: times measured on the machine, composed for a configuration.

Problem: on a CPU a microbatch takes longer while other ranks compute, since ranks share memory, caches and clock. In a
pipeline that fills and drains, some ranks wait. So the cost of an instruction depends on the timeline, and the timeline
depends on the costs.

Solution: a fixed point (`settle`). Start with the costs measured while all ranks compute, and simulate. For each kind
of work at each stage, find the share of its duration during which k ranks compute, for each k. Blend the costs by these
shares, and repeat. If the share is s_k, and the work would take T_k with k ranks computing throughout, the work takes
1 / sum(s_k / T_k).
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields, replace

from megatron.pipeline.program.instruction import BUSY, Instruction
from megatron.pipeline.program.program import Program
from megatron.pipeline.simulate import simulate
from megatron.pipeline.simulate.costs import Costs
from megatron.pipeline.simulate.timeline import Timeline
from megatron.planner.job.configuration import Configuration
from megatron.planner.job.software import Software, has_flash_attention
from megatron.planner.memory.activations import Activations
from megatron.planner.memory.architecture import Architecture
from megatron.planner.memory.parameters import LAST_UPDATE_BYTES, embedding_parameters, stage_parameters
from megatron.planner.time.blocks import Blocks
from megatron.planner.time.calibration import default_constants
from megatron.planner.time.profile import Profile, StagePosition, UpdateTime

_ROUNDS = 4

Times = Mapping[tuple[str, int], float]
"""(kind of work, stage) -> seconds."""


def settle(
    program: Program, times_at_work: Mapping[int, Times], costs_of: Callable[[Times], Costs], *, batches: range
) -> Costs:
    """Return the costs of `program`, whose ranks slow each other down, from its own timeline.

    Args:
        program: the program to simulate.
        times_at_work: number of pipeline ranks at work, from 1 to all -> times of work in that case.
        costs_of: makes a table of costs from times of work.
        batches: the batches that count. If batches do not drain, leave out the first and last of the program.
    """
    times = times_at_work[max(times_at_work)]
    for _ in range(_ROUNDS):
        timeline = simulate(program, costs_of(times))
        shares = _shares_at_work(timeline, program, batches)
        times = {key: _blend(shares.get(key, {}), times_at_work, key) for key in times}
    return costs_of(times)


def _blend(shares: Mapping[int, float], times_at_work: Mapping[int, Times], key: tuple[str, int]) -> float:
    alone = times_at_work[min(times_at_work)][key]
    if not shares or not alone:
        return times_at_work[max(times_at_work)][key]
    return sum(shares.values()) / sum(share / times_at_work[count][key] for count, share in shares.items())


def _shares_at_work(timeline: Timeline, program: Program, batches: range) -> dict[tuple[str, int], dict[int, float]]:
    """Return (cost, stage) -> number of ranks at work -> seconds of that work in `batches`."""
    spans = [span for span in timeline.spans if span.instruction.kind in BUSY and span.end > span.start]
    borders = sorted([(span.start, 1) for span in spans] + [(span.end, -1) for span in spans])
    events: list[tuple[float, int]] = []  # (time, number of ranks at work from then on)
    count = 0
    for time, change in borders:
        count += change
        if events and events[-1][0] == time:
            events[-1] = (time, count)
        else:
            events.append((time, count))
    shares: dict[tuple[str, int], dict[int, float]] = defaultdict(lambda: defaultdict(float))
    starts = [time for time, _ in events]
    for span in spans:
        if _batch_of(span.instruction, program) not in batches:
            continue
        position = bisect_right(starts, span.start) - 1
        while position < len(events) and events[position][0] < span.end:
            until = events[position + 1][0] if position + 1 < len(events) else span.end
            part = min(until, span.end) - max(events[position][0], span.start)
            shares[span.instruction.kind.row.cost, span.instruction.stage][events[position][1]] += part
            position += 1
    return shares


def _batch_of(instruction: Instruction, program: Program) -> int:
    return instruction.version - 1 if instruction.microbatch is None else program.batch_of(instruction.microbatch)


_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
_SMALL = 256  # bytes of the norm's reduction


def shape_of(profile: Profile, *, num_layers: int, tensor: int) -> Architecture:
    """Return the profile's model with `num_layers` layers. Its vocabulary is padded for `tensor` ranks."""
    multiple = _number(profile, "--make-vocab-size-divisible-by", 128) * tensor
    rows = -(-profile.model.vocabulary_size // multiple) * multiple
    return replace(profile.model, num_layers=num_layers, vocabulary_size=rows)


def vocab_size_of(profile: Profile) -> int | None:
    """Return the value of --vocab-size, without padding and a tokenizer's additions; None if it was not given."""
    return _number(profile, "--vocab-size", None)


def _number(profile: Profile, flag: str, default: int | None) -> int | None:
    word = _word(profile, flag)
    return default if word is None else int(word)


def _word(profile: Profile, flag: str) -> str | None:
    return profile.flags[profile.flags.index(flag) + 1] if flag in profile.flags else None


def software_of(profile: Profile) -> Software:
    """Return the software of the profiled program, as far as memory depends on it."""
    size = _BYTES[profile.dtype]
    has_flash = has_flash_attention(
        profile.transformer_impl, _word(profile, "--attention-backend") or "auto", element_bytes=size
    )
    return Software(element_bytes=size, flash_attention=has_flash)


PASS_OF_STEP = 0.6
"""The time that a prediction in one pass with the step adds, over the time of torch's AdamW step: 0.5 to 0.7 in runs of
two stages of 10 and 13 million FP32 parameters on two cores. Alone on the machine it is 0.9: there operators bound the
pass, and torch's step has the third-level cache for itself."""


class ProfiledCosts:
    """A `CostModel` of one model on machines like that of the profile.

    Args:
        profile: the measured times.
        model: the shape of the model. Number of layers and padding of the vocabulary may differ from the profile.
        software: the software that trains (default: the profile's).

    Raises:
        ValueError: the profile is of another model or precision.
    """

    def __init__(self, profile: Profile, model: Architecture, software: Software | None = None) -> None:
        padded = {shape_of(profile, num_layers=1, tensor=t).vocabulary_size for t in range(1, profile.processes + 1)}
        for field in fields(Architecture):
            known, asked = getattr(profile.model, field.name), getattr(model, field.name)
            is_fine = known == asked or field.name == "num_layers"
            if not is_fine and not (field.name == "vocabulary_size" and asked in padded):
                raise ValueError(
                    f"the profile is of a model with {field.name} {known}, not {asked}; profile this model"
                )
        self.profile, self.model, self.software = profile, model, software or software_of(profile)
        if self.software.element_bytes != _BYTES[profile.dtype]:
            raise ValueError(f"the profile is of {profile.dtype}, and the model is not; profile it in its precision")
        self._blocks = Blocks(profile)

    @property
    def pressed_efficiency(self) -> float:
        """The fraction of its speed that a rank short of memory keeps: 1 on a CPU, fitted to published runs on GPUs."""
        return 1.0 if self.profile.shares_processor else default_constants().pressed_efficiency

    def costs(self, configuration: Configuration, layers: Sequence[int]) -> Costs:
        """Return the costs as `CostModel.costs` does. Raises ValueError for times that were not profiled."""
        self._refuse(configuration)
        group = configuration.tensor * configuration.data  # ranks with the same work at the same time
        if not self.profile.shares_processor or configuration.pipeline == 1:
            return self._table(configuration, layers, self._times(configuration, layers, configuration.num_gpus))
        counts = range(1, configuration.pipeline + 1)
        at_work = {count: self._times(configuration, layers, count * group) for count in counts}
        schedule = configuration.pipeline_schedule(tied_embeddings=self.model.shares_embedding)
        # If batches do not drain, simulate enough of them that fill and drain do not affect the middle one.
        around = schedule.settling_batches
        program = schedule.build((configuration.num_microbatches,) * (1 + 2 * around))
        return settle(
            program, at_work, lambda times: self._table(configuration, layers, times), batches=range(around, around + 1)
        )

    def moves(
        self, configuration: Configuration, sizes: Sequence[float], ways: Collection[str]
    ) -> dict[str, list[float]]:
        """Return the seconds of moves as `CostModel.moves` does, to the host while all processes copy."""
        found = {}
        if "host" in ways:
            for name, direction in (("swap_out", "from device"), ("swap_in", "to device")):
                found[name] = [self._blocks.copy(direction, each, working=configuration.num_gpus) for each in sizes]
        if "pair" in ways:
            found["evict"] = list(map(self._blocks.transfer, sizes))
        return found

    def _refuse(self, configuration: Configuration) -> None:
        if configuration.context > 1 or configuration.expert > 1:
            raise ValueError(
                "a profile has no times of ranks that share sequences or experts; predict from first principles"
            )
        if configuration.tensor > 1 and configuration.sequence_parallel != self.profile.sequence_parallel:
            has = "with" if self.profile.sequence_parallel else "without"
            raise ValueError(
                f"the profile was taken {has} --sequence-parallel, and the configuration is not; profile it so"
            )

    # --- by stage

    def _times(self, configuration: Configuration, layers: Sequence[int], working: int) -> Times:
        """Return the seconds of each cost and stage while `working` processes compute throughout."""
        splits = configuration.pipeline_schedule(tied_embeddings=self.model.shares_embedding).splits_backward
        times = {}
        for stage, count in enumerate(layers):
            seconds = self._blocks.stage(
                _place(stage, len(layers)), count, tensor=configuration.tensor, size=configuration.micro_batch_size,
                recompute=configuration.recompute, working=working,
            )  # fmt: skip
            times["forward", stage], times["backward", stage] = seconds.forward, seconds.backward
            if splits:
                if seconds.halves is None:
                    raise ValueError(
                        f"{configuration.schedule} computes backwards in halves, and the profile has no times of I and "
                        "W, of which half a backward is no price; write it anew with tools/profile_model.py"
                    )
                times["backward_input", stage], times["backward_weight", stage] = seconds.halves
            if not configuration.is_hosted:  # otherwise the host's optimizer steps
                times["step", stage] = self._update(configuration, layers, stage, working)
            if configuration.predicts:
                times["predict", stage] = self._prediction(configuration, layers, stage, working)
                times["hold", stage] = self._hold(configuration, layers, stage, working)
        return times

    def _update(self, configuration: Configuration, layers: Sequence[int], stage: int, working: int) -> float:
        """Return the seconds of a stage's update, including the norm.

        With a distributed optimizer a replica steps its share and gathers the other shares, in STEP or, if weights are
        predicted, in PREDICT. If updates overlap with later batches, the norm is computed on the same core, so its time
        counts at the stage.
        """
        replicas = configuration.data if configuration.distributed_optimizer else 1
        seconds = self._part_of_update(configuration, layers, stage, working, lambda found: found.seconds(replicas))
        return seconds + self._gather(configuration, layers, stage) if configuration.gathers_in_step else seconds

    def _gather(self, configuration: Configuration, layers: Sequence[int], stage: int) -> float:
        if not configuration.distributed_optimizer or configuration.data == 1:
            return 0.0
        count = stage_parameters(self.model, configuration.tensor, layers)[stage]
        return self._blocks.all_reduce(configuration.data, count * self.software.element_bytes) / 2

    def _prediction(self, configuration: Configuration, layers: Sequence[int], stage: int, working: int) -> float:
        """Return the seconds of a stage's prediction, from the measured step.

        On a CPU a prediction is one pass (`PASS_OF_STEP`). On a GPU the step is scaled by the bytes that a step on
        copies moves over the bytes of the step itself. Before it comes the norm of all gradients, if a stage clips by
        its own norm ("stage") or looks for overflows (FP16). If replicas average, each computes the norm of its shard.
        Whether a run clips at all is not known here. Error feedback reads no gradients.
        """
        weight, gradient = 4 + self.software.element_bytes, self.software.gradient_bytes
        copied = 6 * 4 + gradient + 4 + (8 if gradient < 4 else 0)  # as in first principles
        share = PASS_OF_STEP if self.profile.shares_processor else 1 + copied / (7 * 4 + weight)
        replicas = configuration.data if configuration.distributed_optimizer else 1
        repeats = configuration.provisional_microbatches == 0
        if repeats:
            share = (LAST_UPDATE_BYTES + self.software.element_bytes) / (7 * 4 + weight)
        takes_norm = configuration.provisional == "stage" or (self._blocks.profile.dtype == "float16" and not repeats)
        norm = takes_norm / (replicas if configuration.provisional_reduce else 1)
        seconds = self._part_of_update(
            configuration, layers, stage, working,
            lambda found: share * found.step.median / replicas + norm * found.norm.median,
        )  # fmt: skip
        return seconds + self._gather(configuration, layers, stage)

    def _hold(self, configuration: Configuration, layers: Sequence[int], stage: int, working: int) -> float:
        """Return the seconds of HOLD: a copy of the gradients reads and writes as many bytes as zeroing writes."""
        return self._part_of_update(configuration, layers, stage, working, lambda found: 2 * found.zero.median)

    def _part_of_update(
        self,
        configuration: Configuration,
        layers: Sequence[int],
        stage: int,
        working: int,
        seconds: Callable[[UpdateTime], float],
    ) -> float:
        schedule = configuration.pipeline_schedule(tied_embeddings=self.model.shares_embedding)
        return self._blocks.update(
            _place(stage, len(layers)), layers[stage], tensor=configuration.tensor, weights=schedule.weights,
            working=working, seconds=seconds,
        )  # fmt: skip

    # --- the table

    def _table(self, configuration: Configuration, layers: Sequence[int], times: Times) -> Costs:
        measured = dict.fromkeys(("step", "predict", "hold"), [0.0] * len(layers))
        for name in {name for name, _ in times}:
            measured[name] = [times[name, stage] for stage in range(len(layers))]
        return Costs(
            **measured, **self._hosted(configuration, layers),
            evict=self._moves(configuration, layers), **self._edges(configuration),
            **self._reductions(configuration, layers),
        )  # fmt: skip

    def _hosted(self, configuration: Configuration, layers: Sequence[int]) -> dict[str, list[float]]:
        """Return the seconds of copies and updates for weights on the host, while all processes copy and update.

        Replicas are on one machine here and share a store: each stores and steps its share.
        """
        if not configuration.is_hosted:
            return {}
        if configuration.gathers_fetch:
            raise ValueError("a profile does not measure how replicas gather what they fetch; fetch whole stages")
        working, share = configuration.num_gpus, 1 / configuration.data
        kernel = "fused" if _word(self.profile, "--optimizer-kernel") == "fused" else "loop"
        per_parameter = self._blocks.host_update(kernel, working=working)
        counts = stage_parameters(self.model, configuration.tensor, layers)
        boundary = self._activations(configuration).boundary

        def copy(direction: str, num_bytes: float) -> float:
            return self._blocks.copy(direction, num_bytes, working=working)

        return {
            "fetch": [copy("to device", count * self.software.element_bytes) for count in counts],
            "store": [copy("from device", share * count * self.software.gradient_bytes) for count in counts],
            "update": [share * count * per_parameter for count in counts],
            "offload": [copy("from device", boundary)] * len(counts),
            "reload": [copy("to device", boundary)] * len(counts),
        }

    def _edges(self, configuration: Configuration) -> dict[str, float]:
        if configuration.pipeline == 1:
            return {}
        num_bytes = self._activations(configuration).boundary
        latency = self._blocks.transfer(0)
        seconds = self._blocks.transfer(num_bytes) - latency
        return {"latency": latency, "forward_bytes": num_bytes, "bandwidth": num_bytes / max(seconds, 1e-9)}

    def _moves(self, configuration: Configuration, layers: Sequence[int]) -> list[float] | float:
        if not configuration.preset.balance:
            return 0.0
        activations, last = self._activations(configuration), len(layers) - 1
        return [
            self._blocks.transfer(activations.saved(count, is_first=stage == 0, is_last=stage == last))
            for stage, count in enumerate(layers)
        ]

    def _reductions(self, configuration: Configuration, layers: Sequence[int]) -> dict[str, list[float] | float]:
        t, d, size = configuration.tensor, configuration.data, self.software.gradient_bytes
        found: dict[str, list[float] | float] = {}
        if d > 1:  # the distributed optimizer's reduce-scatter sends half as much as an all-reduce
            owns = self.software.training_state(configuration).owns_parameters
            share = 0.5 if configuration.distributed_optimizer and not owns else 1.0
            counts = stage_parameters(self.model, t, layers)
            found["reduce_grad"] = [share * self._blocks.all_reduce(d, count * size) for count in counts]
        placement = configuration.pipeline_schedule(tied_embeddings=self.model.shares_embedding).rank_of_stage
        if self.model.shares_embedding and placement[0] != placement[-1]:
            rows = embedding_parameters(self.model, t) - self._positions
            found["reduce_embed"] = self._blocks.all_reduce(2, rows * size)
        if configuration.num_gpus > 1:
            found["reduce_norm"] = self._blocks.all_reduce(2, _SMALL)
        return found

    @property
    def _positions(self) -> int:
        return (self.model.num_positions + self.model.num_token_types) * self.model.hidden_size

    def _activations(self, configuration: Configuration) -> Activations:
        return Activations(self.model, self.software.activation_setting(configuration))


def _place(stage: int, num_stages: int) -> StagePosition:
    if num_stages == 1:
        return StagePosition.ONLY
    return (
        StagePosition.FIRST if stage == 0 else StagePosition.LAST if stage == num_stages - 1 else StagePosition.MIDDLE
    )
