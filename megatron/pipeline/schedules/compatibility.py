"""The rules for combining the choices of a schedule: tables of refusals, each with a reason and a remedy.

A row has a condition on the schedule `s` and its order `o`, and a sentence with their attributes in braces. The first
row whose condition holds raises its sentence as a ValueError. To refuse another combination, add a row.
"""

from collections.abc import Callable, Iterable

from megatron.pipeline.program.edges import round_robin
from megatron.pipeline.program.weight_policies import Ahead, WeightPolicy
from megatron.pipeline.schedules.order import Order
from megatron.pipeline.schedules.orders import ORDERS
from megatron.pipeline.schedules.pipeline_schedule import PipelineSchedule

Condition = Callable[[PipelineSchedule, Order], object]

FEWEST_ON_DEVICE = 3  # microbatches: the one that is computed, the next one, and one that comes or leaves


_STAGES_ON_A_RANK: tuple[tuple[Condition, str], ...] = (
    (lambda s, o: o.virtual_stages is not None and s.num_virtual_stages not in (1, o.virtual_stages),
     "{s.order} has {o.virtual_stages} stages on each rank, not {s.num_virtual_stages}; make num_virtual_stages "
     "{o.virtual_stages}"),
    (lambda s, o: s.num_virtual_stages > 1 and not o.interleaves,
     "{s.order} has one stage on each rank, not {s.num_virtual_stages}; use order interleaved, or drop "
     "num_virtual_stages"),
    (lambda s, o: s.microbatch_group_size is not None and not o.interleaves,
     "{s.order} takes no groups of microbatches; drop microbatch_group_size"),
    (lambda s, o: s.microbatch_group_size is not None and o.relays,
     "{s.order} takes a whole batch as one group; drop microbatch_group_size"),
    (lambda s, o: s.microbatch_group_size is not None and s.microbatch_group_size < s.num_ranks,
     "microbatch groups of {s.microbatch_group_size} are smaller than the {s.num_ranks} ranks, so a rank would wait "
     "for a tensor that depends on one it has not sent yet; make microbatch_group_size {s.num_ranks} or more"),
)  # fmt: skip

_WEIGHTS: tuple[tuple[Condition, str], ...] = (
    (lambda s, o: o.drains and not s.weights.drains,
     "{s.order} drains in every batch, so the versions of {s.weights.name} would buy nothing; use weights flush, or "
     "order 1f1b"),
    (lambda s, o: o.merges and not s.weights.drains,
     "{s.order} takes one batch at a time, and under {s.name_of_weights} batches follow one another without a "
     "drain; use weights flush, or one stage on each rank"),
    (lambda s, o: o.most_behind is not None and s.weights.delay,
     "{s.order} has stages of a rank at different batches, and {s.name_of_weights} updates them together; use "
     "weights stale"),
    (lambda s, o: o.most_behind is not None and s.weights.drains,
     "{s.order} has stages of a rank at different batches, and under {s.name_of_weights} every batch drains; use "
     "weights stale, or order 1f1b"),
    (lambda s, o: s.weights.refreshes and not (o.follows_edges and o.max_in_flight(0)),
     "weights {s.weights.name} go with stages that are as far ahead as edges lead to the end, and {s.order} has "
     "others in flight; use order async, or 1f1b with one stage on each rank"),
    (lambda s, o: s.weights.ahead is Ahead.PROVISIONAL_STEP and s.data_parallel,
     "a forward under {s.name_of_weights} steps with the gradients that its own replica has so far, so replicas "
     "would compute at different weights; use weights stale, or one replica"),
    (lambda s, o: s.weights.ahead and not s.recompute,
     "under {s.name_of_weights} a forward uses {s.weights.ahead.value} weights, which are gone before its backward; "
     "add recompute, or use weights stale"),
    (lambda s, o: o.merges and s.balance,
     "{s.order} places stages freely, and balance goes with stages dealt out in turn; drop it"),
    (lambda s, o: o.merges and s.swaps,
     "{s.order} places stages freely, and activations on the host go with stages dealt out in turn; keep them on "
     "the device"),
    (lambda s, o: o.merges and s.residency is not None,
     "{s.order} places stages freely, and weights on the host goes with stages dealt out in turn; drop it"),
    (lambda s, o: s.extra_warmup and not o.extends_warmup,
     "{s.order} has no warm-up that could be extended; drop extra_warmup"),
    (lambda s, o: s.weights.updates_alone and o.max_in_flight(0) is None,
     "{s.order} does not say how many microbatches are in flight, and {s.name_of_weights} keeps a weight version "
     "for each; use an order that says it, or weights flush"),
)  # fmt: skip

