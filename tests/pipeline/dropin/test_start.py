"""What is found out before the process group forms: queues, Transformer Engine, and ranks."""

import pytest

from megatron import backend
from megatron.pipeline.dropin import start
from megatron.pipeline.dropin.start import prepare
from tests.pipeline.dropin.arguments import arguments


def test_hardware_queues_are_asked_for_on_cuda_alone(monkeypatch):
    """2bw beside one queue may hang; without CUDA nobody reads the variable."""
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    args = arguments("--pipeline-schedule 2bw", data_parallel_size=2, world_size=4)
    monkeypatch.setattr(backend, "is_cuda", lambda: False)
    prepare(args)
    monkeypatch.setattr(backend, "is_cuda", lambda: True)
    with pytest.raises(ValueError, match="CUDA_DEVICE_MAX_CONNECTIONS is 1, but --pipeline-schedule 2bw runs red"):
        prepare(args)
    prepare(arguments("--pipeline-schedule flush", data_parallel_size=2, world_size=4))


@pytest.mark.parametrize(("version", "refused"), [("2.5.0", True), ("2.6.0", False)])
def test_an_engine_that_adds_to_an_older_buffer(version, refused, monkeypatch):
    """Under 2bw with fusion; flush has one buffer."""
    monkeypatch.setattr(start, "installed_engine_version", lambda: version)
    engine = {"transformer_impl": "transformer_engine", "gradient_accumulation_fusion": True}
    prepare(arguments("--pipeline-schedule flush", **engine))
    prepare(arguments("--pipeline-schedule 2bw", **{**engine, "gradient_accumulation_fusion": False}))
    if not refused:
        prepare(arguments("--pipeline-schedule 2bw", **engine))
        return
    with pytest.raises(ValueError, match=r"Transformer Engine 2.5.0 .*; install 2.6.0 or later"):
        prepare(arguments("--pipeline-schedule 2bw", **engine))


def test_ranks_need_torchruns_store(monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    with pytest.raises(ValueError, match=r"--pipeline-rank-mapping pair-adjacent gives .*; start it through torchrun"):
        prepare(arguments("--pipeline-schedule bpipe --pipeline-rank-mapping pair-adjacent"))


def test_batches_are_tried_before_anything_starts():
    """Each of a run whose batches grow."""
    with pytest.raises(ValueError, match="2bw with 2 stages needs batches of at least 2 microbatches"):
        prepare(arguments("--pipeline-schedule 2bw", rampup_batch_size=["2", "2", "8"]))


@pytest.mark.parametrize(
    ("schedule", "stages", "off", "said"),
    [
        ("flush", 4, [], []),
        ("gpipe", 4, [], []),
        ("zb-h1", 4, ["overlap_grad_reduce"], ["zb-h1 makes gradients in W"]),
        ("bpipe", 4, ["overlap_grad_reduce"], ["bpipe moves or counts activations"]),
        ("bpipe", 2, [], []),  # nothing has to move
        (
            "flush --pipeline-log-saved-activations", 2, ["overlap_grad_reduce"],
            ["flush moves or counts activations"],
        ),
        (
            "2bw", 2, ["overlap_grad_reduce", "overlap_param_gather"],
            ["--overlap-grad-reduce is off: --pipeline-schedule 2bw reduces", "--overlap-param-gather is off: --pipe"],
        ),
    ],
)  # fmt: skip
def test_overlaps_that_a_schedule_has_no_room_for_are_off(schedule, stages, off, said, capsys, monkeypatch):
    """With a note each, and without one where they are on, or were off. The buckets are laid out for the overlap as
    ever, so its own flag stays.
    """
    monkeypatch.delenv("RANK", raising=False)
    names = ("overlap_grad_reduce", "overlap_param_gather")
    for given in (True, False):
        args = arguments(
            f"--pipeline-schedule {schedule}", data_parallel_size=2, pipeline_model_parallel_size=stages,
            global_batch_size=32, **dict.fromkeys(names, given),
        )  # fmt: skip
        found = start.overlaps_off(args, start.prepare(args))
        lines = capsys.readouterr().out.splitlines()
        assert args.overlap_grad_reduce is given and list(found) == (off[:1] if given else [])
        assert args.overlap_param_gather is (given and "overlap_param_gather" not in off)
        assert len(lines) == (len(said) if given else 0)
        assert all(part in line and "note: " in line for part, line in zip(said, lines, strict=False))
