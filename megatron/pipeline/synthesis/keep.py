"""The choice of the microbatches that a recomputed stage keeps, and the search for a program with such a choice.

For given words the choice is made rank by rank, from the beginning on: everything is kept until the limit is reached.
Then the rank recomputes the microbatch that frees the most memory times time for each second of its recompute. The
search goes on with the words that are fastest with their choice, and chooses again for each result.

Where activations may move, too, some of these microbatches are kept and moved (`keep_and_move.py`). Programs that only
recompute and programs that only move are also searched, with the same rounds and seeds, and the fastest program counts.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import product

from megatron.pipeline.program.extent import Kept
from megatron.pipeline.program.instruction import Kind
from megatron.pipeline.synthesis.bound import bound_of_any_recompute
from megatron.pipeline.synthesis.keep_and_move import keeping_all, of_both_kinds
from megatron.pipeline.synthesis.moved_rows import Mover
from megatron.pipeline.synthesis.moves import ways_of
from megatron.pipeline.synthesis.moves_bound import bound_of_any_choice
from megatron.pipeline.synthesis.orders_bound import tightened
from megatron.pipeline.synthesis.problem import ROUNDING, Problem, Words
from megatron.pipeline.synthesis.search import KNOWN, Synthesis, synthesize
from megatron.pipeline.synthesis.seeds import named_words
from megatron.pipeline.synthesis.timing import Clock

_CHOICES = 2  # the number of choices that are searched further
_TURNS = 2  # how often words are searched, each time with a new choice for the words found before
_MOVED = 0.25, 0.5, 0.75, 1.0  # the parts of the microbatches without room that are to move
_AHEAD = 2, 8  # how many computations before they are needed such microbatches are back


def kept_microbatches(problem: Problem, words: Words, *, moved: float = 0.0, ahead: int = 0) -> tuple[Kept, ...] | None:
    """Return the microbatches of recomputed stages that ranks keep if they compute words; None if they do not fit.

    Args:
        problem: the problem, whose own `kept` is ignored.
        words: words in which all computations of a microbatch are in order.
        moved: the fraction of the microbatches without room that are kept, and moved away until they are needed.
        ahead: how many computations before it is needed such a microbatch is back.
    """
    kept = [_kept_on_rank(problem, rank, word, moved, ahead) for rank, word in enumerate(words)]
    return None if None in kept else tuple(sorted(each for of_rank in kept for each in of_rank))


def _kept_on_rank(problem: Problem, rank: int, word: Sequence[int], moved: float, ahead: int) -> set[Kept] | None:
    recompute = {stage: problem.number_of[Kind.RECOMPUTE, stage]
                 for stage in problem.recomputed if problem.rank_of_stage[stage] == rank}  # fmt: skip
    costs = problem.costs.seconds(problem.num_stages)[Kind.RECOMPUTE]
    numbers, place_of_recompute = _numbers(problem, word), {}
    for place, (queue, number) in enumerate(zip(word, numbers, strict=True)):
        kind, stage = problem.queues[queue]
        if kind is Kind.RECOMPUTE:
            place_of_recompute[Kept(stage, number)] = place
    limit, held = problem.limit_of(rank) * (1 + ROUNDING), 0.0
    kept: set[Kept] = set()
    in_flight: set[Kept] = set()  # kept so far, and not yet at its R
    due, comes_back = 0.0, dict.fromkeys(range(len(word)), 0.0)
    for place, (queue, number) in enumerate(zip(word, numbers, strict=True)):
        kind, stage = problem.queues[queue]
        item, is_choice = Kept(stage, number), stage in recompute
        held += comes_back[place]
        if kind is Kind.FORWARD:
            held += problem.saved_sizes[stage]
            if is_choice:
                kept.add(item)
                in_flight.add(item)
        elif kind is Kind.RECOMPUTE:
            in_flight.discard(item)
            held += 0.0 if item in kept else problem.saved_sizes[stage] - problem.input_sizes[stage]
        while held > limit:
            if not in_flight:
                return None

            def freed(each: Kept, place: int = place) -> float:
                size = problem.saved_sizes[each.stage] - problem.input_sizes[each.stage]
                return size * (place_of_recompute[each] - place) / (costs[each.stage] or ROUNDING)

            out = max(in_flight, key=lambda each: (freed(each), each))
            in_flight.remove(out)
            due, back = due + moved, place_of_recompute[out] - ahead
            if due >= 1 and back > place + 2:
                due, comes_back[back] = due - 1, comes_back[back] + problem.saved_sizes[out.stage]
                held -= problem.saved_sizes[out.stage]
                continue
            kept.remove(out)
            held -= problem.saved_sizes[out.stage] - problem.input_sizes[out.stage]
        held -= problem.gives[queue]
    return kept


def _numbers(problem: Problem, word: Sequence[int]) -> list[int]:
    """The microbatch of each computation of a word."""
    counts, numbers = [0] * len(problem.queues), []
    for queue in word:
        numbers.append(counts[queue])
        counts[queue] += 1
    return numbers


def synthesize_keeping(
    problem: Problem,
    *,
    moves: str = "none",
    seconds: float = 30.0,
    rounds: int | None = None,
    seed: int = 0,
    processes: int = 1,
    known: Sequence[Words] = (),
    done: Callable[[float], None] = lambda _: None,
    tightens: bool = True,
) -> Synthesis:
    """Search for the fastest program in which any microbatches of `problem.recomputed` are recomputed.

    The bound of the result holds for every such choice, and with `moves` for every choice of moves, too. Arguments are
    those of `synthesize`.
    """
    ways, effort = ways_of(moves, problem), {"rounds": rounds, "seed": seed, "processes": processes}
    search = partial(synthesize, tightens=False, **effort)
    if not ways:
        found = _recomputing(problem, search, seconds, known, done)
        if not tightens:
            return found
        bound, bound_from = tightened(problem, found.bound, found.bound_from, found.seconds)
        return replace(found, bound=bound, bound_from=bound_from)
    bound, bound_from = bound_of_any_choice(problem, ways)
    parts = 2 + len(ways)
    share = seconds / parts
    found = [_recomputing(problem, search, share, known, lambda part: done(part / parts))]
    if (plain := _recomputing_nothing(problem)) is not None:
        moving = search(plain, moves=moves, seconds=share, done=lambda part: done((1 + part) / parts))
        found.append(keeping_all(problem, moving))
    all_recomputed = replace(problem, kept=())
    words = [*named_words(all_recomputed)]
    words += [(KNOWN, each) for each in known] + [(each.begun_with, each.words) for each in found]
    for number, way in enumerate(ways, 2):
        mover, choices = Mover(all_recomputed, way), _choices(all_recomputed, words)
        found += of_both_kinds(mover, found[:2], choices, bound=bound, seconds=share, **effort)
        done((number + 1) / parts)
    best = min(found, key=lambda each: each.seconds)
    return replace(best, bound=bound, bound_from=bound_from, named=found[0].named, ways=ways)


def _recomputing_nothing(problem: Problem) -> Problem | None:
    """Return the problem without recomputes; None if one microbatch exceeds a limit then."""
    with suppress(ValueError):
        return replace(problem, recomputed=frozenset(), kept=())
    return None


def _choices(problem: Problem, words: Iterable[tuple[str, Words]]) -> Iterator[tuple[Problem, str, Words]]:
    """Yield (problem, name, words), with a choice of kept microbatches of which some have to be moved."""
    for (name, each), moved, ahead in product(words, _MOVED, _AHEAD):
        kept = kept_microbatches(problem, each, moved=moved, ahead=ahead)
        if kept is not None:
            yield replace(problem, kept=kept), name, each


def _recomputing(
    problem: Problem, synthesized: partial[Synthesis], seconds: float, known: Sequence[Words],
    done: Callable[[float], None],
) -> Synthesis:  # fmt: skip
    """Search for the fastest program without moves. `synthesized`: `synthesize` with its effort, without `seconds`."""
    all_recomputed = replace(problem, kept=())
    runs, found = 1 + _CHOICES * _TURNS, []

    def search(each: Problem, begin: Sequence[Words]) -> None:
        number = len(found)
        found.append(synthesized(
            each, seconds=seconds / runs, known=begin, done=lambda part: done((number + part) / runs)
        ))  # fmt: skip

    search(all_recomputed, known)
    begin = [words for _, words in named_words(all_recomputed)] + [found[0].words, *known]
    for chosen, words in _cheapest(all_recomputed, begin):
        for _ in range(_TURNS):
            search(chosen, [words])
            words = found[-1].words
            kept = kept_microbatches(all_recomputed, words)
            if len(kept) <= len(chosen.kept):
                break
            chosen = replace(problem, kept=kept)
    bound, bound_from = bound_of_any_recompute(problem)
    best = min(found, key=lambda each: each.seconds)
    # A registered order recomputes all microbatches of a stage, whatever was chosen for its words.
    return replace(best, bound=bound, bound_from=bound_from, named=found[0].named)


def _cheapest(problem: Problem, begin: Sequence[Words]) -> list[tuple[Problem, Words]]:
    """Choose kept microbatches for each of the words. Return the fastest problems and words with different choices."""
    found = []
    for words in begin:
        kept = kept_microbatches(problem, words)
        if kept is not None and all(kept != each.kept for _, each, _ in found):
            chosen = replace(problem, kept=kept)
            if (times := Clock(chosen).times(words)) is not None:
                found.append((times.seconds, chosen, words))
    found.sort(key=lambda each: each[0])
    return [(chosen, words) for _, chosen, words in found[:_CHOICES]]