_FEATURES: tuple[tuple[Condition, str], ...] = (
    (lambda s, o: s.extra_warmup and s.weights.updates_alone,
     "{s.name_of_weights} keeps at most p-s weight versions at stage s; extra_warmup needs more, drop it"),
    (lambda s, o: s.balance and o.max_in_flight(s.num_frozen) is None,
     "{s.order} saves a whole batch at every stage, so there is nothing to balance; drop balance, or use order 1f1b "
     "or interleaved"),
    (lambda s, o: s.balance and not (s.num_frozen or s.rank_of_stage == round_robin(s.num_ranks, s.num_virtual_stages)),
     "balance pairs stage x with stage p-1-x, and stages {s.rank_of_stage} are not dealt out in turn; drop balance, "
     "or rank_of_stage"),
    (lambda s, o: s.balance and s.weights.updates_alone,
     "{s.name_of_weights} may drain after every microbatch, so no eviction can be planned ahead; drop balance, or "
     "use flush or 2bw"),
    (lambda s, o: s.swaps and s.balance,
     "saved activations move to the host or to a pair stage, not both; drop balance, or keep them off the host"),
    (lambda s, o: s.swaps and s.residency is not None,
     "weights live on the host, where inputs wait and not all activations; set the stash of the residency instead"),
    (lambda s, o: s.swaps and s.weights.updates_alone,
     "{s.name_of_weights} may drain after every microbatch, so no copy to the host can be planned ahead; keep "
     "activations on the device, or use flush or 2bw"),
    (lambda s, o: s.swaps and s.num_ranks == 1 < s.num_virtual_stages,
     "a single rank turns to its next stage with every microbatch, before any can leave; give it one stage, or keep "
     "activations on the device"),
    (lambda s, o: s.swaps and s.most_on_device < FEWEST_ON_DEVICE,
     "a rank with {s.most_on_device} microbatches on its device has none to copy while it computes; keep 3 or more"),
    (lambda s, o: s.residency is not None and not s.weights.drains,
     "weights on the host have one version, and {s.name_of_weights} needs more; use weights flush, or leave them on "
     "the device"),
    (lambda s, o: s.residency is not None and s.num_virtual_stages > 1 and not o.relays,
     "{s.order} comes back to a stage within a batch, so its weights would come and go with every group and its "
     "gradients could not leave; use order relay, or leave the weights on the device"),
    (lambda s, o: s.residency is not None and s.balance,
     "balance moves saved activations to a rank that saves few, and with weights on the host ranks save alike; drop "
     "balance"),
    (lambda s, o: s.residency is not None and not s.recompute,
     "what a forward saves refers to weights that are gone before the backward; add recompute, or leave the weights "
     "on the device"),
    (lambda s, o: s.residency is not None and s.norm_decides and s.residency.is_eager,
     "an eager update is made before the norm of all gradients and any overflow are known, and here they decide "
     "about it; use deferred updates, or neither clip by the norm nor scale the loss"),
)  # fmt: skip

_PREDICTIONS: tuple[tuple[Condition, str], ...] = (
    (lambda s, o: not s.weights.predicts and (s.provisional_microbatches is not None or s.reduce_partial),
     "weights {s.weights.name} predict nothing, so nothing is read for it; drop provisional_microbatches and "
     "reduce_partial, or use weights 2bw-provisional"),
    (lambda s, o: s.reduce_partial and s.provisional_microbatches == 0,
     "predictions that read 0 microbatches take the last update again, so replicas have nothing to reduce for them; "
     "drop reduce_partial, or read 1 or more"),
    (lambda s, o: s.num_virtual_stages > 1 and s.weights.predicts,
     "weights {s.weights.name} predict for one stage on each rank, not {s.num_virtual_stages}; use weights 2bw, or "
     "one stage"),
    (lambda s, o: s.tied_stage is not None and not (s.tied_embeddings and 0 < s.tied_stage < s.num_stages),
     "tied_stage {s.tied_stage} is none of the {s.num_stages} stages that could share the first one's embedding; "
     "give one, with tied_embeddings"),
    (lambda s, o: s.residency is not None and s.tied_stage not in (None, s.num_stages - 1),
     "weights on the host are updated where the first and the last stage share an embedding, not stage "
     "{s.tied_stage}; drop tied_stage, or keep weights on the device"),
    (lambda s, o: s.tied_embeddings and s.weights.updates_alone,
     "under {s.name_of_weights} every stage updates at its own time, so the first and the last one cannot share an "
     "embedding; untie the embeddings, or use flush or 2bw"),
)  # fmt: skip

# The next tables share a sentence for all rows. A row has a condition, the refused choice and the reason.


