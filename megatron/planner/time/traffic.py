"""The bytes that the ranks of a job send each other in an iteration, from the shape of the model.

`placement.traffic` counts in the program how often ranks send. `placement.cost` prices the traffic, given the placement
of the ranks. This module has the bytes of each message, from the formulas that also count memory: a move carries the
activations that a microbatch saves at a stage, and replicas reduce the gradients of a stage's parameters.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from megatron.pipeline.placement.traffic import MessageCounts, Traffic
from megatron.pipeline.program.edges import stages_by_rank
from megatron.pipeline.schedules import PipelineSchedule
from megatron.planner.memory.activations import Activations, ActivationSetting
from megatron.planner.memory.architecture import Architecture
from megatron.planner.memory.encoder_decoder import activations_of
from megatron.planner.memory.parameters import stage_parameters

_TERA = 1e12


@dataclass(frozen=True, kw_only=True)
class CutModel:
    """A model cut into the stages of a schedule.

    Attributes:
        model: the shape of the model.
        setting: how activations are saved.
        schedule: the ranks of the stages, and the number of frozen stages.
        layers: the number of layers of each stage; their mean if the numbers are not known.
    """

    model: Architecture
    setting: ActivationSetting
    schedule: PipelineSchedule
    layers: Sequence[float]

    def traffic(self, counts: MessageCounts, *, gradient_bytes: int = 4, boundary: float | None = None) -> Traffic:
        """Return the traffic of one iteration.

        Args:
            counts: how often the ranks of the pipeline send in a batch.
            gradient_bytes: bytes of an element of a gradient when it is reduced.
            boundary: bytes that a rank sends of an activation between two stages; None: all that the rank holds of it.
        """
        model, setting, ranks = self.model, self.setting, self.schedule.rank_of_stage
        saved, sent = self._saved, self._activations.boundary
        parameters = stage_parameters(model, setting.tensor, self.layers, setting.expert_degrees)
        embedding = gradient_bytes * (model.vocabulary_size // setting.tensor) * model.hidden_size
        return Traffic(
            pipeline=tuple(count * (sent if boundary is None else boundary) for count in counts.activations),
            pair=tuple(
                count * sum(saved[stage] for stage in own) / max(1, len(own))
                for count, own in zip(counts.evictions, self._trained, strict=True)
            ),
            data=tuple(float(gradient_bytes * sum(parameters[stage] for stage in own)) for own in self._trained),
            tensor=tuple(counts.num_microbatches * self._reduced(own) for own in stages_by_rank(ranks)),
            embedding=float(embedding) if self._shares_embedding else 0.0,
            ends=counts.ends,
            pair_of_rank=counts.pair_of_rank,
        )

    @property
    def moved_bytes(self) -> tuple[float, ...]:
        """The bytes of the largest move of each pipeline rank: activations that a microbatch saves at a trained stage.

        0 if all stages of the rank are frozen.
        """
        saved = self._saved
        return tuple(max((saved[stage] for stage in own), default=0.0) for own in self._trained)

    def forward_seconds(self, *, teraflops: float) -> float:
        """Return the seconds of a microbatch's forward through the largest stage, without embedding and output layer.

        `teraflops`: 10^12 operations per second that the GPU sustains.
        """
        operations = self.model.forward_operations(max(self.layers), self.setting.micro_batch_size)
        return operations / self.setting.tensor / (teraflops * _TERA)

    @property
    def _shares_embedding(self) -> bool:
        first, other = (self.schedule.rank_of_stage[each] for each in self.model.tied_stages(len(self.layers)))
        return self.model.shares_embedding and first != other

    @property
    def _saved(self) -> list[float]:
        """Bytes that a microbatch saves at each stage."""
        return self._activations.by_stage(self.layers)[0]

    @property
    def _activations(self) -> Activations:
        return activations_of(self.model, self.setting)

    @property
    def _trained(self) -> list[list[int]]:
        """The trained stages of each rank."""
        stages = stages_by_rank(self.schedule.rank_of_stage)
        return [[stage for stage in own if stage >= self.schedule.num_frozen] for own in stages]

    def _reduced(self, stages: Sequence[int]) -> float:
        """Return the bytes of a microbatch that tensor ranks all-reduce in the given stages.

        A layer reduces two activations in its forward, two in its backward, and two more if the forward is recomputed.
        """
        setting, recompute = self.setting, self.setting.recompute
        if setting.tensor == 1:
            return 0.0
        whole = setting.residual_bytes * self.model.hidden_size * self._activations.tokens
        trained = 6 if recompute.method or recompute.whole_stage else 4
        times = (self.layers[stage] * (2 if stage < self.schedule.num_frozen else trained) for stage in stages)
        return sum(times) * whole
