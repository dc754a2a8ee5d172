"""C++ frames are left out where they add nothing, and no word of a person's is."""

from megatron.pipeline.runtime.failure import cpp_messages
from megatron.pipeline.runtime.failure.cpp_messages import silenced, without_frames

ERROR = """\
torch.distributed.DistNetworkError: failed to recv, got 0 bytes. Connection was likely closed.
Exception raised from recvBytes at /torch/csrc/distributed/c10d/Utils.hpp:784 (most recent call first):
frame #0: c10::Error::Error(c10::SourceLocation, std::string) + 0x9d (0x7f58fa155b in libc10.so)
frame #1: <unknown function> + 0x6748693 (0x7f58ea348693 in libtorch_cpu.so)
<omitting python frames>
frame #19: <unknown function> + 0x891f5 (0x7f58faaa71f5 in libc.so.6)

raised in instruction 1F8@1 on rank 1 (stage 1)
"""


def test_frames_are_cut_out():
    text = without_frames(ERROR)
    first, last = ERROR.splitlines()[0], ERROR.splitlines()[-1]
    assert text == f"{first}\n\n{last}\n"
    assert without_frames("frame #2 of the film is dark") == "frame #2 of the film is dark"


def test_the_threshold_of_warnings_comes_back(monkeypatch):
    """It is torch's own, and stays where its variable says what it is to be."""
    monkeypatch.delenv("TORCH_CPP_LOG_LEVEL", raising=False)
    threshold = cpp_messages._threshold()
    before = threshold.value
    with silenced():
        assert threshold.value == 2 > before
    assert threshold.value == before
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "WARNING")
    with silenced():
        assert threshold.value == before