_OPTIMISTIC: tuple[tuple[Condition, str, str], ...] = (
    (lambda s, o: not s.weights.drains, "{s.name_of_weights}", "takes its steps beside later batches already"),
    (lambda s, o: s.residency is not None, "weights on the host", "are stepped without a copy to go back to"),
    (lambda s, o: s.balance, "balance",
     "moves activations, which may be under way when a step is undone"),
    (lambda s, o: s.swaps, "a bound on activations on the device",
     "copies activations, which may be under way when a step is undone"),
    (lambda s, o: s.num_frozen, "a frozen prefix", "lets ranks run ahead of the steps of other ranks"),
    (lambda s, o: not o.graph.is_chain, "a graph of stages", "keeps shared values over the border of two batches"),
)  # fmt: skip

_HALVES: tuple[tuple[Condition, str, str], ...] = (
    (lambda s, o: s.balance, "balance", "moves activations whole, and an I keeps a part of them for its W"),
    (lambda s, o: s.swaps, "a bound on activations on the device",
     "needs backwards that free all of their activations"),
    (lambda s, o: s.weights.updates_alone, "{s.name_of_weights}",
     "steps each stage right after a microbatch's backward"),
    (lambda s, o: s.weights.predicts, "{s.name_of_weights}",
     "reads gradients to which a later W still adds"),
    (lambda s, o: s.residency is not None, "weights on the host",
     "leave the device with their gradients, to which a later W still adds"),
    (lambda s, o: s.num_frozen, "a frozen prefix", "needs backwards that are not split"),
)  # fmt: skip

_FROZEN: tuple[tuple[Condition, str, str], ...] = (
    (lambda s, o: o.interleaves and not o.relays, "{s.order}", "has several trained stages on each rank"),
    (lambda s, o: s.weights.updates_alone, "{s.name_of_weights}",
     "is for trained stages, each of which steps by itself"),
    (lambda s, o: s.weights.predicts, "weights {s.weights.name}", "predict only for trained stages"),
    (lambda s, o: s.microbatch_group_size is not None, "microbatch_group_size",
     "is for several trained stages on a rank"),
    (lambda s, o: s.residency is not None and not o.relays, "weights on the host",
     "come and go with updates, which a frozen stage has only in a relay"),
    (lambda s, o: s.swaps, "a bound on activations on the device", "is for ranks whose stages are all trained"),
    (lambda s, o: s.tied_embeddings, "tied embeddings", "would freeze the head with the input"),
    (lambda s, o: s.edges and not _is_frozen_chain(s), "a graph of stages",
     "states for each edge whether gradients travel over it"),
)  # fmt: skip

_EDGES: tuple[tuple[Condition, str, str], ...] = (
    (lambda s, o: not o.follows_edges, "{s.order}", "passes each stage's output to the next one"),
    (lambda s, o: not s.weights.drains and not s.weights.refreshes, "{s.name_of_weights}",
     "depends on how far ahead each stage of a chain is"),
    (lambda s, o: s.balance, "balance", "pairs the stages of a chain"),
    (lambda s, o: s.swaps, "a bound on activations on the device", "is for the stages of a chain"),
    (lambda s, o: s.residency is not None, "weights on the host", "come and go in the order of a chain"),
    (lambda s, o: s.tied_embeddings, "tied embeddings", "are shared by the first and the last stage of a chain"),
)  # fmt: skip


class TooManyRead(ValueError):
    """Predictions cannot read as many microbatches of a batch as a schedule wants.

    Attributes:
        wanted: the wanted number of microbatches.
        reason: why predictions cannot read so many, and the remedy.
    """

    def __init__(self, wanted: int, reason: str) -> None:
        super().__init__(f"provisional_microbatches {wanted}: {reason}")
        self.wanted, self.reason = wanted, reason

    def under(self, name: str) -> ValueError:
        """Return an error with the same reason that calls the choice `name`, such as the name of a flag."""
        return ValueError(f"{name} {self.wanted}: {self.reason}")


def validate_choices(schedule: PipelineSchedule, order: Order) -> None:
    """Raise ValueError if the choices of a schedule and its order do not go together."""
    _refuse(_STAGES_ON_A_RANK, schedule, order)
    order.validate_placement()
    without = next(filter(order.graph.is_forward_only, range(schedule.num_stages)), None)
    if without is not None and not schedule.num_frozen:
        raise ValueError(
            f"stage {without} hands on tensors and gets no gradient, so it has no backward; move its computation to "
            "the stage that uses it"
        )
    if not (order.graph.is_chain or schedule.num_frozen):
        edges = " ".join(map(str, order.graph.edges))
        sentence = (
            "{what} {why}, and these stages have other edges (" + edges + "); use gpipe, flush or ftpipe, without it"
        )
        _refuse(_with_sentence(_EDGES, sentence), schedule, order)
    _refuse(_WEIGHTS, schedule, order)
    require_known_norm(schedule.weights, schedule.name_of_weights, norm_decides=schedule.norm_decides)
    _refuse(_FEATURES, schedule, order)
    if any(applies(schedule, order) for applies, *_ in _HALVES) and order.splits_backward:
        sentence = "{s.order} computes backwards in halves, I and W, and {what} {why}; drop it, or use order 1f1b"
        _refuse(_with_sentence(_HALVES, sentence), schedule, order)
    _refuse(_PREDICTIONS, schedule, order)
    if schedule.optimistic:
        sentence = "optimistic steps are validated in the next batch, and {what} {why}; drop one of them"
        _refuse(_with_sentence(_OPTIMISTIC, sentence), schedule, order)


