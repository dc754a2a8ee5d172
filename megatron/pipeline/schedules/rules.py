"""Which choices of a schedule go together: refusals, each with the reason and the remedy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron.pipeline.program.weight_policies import WeightPolicy
from megatron.pipeline.schedules.order import Order
from megatron.pipeline.schedules.orders import ORDERS
from megatron.pipeline.schedules.placements import round_robin
from megatron.pipeline.schedules.split import splits_backward

if TYPE_CHECKING:
    from megatron.pipeline.schedules.schedule import Schedule


def validate_choices(schedule: Schedule, order: Order) -> None:
    """Raises ValueError where the choices of a schedule of this order do not go together."""
    _validate_virtual_stages(schedule, order)
    order.validate_placement()
    without = next(filter(order.graph.is_forward_only, range(schedule.num_stages)), None)
    if without is not None and not schedule.num_frozen:
        raise ValueError(
            f"stage {without} hands on tensors and gets no gradient, so it has no backward; compute it where it is "
            "needed"
        )
    if not (order.graph.is_chain or schedule.num_frozen):
        _validate_edges(schedule, order)
    if order.drains and not schedule.weights.drains:
        raise ValueError(
            f"{schedule.order} drains in every batch, so the versions of {schedule.weights.name} would buy nothing; "
            "use weights flush, or order 1f1b"
        )
    if order.merges and not schedule.weights.drains:
        raise ValueError(
            f"{schedule.order} takes one batch at a time, and under {schedule.name_of_weights} batches follow one "
            "another without a drain; use weights flush, or one stage on each rank"
        )
    if order.most_behind is not None and schedule.weights.delay:
        raise ValueError(
            f"{schedule.order} has stages of a rank at different batches, and {schedule.name_of_weights} updates them "
            "together; use weights stale"
        )
    if order.most_behind is not None and schedule.weights.drains:
        raise ValueError(
            f"{schedule.order} has stages of a rank at different batches, and under {schedule.name_of_weights} every "
            "batch drains; use weights stale, or order 1f1b"
        )
    if schedule.weights.refreshes and not (order.follows_edges and order.max_in_flight(0)):
        raise ValueError(
            f"weights {schedule.weights.name} go with stages that are as far ahead as edges lead to the end, and "
            f"{schedule.order} has others in flight; use order async, or 1f1b with one stage on each rank"
        )
    if schedule.weights.refreshes and schedule.data_parallel:
        raise ValueError(
            "replicas would reduce the gradients of each stage behind every batch, and weights "
            f"{schedule.weights.name} step at once; use flush, or one replica"
        )
    if schedule.weights.looks_ahead and not schedule.recompute:
        raise ValueError(
            f"under {schedule.name_of_weights} a forward uses {schedule.weights.ahead.value} weights, which are gone "
            "before its backward; "
            "add recompute, or use weights stale"
        )
    if order.merges and (schedule.balance or schedule.residency is not None):
        what = "balance" if schedule.balance else "weights on the host"
        raise ValueError(
            f"{schedule.order} places stages freely, and {what} goes with stages dealt out in turn; drop it"
        )
    if schedule.extra_warmup and not order.extends_warmup:
        raise ValueError(f"{schedule.order} has no warm-up that could be extended; drop extra_warmup")
    if schedule.weights.updates_alone and order.max_in_flight(0) is None:
        raise ValueError(
            f"{schedule.order} does not say how many microbatches are in flight, and {schedule.name_of_weights} keeps "
            "a weight version for each; use an order that says it, or weights flush"
        )
    require_known_norm(schedule.weights, schedule.name_of_weights, norm_decides=schedule.norm_decides)
    if schedule.weights.updates_alone and schedule.extra_warmup:
        raise ValueError(
            f"{schedule.name_of_weights} keeps at most p-s weight versions at stage s; extra_warmup needs more, drop it"
        )
    if schedule.balance and order.max_in_flight(schedule.num_frozen) is None:
        raise ValueError(
            f"{schedule.order} saves a whole batch at every stage, so there is nothing to balance; drop balance, or "
            "use order 1f1b or interleaved"
        )
    if schedule.balance and not (schedule.num_frozen or schedule.rank_of_stage == _in_turn(schedule)):
        raise ValueError(
            f"balance pairs stage x with stage p-1-x, and stages {schedule.rank_of_stage} are not dealt out in turn; "
            "drop balance, or rank_of_stage"
        )
    if schedule.balance and schedule.weights.updates_alone:
        raise ValueError(
            f"{schedule.name_of_weights} may drain after every microbatch, so no eviction can be planned ahead; drop "
            "balance, or use flush or 2bw"
        )
    if schedule.residency is not None:
        _validate_residency(schedule, order)
    _validate_halves(schedule, order)
    if not schedule.weights.predicts and (schedule.provisional_microbatches is not None or schedule.reduce_partial):
        raise ValueError(
            f"weights {schedule.weights.name} predict nothing, so nothing is read for it; drop "
            "provisional_microbatches and reduce_partial, or use weights 2bw-provisional"
        )
    if schedule.weights.predicts and schedule.num_virtual_stages > 1:
        raise ValueError(
            f"weights {schedule.weights.name} predict for one stage on each rank, not {schedule.num_virtual_stages}; "
            "use weights 2bw, or one stage"
        )
    if schedule.weights.updates_alone and schedule.tied_embeddings:
        raise ValueError(
            f"under {schedule.name_of_weights} every stage updates at its own time, so the first and the last one "
            "cannot share an embedding; untie the embeddings, or use flush or 2bw"
        )


def _is_frozen_chain(schedule: Schedule) -> bool:
    """Whether the edges are those that a frozen prefix gives a chain."""
    return [(edge.source, edge.target, edge.gradient) for edge in schedule.edges] == [
        (stage, stage + 1, stage >= schedule.num_frozen) for stage in range(schedule.num_stages - 1)
    ]


def validate_frozen(schedule: Schedule) -> None:
    """Raises ValueError where a schedule's choices do not go with a frozen prefix."""
    if not 0 < schedule.num_frozen < schedule.num_stages:
        raise ValueError(
            f"{schedule.num_frozen} of {schedule.num_stages} stages cannot be frozen: one has to be trained; give 0 to "
            f"{schedule.num_stages - 1}"
        )
    order, weights = ORDERS[schedule.order], schedule.weights
    for is_asked, what, why in (
        (order.interleaves, schedule.order, "has several trained stages on each rank"),
        (weights.updates_alone, schedule.name_of_weights, "keeps versions for stages of which each steps by itself"),
        (weights.predicts, f"weights {weights.name}", "predict for stages that are trained"),
        (
            schedule.microbatch_group_size is not None,
            "microbatch_group_size",
            "is for several trained stages on a rank",
        ),
        (schedule.residency is not None, "weights on the host", "come and go for updates that a frozen stage has not"),
        (schedule.tied_embeddings, "tied embeddings", "would freeze the head with the input"),
        (
            bool(schedule.edges) and not _is_frozen_chain(schedule),
            "a graph of stages",
            "says itself which of them get gradients",
        ),
    ):
        if is_asked:
            raise ValueError(f"{what} {why}, and the first {schedule.num_frozen} are frozen; freeze none, or drop it")


