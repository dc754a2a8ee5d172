"""Algorithm 1 of PipeDream-2BW on the planner's own blocks, beside the planner."""

import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from megatron.planner import Architecture, Cluster
from megatron.planner.memory.parameters import layer_parameters
from papers.pipedream_2bw import planner as program
from papers.pipedream_2bw.planner import describe_paper, paper_planner, run_paper_algorithm
from tests.planner.search.helper import PAPER, gpt3, planner

GPT = Architecture.gpt3(
    num_layers=32, hidden_size=2304, num_attention_heads=32, sequence_length=512, vocabulary_size=50304
)  # PipeDream-2BW, 2.2 billion parameters
SERVER = Cluster(gpu="V100-16", nodes=1)


def test_blocks_are_the_models():
    """|W| is 2 bytes for each of 2.04 billion parameters in layers; times grow with the microbatch, less than in
    proportion; a block's ends hold 2 s h elements."""
    paper = paper_planner(planner(GPT, SERVER, PAPER))
    assert paper.model.weight_bytes == 2 * 32 * layer_parameters(GPT, 1)
    assert paper.model.boundary_bytes == 2 * 2 * 512 * 2304
    one, eight = (paper.model.block_seconds(size) for size in (1, 8))
    assert one < eight < 8 * one
    assert paper.servers.bandwidth_high == 150e9 and paper.servers.num_workers == 8


def test_both_beside_each_other():
    """By the paper's memory function, which leaves optimizer state out, few stages fit on 16 GB; counting all, they do
    not."""
    result = run_paper_algorithm(planner(GPT, SERVER, PAPER), safe_batch=512)
    choice = result.plan.choice
    assert choice.memory_bytes < 16 * 2**30 and choice.width * choice.depth <= 8
    assert result.plan.accumulation == 512 / (8 * choice.microbatch)
    assert result.whole.width * result.whole.depth == 8 and result.whole.throughput <= choice.throughput
    assert result.estimate.configuration.data == result.whole.width and not result.estimate.verdict.fits
    lines = describe_paper(result)
    assert "THROUGHPUT" in lines[0] and "MEMORY" in lines[0] and "out of memory" in lines[-1]


def test_what_cannot_be_said():
    """Nothing fits: it says so. A depth that our 2bw cannot run at that batch: the reason. One layer: refused."""
    huge = run_paper_algorithm(planner(gpt3(96, 12288, 96), SERVER, PAPER), safe_batch=64)
    assert huge.plan is None and describe_paper(huge) == ["by its memory function nothing fits"]
    with pytest.raises(ValueError, match="one layer"):
        paper_planner(planner(replace(GPT, num_layers=1), SERVER, PAPER))


README = Path(program.__file__).with_name("README.md")
SMALL = (
    "--cluster V100-16 --num-layers 8 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --vocab-size 100 "
    "--global-batch-size 8"
)


@pytest.mark.full
def test_the_command_prints_what_is_shown(capsys, monkeypatch):
    """The README's command, with the lines below it."""
    monkeypatch.chdir(README.parents[2])
    ((command, shown),) = re.findall(
        r"^\$ python -m papers.pipedream_2bw.planner (.*)\n((?:.+\n)*?)```", README.read_text(), re.M
    )
    assert program.main(shlex.split(command)) == 0
    assert capsys.readouterr().out == shown


@pytest.mark.parametrize("more", ["--context-parallel-sizes 1,2", "--num-experts 8 --moe-router-topk 2"])
def test_ranks_that_share_sequences_or_experts_are_refused(more, capsys):
    """In one sentence."""
    assert program.main(shlex.split(f"{SMALL} {more}")) == 1
    assert "Algorithm 1 knows neither context parallelism nor experts; leave these out" in capsys.readouterr().err
