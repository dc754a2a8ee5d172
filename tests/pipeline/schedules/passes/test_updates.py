"""The chain and the STEP stand where the weight policy says."""

from megatron.pipeline.schedules.passes.updates import add_updates
from tests.pipeline.schedules.passes.written import extent, segments, texts


def test_flush_steps_at_once():
    """flush: the chain after the batch's last backward, and the STEP before the next forward, which uses it."""
    result = add_updates(segments("0F0 0B0", "0F1 0B1", ""), 0, extent("flush"))
    assert texts(result) == ["0F0 0B0 0REDUCE_NORM@1 0STEP@1", "0F1 0B1 0REDUCE_NORM@2 0STEP@2", ""]


def test_2bw_steps_one_batch_later():
    """2bw: the STEP of a batch waits until the batch after next begins; the last one closes the drain."""
    result = add_updates(
        segments("0F0 0B0", "0F1 0B1", "0F2", "0B2"), 0, extent("2bw", batches=(1, 1, 1), first_batch=0)
    )
    assert texts(result) == [
        "0F0 0B0 0REDUCE_NORM@1",
        "0F1 0B1 0REDUCE_NORM@2 0STEP@1",
        "0F2 0STEP@2",
        "0B2 0REDUCE_NORM@3 0STEP@3",
    ]


def test_stash_steps_before_the_norm():
    """stash: the STEP needs the gradients alone; the norm reports."""
    result = add_updates(
        segments("0F0 0B0", "0F1 0B1", ""), 0, extent("stash", data_parallel=True, first_batch=5, first_microbatch=0)
    )
    assert texts(result) == [
        "0F0 0B0 0REDUCE_GRAD@6 0STEP@6 0REDUCE_NORM@6",
        "0F1 0B1 0REDUCE_GRAD@7 0STEP@7 0REDUCE_NORM@7",
        "",
    ]


def test_the_chain_has_the_links_that_the_program_names():
    """Gradients, embedding, norm, in this order; the embedding on the first and the last stage only."""
    program = extent("flush", num_stages=3, batches=(1,), data_parallel=True, tied_embeddings=True)
    chains = [texts(add_updates(segments(f"{stage}B0", ""), stage, program))[0] for stage in range(3)]
    assert chains == [
        "0B0 0REDUCE_GRAD@1 0REDUCE_EMBED@1 0REDUCE_NORM@1 0STEP@1",
        "1B0 1REDUCE_GRAD@1 1REDUCE_NORM@1 1STEP@1",
        "2B0 2REDUCE_GRAD@1 2REDUCE_EMBED@1 2REDUCE_NORM@1 2STEP@1",
    ]


def test_one_stage_ties_its_embeddings_by_itself():
    """Where the first stage is the last, nothing is added up between ranks."""
    program = extent("flush", batches=(1,), tied_embeddings=True)
    assert texts(add_updates(segments("0B0", ""), 0, program))[0] == "0B0 0REDUCE_NORM@1 0STEP@1"


def test_several_stages_on_a_rank_have_one_chain():
    """It stands at the lowest stage, after the batch's last backward on the rank, whichever stage has that."""
    program = extent("flush", num_stages=2, rank_of_stage=(0, 0), batches=(1,), data_parallel=True)
    chain = "0REDUCE_GRAD@1 0REDUCE_NORM@1 0STEP@1"
    for order in ("0F0 1F0 1B0 0B0", "0F0 1F0 0B0 1B0"):
        assert texts(add_updates(segments(order, ""), 0, program))[0] == f"{order} {chain}"


def test_ranks_of_the_first_and_the_last_stage_tie_their_embeddings():
    """With two stages on each of three ranks, the last stage is on the last rank, and the middle rank has none."""
    program = extent("flush", num_stages=6, rank_of_stage=(0, 1, 2) * 2, batches=(1,), tied_embeddings=True)
    chains = [texts(add_updates(segments(f"{rank + 3}B0 {rank}B0", ""), rank, program))[0] for rank in range(3)]
    assert chains == [
        "3B0 0B0 0REDUCE_EMBED@1 0REDUCE_NORM@1 0STEP@1",
        "4B0 1B0 1REDUCE_NORM@1 1STEP@1",
        "5B0 2B0 2REDUCE_EMBED@1 2REDUCE_NORM@1 2STEP@1",
    ]


def test_a_split_backward_ends_with_its_weight_half():
    """The chain follows the last W, not the last I."""
    assert texts(add_updates(segments("0I0 0W0", ""), 0, extent("flush", batches=(1,)))) == [
        "0I0 0W0 0REDUCE_NORM@1 0STEP@1",
        "",
    ]
