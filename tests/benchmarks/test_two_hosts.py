"""benchmarks/two_hosts.py: what crosses the link between two hosts, by their network devices' counters."""

import pytest

from benchmarks import two_hosts
from tests.benchmarks.test_emulated import rows_of
from tests.network_hosts import make_hosts

PAYLOAD, ACTIVATIONS, MICROBATCHES, EVICTIONS = 1 << 16, 1 << 18, 8, 3


@pytest.mark.full
def test_pairs_cross_the_link_under_standard_only(tmp_path):
    """p=4 on two hosts. `standard` sends one boundary's activations, or gradients, and the three microbatches that
    stage 0 evicts, or gets back; `pair-adjacent` sends those of two boundaries, and nothing of a pair. The counters say
    so: headers are 66 of 1,514 bytes at most, acknowledgements as much in answer to two frames, and reductions and
    barriers some kilobytes; all that is less than a tenth of what pairs would send. What TCP sends again on a busy
    machine, whole windows of it, is nothing that the program sends, and the kernel's count of it is allowed on top."""
    with make_hosts(1):  # or skip
        pass
    times = "--batches 1 --repeats 2 --forward 1 --backward 2 --rate 2000"
    sizes = f"--payload {PAYLOAD} --activations {ACTIVATIONS} --microbatches {MICROBATCHES}"
    rows = {row["mapping"]: row for row in rows_of("two_hosts", f"{times} {sizes}", tmp_path)}
    boundary, pairs = MICROBATCHES * PAYLOAD, EVICTIONS * ACTIVATIONS
    expected = {
        "standard": {"neighbours": boundary, "pairs": pairs},
        "pair-adjacent": {"neighbours": 2 * boundary, "pairs": 0},
    }
    assert {name: row["predicted"] for name, row in rows.items()} == {name: [one] * 2 for name, one in expected.items()}
    overhead = 0.1 * pairs
    for name, row in rows.items():
        total = sum(expected[name].values())
        assert len(row["sent"]) == len(row["resent"]) == 2
        for hosts in zip(row["sent"], row["resent"], strict=True):
            for sent, resent in zip(*hosts, strict=True):
                assert total <= sent <= total + overhead + resent, (name, sent, resent, total)


def test_without_namespaces_it_says_so(monkeypatch, capsys):
    """A machine that makes no hosts: why, in one sentence, and status 1. (`ip` is looked for in /usr/sbin as well.)"""
    monkeypatch.setenv("PATH", "/nowhere")
    assert two_hosts.main([]) == 1
    said = capsys.readouterr().err
    assert said.startswith("two_hosts.py: error: hosts need the commands ")
    assert "unshare, nsenter, setpriv; install iproute2 and util-linux" in said
