"""What is to be expected of one configuration, in clauses: the interval of its time, and days and money."""

from collections import Counter
from collections.abc import Sequence

from megatron.planner.intervals import LEVEL, Interval, NotValidated
from megatron.planner.search.bill import Bill, money
from megatron.planner.search.outcome import Kept

_MOST_REASONS = 4


def expectation(each: Kept) -> tuple[str, ...]:
    """Nothing of what nobody asked for."""
    found = []
    if isinstance(each.accuracy, NotValidated):
        found.append(f"its time is not validated: {each.accuracy.reason}")
    if isinstance(each.accuracy, Interval):
        low, high = each.accuracy.seconds(each.estimate.seconds)
        found.append(
            f"with {LEVEL:.0%} it takes {low:.3g} to {high:.3g} s, as {each.accuracy.num_runs} published runs did "
            f"({each.accuracy.group})"
        )
    if each.bill is not None:
        found += filter(None, (_training(each, each.bill), _million(each.bill)))
    return tuple(found)


def _training(each: Kept, bill: Bill) -> str | None:
    if bill.days is None:
        return None
    days = f"all tokens take {bill.num_iterations:,} iterations, {bill.days:.3g} days"
    if isinstance(each.accuracy, Interval):
        low, high = each.accuracy.seconds(bill.days)
        days += f" ({low:.3g} to {high:.3g})"
    price = f"{bill.gpu_hours:,.0f} GPU hours"
    return f"{days}, {price}" + ("" if bill.cost is None else f", {money(bill.cost, bill.currency)}")


def _million(bill: Bill) -> str | None:
    if bill.cost_per_million_tokens is None:
        return None
    return f"a million tokens cost {money(bill.cost_per_million_tokens, bill.currency)}"


def unvalidated(kept: Sequence[Kept]) -> tuple[str, ...]:
    """Why configurations have no interval, and how many of them: a sentence, or none."""
    reasons = Counter(each.accuracy.reason for each in kept if isinstance(each.accuracy, NotValidated))
    if not reasons:
        return ()
    parts = ", ".join(f"{reason} ({count})" for reason, count in reasons.most_common(_MOST_REASONS))
    others = reasons.total() - sum(count for _, count in reasons.most_common(_MOST_REASONS))
    rest = f", and others ({others})" if others else ""
    return (f"{reasons.total()} of {len(kept)} times are not validated: {parts}{rest}; docs/planner.md says what is",)
