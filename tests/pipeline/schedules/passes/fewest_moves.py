"""The least number of evictions that keep a rank within a bound, found in two ways that know nothing of the pass.

`fewest_evictions` tries all ways to evict and load, so it is certain and slow. `fewest_windows` is quick enough for
32 stages: a microbatch relieves its rank at most from two computations after its forward (its eviction has the time of
the one between) up to where its load has to be posted. To keep the bound is to choose, of these windows, as few as
cover each computation as often as it exceeds the bound; taking the one that ends last, where one is lacking, chooses
the fewest. Timing and counting are the program's in both: an eviction has the time of one computation, a load is there
one computation later, or at once after a backward; what is under way counts at both ends.
"""

from collections.abc import Hashable, Iterator, Sequence
from itertools import chain, combinations

from megatron.pipeline.schedules.passes import Segments

Word = tuple[str, Hashable]  # "F", "B" or "|", a border, and what is saved: a microbatch, or a stage and a microbatch


def fewest_evictions(
    row: Sequence[Word], bound: int, away_at_border: dict[int, frozenset[int]], *, at_most: int
) -> int:
    """The least number of evictions that any choice of moves gets by with, by trying all that take `at_most` so many.

    Before each computation any set may be evicted and any set loaded.
    """
    states = {(frozenset(), frozenset()): 0}  # (held, away) -> evictions
    for place, (kind, microbatch) in enumerate(row):
        successors: dict[tuple[frozenset[int], frozenset[int]], int] = {}
        after_backward = place > 0 and row[place - 1][0] == "B"
        for (held, away), cost in states.items():
            for evicted in subsets(held - ({microbatch} if kind == "B" else set()) if kind != "|" else ()):
                if cost + len(evicted) > at_most:
                    continue
                for loaded in subsets(away):
                    is_there = kind != "B" or microbatch in held or (after_backward and microbatch in loaded)
                    most = max(len(held), len(held) - len(evicted) + len(loaded)) + (kind == "F")
                    if not is_there or most > bound:
                        continue
                    left = (held - evicted) | loaded
                    left = left | {microbatch} if kind == "F" else left - {microbatch} if kind == "B" else left
                    state = frozenset(left), (away - loaded) | evicted
                    if kind == "|" and state[1] != away_at_border[microbatch]:
                        continue
                    total = cost + len(evicted)
                    successors[state] = min(total, successors.get(state, total))
        states = successors
    return states[frozenset(), frozenset()]


def subsets(items: Sequence[int] | frozenset[int]) -> Iterator[frozenset[int]]:
    items = sorted(items)
    return map(frozenset, chain.from_iterable(combinations(items, count) for count in range(len(items) + 1)))


def words(all_segments: Segments) -> list[Word]:
    """The computations of segments, with a border between them."""
    result: list[Word] = []
    for index, segment in enumerate(all_segments):
        result += [("|", index)] if index else []
        result += [(each.kind.value, each.microbatch) for each in segment]
    return result


def fewest_windows(row: Sequence[Word], bound: int) -> int:
    """The least number of evictions for a row without borders."""
    windows: dict[Hashable, tuple[int, int]] = {}
    for place, (kind, saved) in enumerate(row):
        if kind == "F":
            windows[saved] = place + 2, place
        else:
            windows[saved] = windows[saved][0], place - 1 if row[place - 1][0] == "B" else place - 2
    unused, chosen, num_chosen, num_saved = list(windows.values()), [], 0, 0
    for place, (kind, _) in enumerate(row):
        num_saved += kind == "F"
        while num_saved > bound and num_saved - sum(first <= place <= last for first, last in chosen) > bound:
            best = max((each for each in unused if each[0] <= place <= each[1]), key=lambda window: window[1])
            unused.remove(best)
            chosen = [each for each in chosen if each[1] >= place] + [best]
            num_chosen += 1
        num_saved -= kind == "B"
    return num_chosen
