"""Copies of the distributed optimizer's shards follow the shards bit for bit."""

import pytest

torch = pytest.importorskip("torch")

from megatron import backend

backend.install()

from tests import workers
from tests.pipeline.runtime.stages.megatron.test_update import FP16

_CASE = "tests.pipeline.runtime.stages.megatron.redundant_cases:shards"
OF_TWO = {"p": 2, "d": 2, "batches": (4,) * 5, "layers": 2, "clip": 0.5}

ROWS = {
    "flush, three replicas, warm-up": {
        "p": 1, "d": 3, "batches": (3,) * 4, "layers": 1, "clip": 0.1, "warmup": 18, "weight_decay": 0.1
    },
    "2bw, BF16, tied": {**OF_TWO, "schedule": "2bw", "dtype": "bfloat16", "tied": True},
    "2bw, FP16, an overflow": {**OF_TWO, **FP16, "schedule": "2bw", "overflow_batches": (2,)},
    "flush, made later": {**OF_TWO, "begins": 2},
    "2bw, shared out experts": {
        "p": 1, "d": 4, "e": 2, "experts": 4, "batches": (4,) * 4, "layers": 2, "clip": 0.5, "schedule": "2bw"
    },
    "2bw, error feedback": {**OF_TWO, "schedule": "2bw", "predict": True, "provisional_microbatches": 0},
    "2bw, predicted": {**OF_TWO, "schedule": "2bw", "predict": True, "reduce_partial": True},
}  # fmt: skip


@pytest.mark.sample(1, "2bw, FP16, an overflow")
@pytest.mark.parametrize("options", ROWS.values(), ids=ROWS)
def test_a_copy_is_its_shard(options):
    """Masters, moments and the weights that follow; under 2bw the older weights, too. The ring is that of replicas.
    Where weights are predicted, steps are put off until predictions, and those of copies are not; with error feedback
    the masters before the last step are copied, too. Experts that ranks
    share out have a ring of their own, and no copy lies with a rank that is lost together with the shard's."""
    sharing = options.get("e", 1)
    found = workers.run(options["p"] * options["d"], _CASE, **options)
    for kind, distance in enumerate((sharing, 1)[: 2 if sharing > 1 else 1]):
        by_place = {(*each[kind]["ranks"], each[kind]["replica"]): each[kind] for each in found}
        for (*ranks, replica), each in by_place.items():
            before = (replica - distance) % len(ranks)
            assert each["held"] == [replica, before]
            of_shard = by_place[(*ranks, before)]["own"]
            for name, copies in each["copy"].items():
                for copy, shard in zip(copies, of_shard[name], strict=True):
                    assert torch.equal(copy, shard), (name, ranks, replica, (copy - shard).abs().max())
            assert any(flat.any() for flat in of_shard["exp_avg"])
            elements = sum(flat.numel() for flat in of_shard["param"])
            further = of_shard.get("older", []) + of_shard.get("before", [])
            older = sum(flat.numel() * flat.element_size() for flat in further)
            assert each["bytes"] == 12 * elements + older
