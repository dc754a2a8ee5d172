from megatron.documents import counted


def test_one_is_no_plural():
    """Nor is 0 one; a batch has batches."""
    assert [counted(number, "stage") for number in (0, 1, 2)] == ["0 stages", "1 stage", "2 stages"]
    assert [counted(number, "microbatch") for number in (1, 2)] == ["1 microbatch", "2 microbatches"]
