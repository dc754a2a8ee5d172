"""What the losses of a microbatch count, said to stages that step before their batch's norm.

Problem: where losses are sums, a step divides by what its batch counts. Only the last stage finds that out, and under
`ftpipe` and `pipedream` the others step without having joined a reduction.

Solution: the last stage's rank writes the count of each microbatch into the store, with its forward. A stage steps
behind the backwards of the batch, which come after these forwards, so it finds all counts there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from torch.distributed import HashStore, PrefixStore, distributed_c10d, is_initialized

from megatron.pipeline.library.ranks import Ranks
from megatron.pipeline.program.weight_policies import WeightPolicy
from megatron.pipeline.runtime.contract.stage import Microbatch
from megatron.pipeline.runtime.stages.module.losses import Loss, by_microbatches, sum_and_count
from megatron.pipeline.runtime.stages.module.update import ModuleUpdate

_num_made: Counter[tuple[int, ...]] = Counter()  # by the ranks of the job, which make pipelines in the same order


class LossCounts:
    """Of one rank; called with a batch and n, gives what its first n microbatches count, the mean over the replicas.

    Nothing is written, and a microbatch counts 1, where losses are means, or the norm comes before the steps.
    """

    def __init__(self, ranks: Ranks) -> None:
        _num_made[ranks.job] += 1
        name = f"loss counts/{'-'.join(map(str, ranks.job))}/{_num_made[ranks.job]}"
        store = distributed_c10d._get_default_store() if is_initialized() else HashStore()
        self._store, self._ranks = PrefixStore(name, store), ranks
        self._read: dict[tuple[int, int], float] = {}  # by batch and position, over all replicas
        self._written: dict[int, list[str]] = {}  # batch -> keys
        self._are_said = False

    def expect(self, counts: Sequence[float | None], weights: WeightPolicy, updates: Iterable[ModuleUpdate]) -> None:
        """Before the first batch, on all ranks: what the loss of the first microbatch counts, as each rank knows it of
        its pipeline; None: losses are means. `updates`: those that have not stepped, whose predictions divide by it.

        Raises ValueError where losses are of two kinds.
        """
        if None not in counts:
            self._are_said = weights.updates_alone
            for update in updates:
                update.mean_count = sum(counts) / len(counts) or None
        elif any(count is not None for count in counts):
            raise ValueError("the loss returns means in some replicas and (sum, count) in others; give all the same")

    def say(self, microbatch: Microbatch, loss: Loss) -> None:
        """On the rank of the last stage: a forward has ended."""
        if self._are_said:
            _, count = sum_and_count(loss)
            key = self._key(microbatch.batch, microbatch.position, self._ranks.replica)
            self._store.set(key, repr(float(count)))
            self._written.setdefault(microbatch.batch, []).append(key)

    def __call__(self, batch: int, num_microbatches: int) -> float:
        if not self._are_said:
            return by_microbatches(batch, num_microbatches)
        replicas = range(len(self._ranks.pipelines))
        for position in range(num_microbatches):
            if (batch, position) not in self._read:
                found = self._store.multi_get([self._key(batch, position, replica) for replica in replicas])
                self._read[batch, position] = sum(map(float, found))
        return sum(self._read[batch, position] for position in range(num_microbatches)) / len(replicas)

    def forget(self, batch: int) -> None:
        """All ranks have stepped with it."""
        for key in self._written.pop(batch, ()):
            self._store.delete_key(key)
        for each in [each for each in self._read if each[0] <= batch]:
            del self._read[each]

    @staticmethod
    def _key(batch: int, position: int, replica: int) -> str:
        return f"{batch}/{position}/{replica}"
