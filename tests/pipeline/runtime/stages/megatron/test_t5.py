"""A T5 cut into stages equals megatron.core's whole `T5Model` in one process, wherever its two stacks are cut.

Samples differ in both lengths, so a stage that took another microbatch's padding would show; and every stage of the
decoder adds to the gradient of the encoder's output, so one that dropped its part would.
"""

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from megatron import backend

backend.install()

from tests import workers
from tests.pipeline.runtime.stages.megatron import megatron_cases as cases
from tests.pipeline.runtime.stages.megatron.test_update import (
    CLOSE,
    EXACT,
    FP16,
    P124,
    SPREAD,
    Outcomes,
    Row,
    check,
    marked,
)

T5 = {"t5": True, "batches": (4,) * 5}
TWO_BW = T5 | {"schedule": "2bw"}
TWO, FOUR = (2, 1, 1), (4, 1, 1)
TABLE = {
    "flush": Row(T5 | {"schedule": "flush"}, P124),
    "2bw": Row(TWO_BW | {"drains": (2,)}, P124),
    "2bw, cut in the encoder": Row(TWO_BW | {"first_layers": 1}, (TWO,)),
    "2bw, cut in the decoder": Row(TWO_BW | {"first_layers": 3}, (TWO,)),
    "2bw, tied, clipped": Row(TWO_BW | {"tied": True, "clip": 0.5}, (FOUR,), CLOSE),
    "2bw, recompute instructions": Row(TWO_BW | {"recompute": True}, (FOUR,)),
    "2bw, full recompute": Row(TWO_BW | {"recompute_granularity": "full"}, (FOUR,)),
    "2bw, rotary": Row(TWO_BW | {"position": "rope"}, (TWO,)),
    "2bw, relative": Row(TWO_BW | {"position": "relative", "normalization": "RMSNorm"}, P124, CLOSE),
    "flush, relative, recompute": Row(
        T5 | {"position": "relative", "schedule": "flush", "recompute_granularity": "full"}, (FOUR,), CLOSE
    ),
    "flush, relative, attention recomputed": Row(
        T5
        | {
            "position": "relative",
            "schedule": "flush",
            "recompute_granularity": "selective",
            "recompute_modules": ("core_attn",),
        },
        (FOUR,),
        CLOSE,
    ),
    "2bw, relative, sequence parallel": Row(
        TWO_BW | {"position": "relative", "sequence_parallel": True}, ((2, 2, 1),), SPREAD
    ),
    "zb-h1, relative": Row(T5 | {"position": "relative", "schedule": "zb-h1"}, (FOUR,), CLOSE),
    "2bw, balanced": Row(TWO_BW | {"balance": True}, (FOUR,)),
    "2bw, data parallel": Row(TWO_BW | {"clip": 0.5, "tied": True}, ((2, 1, 2),), CLOSE),
    "2bw, sequence parallel": Row(TWO_BW | {"sequence_parallel": True, "tied": True}, ((2, 2, 1),), SPREAD),
    "2bw, fp16, two overflows": Row(FP16 | T5 | {"batches": (2,) * 8, "overflow_batches": (2, 3)}, (TWO,)),
    "interleaved": Row(T5 | {"schedule": "interleaved", "v": 2, "drains": (1,)}, (TWO,)),
    "pipedream": Row({"t5": True, "schedule": "pipedream", "batches": (1,) * 10}, (TWO, FOUR)),
    "zb-h1": Row(T5 | {"schedule": "zb-h1"}, (FOUR,)),
    "zbv": Row(T5 | {"schedule": "zbv", "v": 2}, (TWO,)),
}
USUAL = {"flush", "2bw", "2bw, cut in the encoder", "2bw, cut in the decoder", "2bw, tied, clipped",
         "2bw, sequence parallel", "zb-h1", "2bw, relative"}  # fmt: skip


@pytest.fixture(scope="module")
def outcomes():
    return Outcomes(TABLE)


@pytest.mark.sample(1)
@pytest.mark.parametrize(("name", "layout"), marked(TABLE, full=TABLE.keys() - USUAL), ids=str)
def test_training_equals_the_whole_model(outcomes, name, layout):
    """Losses, norms and weights are those of a plain loop over megatron.core's T5Model."""
    check(outcomes[name, layout], TABLE[name].allowed)


@pytest.mark.full
@pytest.mark.parametrize("options", [{}, {"provisional_microbatches": 1, "clip": 0.5}])
def test_predictions_equal_one_process(options):
    """Provisional weights of both stacks are those of the plain loop."""
    from tests.pipeline.runtime.stages.megatron.test_provisional import check_predictions

    case = cases.Case(**TWO_BW | {"predict": True, **options}, p=2)
    check_predictions(case, EXACT)


@pytest.mark.full
def test_dropout_does_not_depend_on_the_cut():
    """Masks belong to the layers of each stack and to the embedding, not to the stages."""
    case = cases.Case(**TWO_BW | {"dropout": 0.1, "recompute": True}, p=4)
    [one] = workers.run(1, f"{cases.__name__}:train", timeout=200, **vars(replace(case, p=1)))
    check((case, one, workers.run(4, f"{cases.__name__}:train", timeout=200, **vars(case))), EXACT)


def test_the_embedding_drops_others_in_the_decoder():
    """Where the first tokens of both are the same, the masks of dropout differ; and a recomputation has them again."""
    [(first, again)] = workers.run(1, f"{__name__}:embedding_case", timeout=100)
    assert not torch.equal(first[0][:8], first[1]) and all(map(torch.equal, first, again))
    assert all((each == 0).float().mean() > 0.3 for each in first)


def embedding_case() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """What the encoder and the decoder get of the same tokens, twice in the same microbatch."""
    from megatron.pipeline.runtime.stages.megatron.data_and_dropout import SeededDropout

    case = cases.Case(**T5 | {"dropout": 0.5, "micro_batch_size": 4})
    with cases.parallel(case):
        model = cases.gpt_model(case)
        dropout, found = SeededDropout(model, seed=1), []
        tokens = torch.full((4, 16), 7), torch.full((4, 8), 7)
        for _ in range(2):
            with dropout.microbatch(0), torch.no_grad():
                found.append(model._embedded(*tokens))
    return found
