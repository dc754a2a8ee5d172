"""Stages that are copies of a stage of the model: what the runtime can do with them.

In a program of all replicas each microbatch goes through one copy of each stage of the model. Stages do not know that
they are copies: they name each other by the stages of the model, and `exchange` finds the copy that has a microbatch.
Copies share the microbatches of a batch. So their gradients are parts of one mean, and updates sum them.
"""

from megatron.pipeline.schedules import PipelineSchedule


def require_copyable(schedule: PipelineSchedule) -> None:
    """Raise ValueError unless stages that are copies can have the weights and the moves of the schedule."""
    weights = schedule.weights
    if weights.updates_alone or weights.predicts:
        reads = "predict from gradients of a part of a batch" if weights.predicts else "let each stage step by itself"
        raise ValueError(
            f"weights {weights.name} {reads}, and copies of a stage share a batch and step together; run copies under "
            "flush or 2bw"
        )
    moved = "its weights to the host" if schedule.residency is not None else "saved activations"
    if schedule.residency is not None or schedule.balance or schedule.swaps:
        raise ValueError(f"the schedule has copies of stages and moves {moved}; run copies without moves")