def validate_frozen(schedule: PipelineSchedule) -> None:
    """Raise ValueError if the choices of a schedule do not go with its frozen stages."""
    if not 0 < schedule.num_frozen < schedule.num_stages:
        raise ValueError(
            f"{schedule.num_frozen} of {schedule.num_stages} stages cannot be frozen: one has to be trained; give 0 to "
            f"{schedule.num_stages - 1}"
        )
    sentence = "{what} {why}, and the first {s.num_frozen} stages are frozen; freeze none, or drop it"
    _refuse(_with_sentence(_FROZEN, sentence), schedule, ORDERS[schedule.order])


def validate_batch(schedule: PipelineSchedule, order: Order, num_microbatches: int) -> None:
    """Raise ValueError if a schedule with this order cannot run a batch of this size."""
    if num_microbatches < 1:
        raise ValueError(f"a batch cannot have {num_microbatches} microbatches; give 1 and more")
    weights = schedule.weights
    if weights.batch_size not in (None, num_microbatches):
        raise ValueError(
            f"{schedule.name_of_weights} updates after every microbatch, so a batch is one microbatch, not "
            f"{num_microbatches}; give each batch one (in training: global batch size = micro batch size x data "
            "parallel size)"
        )
    in_flight = order.max_in_flight(schedule.num_frozen)
    # Moves are planned within a segment, so a single batch has to have as many microbatches as are in flight.
    batches = 1 if schedule.moves_activations else weights.delay or 1
    if in_flight is not None and weights.overlaps_updates and num_microbatches < (fewest := -(-in_flight // batches)):
        warmup = " and extra warm-up" if schedule.extra_warmup else ""
        together = "" if batches == 1 else f" in {batches} batches together"
        raise ValueError(
            f"{weights.name} with {schedule.num_stages} stages{warmup} needs batches of at least {fewest} "
            f"microbatches, as many as are in flight{together}, not {num_microbatches}: a batch would "
            "begin before its weights are made; use larger batches, fewer stages, or flush"
        )
    order.validate(num_microbatches)
    if weights.predicts:
        _validate_predictions(schedule, num_microbatches)


def require_known_norm(weights: WeightPolicy, name: str, *, norm_decides: bool) -> None:
    """Raise ValueError if each stage steps alone, although its step depends on the norm of all gradients."""
    if weights.updates_alone and norm_decides:
        raise ValueError(
            f"under {name} every stage steps before the norm of all gradients and any overflow are known, and here "
            "they decide about it; use flush or 2bw, or neither clip by the norm nor scale the loss"
        )


# --- parts


def _refuse(rows: Iterable[tuple[Condition, str]], schedule: PipelineSchedule, order: Order) -> None:
    for applies, sentence in rows:
        if applies(schedule, order):
            raise ValueError(sentence.format(s=schedule, o=order))


def _with_sentence(rows: Iterable[tuple[Condition, str, str]], sentence: str) -> Iterable[tuple[Condition, str]]:
    """Return rows with complete sentences: each row's parts replace `{what}` and `{why}`."""
    return ((applies, sentence.replace("{what}", what).replace("{why}", why)) for applies, what, why in rows)


def _validate_predictions(schedule: PipelineSchedule, num_microbatches: int) -> None:
    """Raise TooManyRead if too few backwards of a batch of this size are done when the next batch begins."""
    done = num_microbatches - max(schedule.remaining_backwards(num_microbatches))
    assert done >= 1, "no more are in flight than a batch has, and the first forward of the next is one of them"
    wanted = schedule.provisional_microbatches
    if wanted is not None and not 0 <= wanted <= done:
        raise TooManyRead(
            wanted,
            f"with batches of {num_microbatches} the first stage has done {done} when the next batch begins; give 0 to "
            f"{done}, or larger batches",
        )


def _is_frozen_chain(schedule: PipelineSchedule) -> bool:
    """Whether the edges are those of a chain whose first `num_frozen` stages are frozen."""
    return [(edge.source, edge.target, edge.gradient) for edge in schedule.edges] == [
        (stage, stage + 1, stage >= schedule.num_frozen) for stage in range(schedule.num_stages - 1)
    ]
