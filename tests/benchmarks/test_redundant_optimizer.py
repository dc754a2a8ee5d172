"""The benchmark of copies of shards runs, and compares within pairs of turns."""

import json

import pytest

from benchmarks import redundant_optimizer

FOUND = {
    "parameters": 2_000_000,
    "host_bytes": 16_000_000,
    "with": [0.11, 0.24],
    "without": [0.1, 0.2],
    "processor with": [0.3, 0.3],
    "processor without": [0.2, 0.25],
    "sends": [0.001, 0.003],
    "steps": [0.004, 0.004],
}


def test_ratios_are_of_pairs_of_turns():
    lines = []
    assert redundant_optimizer.report("job", FOUND, lines.append) == pytest.approx((1.1 + 1.2) / 2)
    text = "\n".join(lines)
    assert "ratio 1.150 (1.100-1.200), of processor time 1.350 (1.200-1.500)" in text
    assert "sends 2.00 (1.00-3.00) ms, steps 4.00 (4.00-4.00) ms" in text
    assert "host 16.0 MB a rank, 8.00 bytes for each parameter" in text


@pytest.mark.full
@pytest.mark.alone
def test_a_small_run(tmp_path):
    path = tmp_path / "found.json"
    argv = ["--hidden-sizes", "64", "--microbatches", "2", "--layers", "1", "--turns", "1", "--iterations", "1"]
    assert redundant_optimizer.main([*argv, "--schedule", "2bw", "--precision=--bf16", "--json", str(path)]) == 0
    [found] = json.loads(path.read_text()).values()
    assert len(found["with"]) == 1 and found["sends"][0] > 0 and found["host_bytes"] >= 8 * found["parameters"]
