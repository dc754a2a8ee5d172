"""What programs have to compute, by the definition of their weights, on one process: for the oracle."""

from collections import Counter

from megatron.pipeline.program.program import Program
from megatron.pipeline.program.weight_policies import PROVISIONAL, STASH

DELAYS = {"flush": 0, "2bw": 1, "3bw": 2, "4bw": 3}  # of the policies whose stages step together
TRUE = -(10**6)  # true weights, where a policy predicts, are numbered from here down


class Wrong(Exception):
    """The program does something that a runtime could not do, or must not."""


def require(condition: bool, reason: str) -> None:
    if not condition:
        raise Wrong(reason)


class Symbols:
    """Symbols, interned: equal construction gives the equal small integer."""

    def __init__(self) -> None:
        self._numbers: dict[tuple, int] = {}

    def __call__(self, *parts: object) -> int:
        return self._numbers.setdefault(parts, len(self._numbers))

    def gradient_sum(self, gradients: Counter) -> int:
        return self("sum", frozenset(gradients.items()))


def reference(program: Program, symbols: Symbols, num_stages: int) -> dict[tuple[int, int], int]:
    """(stage, version) -> weights, by the definition of the policy, on one process. `num_stages`: of the model."""
    weights = {
        (stage, version): symbols("entry", stage, version)
        for stage in range(num_stages)
        for version in program.entry_versions
    }
    if program.weights is PROVISIONAL:
        weights |= {(stage, true(program.first_batch)): symbols("entry", stage, TRUE) for stage in range(num_stages)}
    for batch in range(program.first_batch, program.first_batch + len(program.batches)):
        if program.weights is PROVISIONAL:
            versions = [batch] * num_stages
        elif program.weights is STASH:
            versions = [max(program.first_batch, batch - (num_stages - 1 - stage)) for stage in range(num_stages)]
        else:
            versions = [max(batch - DELAYS[program.weights.name], 0)] * num_stages
        sums = [Counter() for _ in range(num_stages)]
        partial: dict[tuple[int, int], Counter] = {}  # stage, number of microbatches -> what they add up to
        for microbatch in program.microbatches_of(batch):
            inputs = [symbols("data", microbatch)]
            for stage in range(num_stages):
                inputs.append(symbols("F", microbatch, weights[stage, versions[stage]], inputs[-1]))
            gradient = symbols("loss", microbatch, inputs[-1])
            for stage in reversed(range(num_stages)):
                gradient = symbols("B", microbatch, weights[stage, versions[stage]], inputs[stage], gradient)
                sums[stage][gradient] += 1
                partial[stage, sums[stage].total()] = Counter(sums[stage])
        if program.weights is PROVISIONAL:
            for stage in range(num_stages):
                ties = {
                    end: partial[end, program.num_read_of_ties(batch)]
                    for end in (0, num_stages - 1)
                    if reads_ties(program, stage)
                }
                weights[stage, batch + 1] = predicted(
                    symbols, weights[stage, true(batch)], partial[stage, program.num_read(stage, batch)], ties, program
                )
                start = weights[stage, true(batch)]
                weights[stage, true(batch + 1)] = symbols("step", start, symbols.gradient_sum(sums[stage]))
            continue
        for stage in range(num_stages):
            weights[stage, batch + 1] = symbols("step", weights[stage, batch], symbols.gradient_sum(sums[stage]))
    return weights


def true(version: int) -> int:
    """The number under which the true weights of a version are kept."""
    return TRUE - version


def reads_ties(program: Program, stage: int) -> bool:
    """Whether the stage's rank has an end of tied embeddings, and another rank the other."""
    owner = program.rank_of_stage
    return program.tied_embeddings and owner[0] != owner[-1] and owner[stage] in (owner[0], owner[-1])


def predicted(symbols: Symbols, start: int, gradients: Counter, ties: dict[int, Counter], program: Program) -> int:
    tied = frozenset((end, symbols.gradient_sum(added)) for end, added in ties.items())
    return symbols("predict", start, symbols.gradient_sum(gradients), tied, program.reduce_partial)