def _validate_edges(schedule: Schedule, order: Order) -> None:
    for is_asked, what, why in (
        (not order.follows_edges, schedule.order, "passes each stage's output to the next one"),
        (
            not schedule.weights.drains and not schedule.weights.refreshes,
            schedule.name_of_weights,
            "counts how far ahead a stage of a chain is",
        ),
        (schedule.balance, "balance", "pairs the stages of a chain"),
        (schedule.residency is not None, "weights on the host", "come and go by the order of a chain"),
        (schedule.tied_embeddings, "tied embeddings", "are the first and the last stage's of a chain"),
    ):
        if is_asked:
            raise ValueError(
                f"{what} {why}, and these stages have other edges ({' '.join(map(str, order.graph.edges))}); use "
                "gpipe, flush or ftpipe, without it"
            )


class TooManyRead(ValueError):
    """Predictions shall read `wanted` microbatches of a batch; `reason` says why they cannot, and what can be done.

    Whoever has another name for the choice tells the reason under that.
    """

    def __init__(self, wanted: int, reason: str) -> None:
        super().__init__(f"provisional_microbatches {wanted}: {reason}")
        self.wanted, self.reason = wanted, reason

    def under(self, name: str) -> ValueError:
        """The same where the choice is called so."""
        return ValueError(f"{name} {self.wanted}: {self.reason}")


