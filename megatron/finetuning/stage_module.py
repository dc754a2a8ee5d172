"""A captured stage as the runtime calls it, and what is to be known of an evaluation."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor, nn

from megatron.capture.stage import CapturedStage, StageData

Summary = Callable[[str, Tensor, Mapping[str, Tensor]], Tensor]
"""(name of what was kept, it, the microbatch) -> what metrics need of it."""


class Results:
    """What the stages of this rank found in an evaluation: the losses, and summaries of what was kept, in the order of
    the microbatches.
    """

    def __init__(self, summary: Summary) -> None:
        self._summary = summary
        self.losses: list[Tensor] = []
        self.kept: dict[str, list[Tensor]] = {}

    def note(self, data: StageData, loss: Tensor | None, kept: Mapping[str, Tensor]) -> None:
        if loss is not None:
            self.losses.append(loss.detach())
        for name, tensor in kept.items():
            self.kept.setdefault(name, []).append(self._summary(name, tensor, data.tensors).cpu())

    def take(self) -> tuple[list[float], dict[str, list[Tensor]]]:
        """All of it, and forget it."""
        losses, kept = [loss.item() for loss in self.losses], self.kept
        self.losses, self.kept = [], {}
        return losses, kept


class StageModule(nn.Module):
    """`stage` with the signature of `GraphModuleStage`'s modules. Its loss counts with the microbatch's weight."""

    def __init__(self, stage: CapturedStage, results: Results) -> None:
        super().__init__()
        self.stage = stage
        self._results = results

    def forward(
        self, data: StageData, inputs: Mapping[int, tuple[Tensor, ...]]
    ) -> tuple[dict[int, tuple[Tensor, ...]], Tensor | None]:
        outputs, loss, kept = self.stage.run(data, inputs)
        if not self.training:
            self._results.note(data, loss, kept)
        return outputs, None if loss is None else loss * data.weight

    def parameters_by_name(self) -> dict[str, nn.Parameter]:
        """Those that are trained, by their names in the model."""
        return {name: each for name, each in self.stage.named_parameters() if each.requires_grad}