def validate_predictions(schedule: Schedule, num_microbatches: int) -> None:
    """Raises TooManyRead where a batch of this size has not enough backwards done for the prediction of the next."""
    done = num_microbatches - max(schedule.unread(num_microbatches))
    assert done >= 1, "no more are in flight than a batch has, and the first forward of the next is one of them"
    wanted = schedule.provisional_microbatches
    if wanted is not None and not 1 <= wanted <= done:
        raise TooManyRead(
            wanted,
            f"with batches of {num_microbatches} the first stage has done {done} when the next batch begins; give 1 to "
            f"{done}, or larger batches",
        )


def _validate_residency(schedule: Schedule, order: Order) -> None:
    if not schedule.weights.drains:
        raise ValueError(
            f"weights on the host have one version, and {schedule.name_of_weights} needs more; use weights flush, or "
            "leave them on the device"
        )
    if schedule.num_virtual_stages > 1 and not order.relays:
        raise ValueError(
            f"{schedule.order} comes back to a stage within a batch, so its weights would come and go with every "
            "group and its gradients could not leave; use order relay, or leave the weights on the device"
        )
    if schedule.balance:
        raise ValueError(
            "balance moves saved activations to a rank that saves few, and with weights on the host ranks save alike; "
            "drop balance"
        )
    if not schedule.recompute:
        raise ValueError(
            "what a forward saves refers to weights that are gone before the backward; add recompute, or leave the "
            "weights on the device"
        )
    if schedule.norm_decides and schedule.residency.is_eager:
        raise ValueError(
            "an eager update is made before the norm of all gradients and any overflow are known, and here they decide "
            "about it; use deferred updates, or neither clip by the norm nor scale the loss"
        )


def _validate_halves(schedule: Schedule, order: Order) -> None:
    """What does not go with backwards in halves; an order is asked for its rows only where it matters."""
    weights = schedule.name_of_weights
    for is_asked, what, why in (
        (schedule.balance, "balance", "moves what a whole backward needs, of which an I leaves another part"),
        (schedule.weights.updates_alone, weights, "steps at each stage right behind a microbatch's backward"),
        (schedule.weights.predicts, weights, "reads gradients before a W that is late has added to them"),
        (schedule.residency is not None, "weights on the host", "leave with their gradients, before a W that is late"),
        (bool(schedule.num_frozen), "a frozen prefix", "is for backwards that are computed whole"),
    ):
        if is_asked and splits_backward(order):
            raise ValueError(
                f"{schedule.order} computes backwards in halves, I and W, and {what} {why}; drop it, or use order 1f1b"
            )


def require_known_norm(weights: WeightPolicy, name: str, *, norm_decides: bool) -> None:
    """Raises ValueError where stages step before the norm of all gradients is known that decides about it."""
    if weights.updates_alone and norm_decides:
        raise ValueError(
            f"under {name} every stage steps before the norm of all gradients and any overflow are known, and here "
            "they decide about it; use flush or 2bw, or neither clip by the norm nor scale the loss"
        )


def _in_turn(schedule: Schedule) -> tuple[int, ...]:
    return round_robin(schedule.num_ranks, schedule.num_virtual_stages)


def _validate_virtual_stages(schedule: Schedule, order: Order) -> None:
    interleaves, group = order.interleaves, schedule.microbatch_group_size
    if order.virtual_stages is not None and schedule.num_virtual_stages not in (1, order.virtual_stages):
        raise ValueError(
            f"{schedule.order} has {order.virtual_stages} stages on each rank, not {schedule.num_virtual_stages}; make "
            f"num_virtual_stages {order.virtual_stages}"
        )
    if schedule.num_virtual_stages > 1 and not interleaves:
        raise ValueError(
            f"{schedule.order} has one stage on each rank, not {schedule.num_virtual_stages}; use order interleaved, "
            "or drop num_virtual_stages"
        )
    if group is not None and not interleaves:
        raise ValueError(f"{schedule.order} takes no groups of microbatches; drop microbatch_group_size")
    if group is not None and order.relays:
        raise ValueError(f"{schedule.order} takes a whole batch as one group; drop microbatch_group_size")
    if group is not None and group < schedule.num_ranks:
        raise ValueError(
            f"microbatch groups of {group} are smaller than the {schedule.num_ranks} ranks, so a rank would wait for "
            f"what it has not yet sent; make microbatch_group_size {schedule.num_ranks} or more"
        )
