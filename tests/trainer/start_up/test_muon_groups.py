"""Which parameters Muon steps: those of docs/muon.md's table, in GPTs and a BERT."""

import re
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch

from megatron.pipeline.runtime.update.muon import COLUMNS, QKV, ROWS
from tests import workers
from tests.trainer.run.run_case import BASE, data_flags, training_program
from tests.trainer.run.test_bert import BASE as BERT
from tests.trainer.run.test_bert import data_flags as bert_data
from tests.trainer.run.test_what_loses_ranks import MUON

PAGE = Path(__file__).parents[3] / "docs" / "muon.md"
LATENT = "--multi-latent-attention --kv-lora-rank 12 --qk-head-dim 8 --qk-pos-emb-head-dim 4 --v-head-dim 6"
SHARES = {QKV: "share rows", ROWS: "share rows", COLUMNS: "share columns"}


def layouts(program: str, flags: str) -> dict:
    """Name of a parameter, without the number of its layer -> (layout, the optimizer's option, number of
    dimensions)."""
    from megatron.core.utils import unwrap_model
    from megatron.trainer.arguments import parse_args
    from megatron.trainer.run.assembly import assemble
    from megatron.trainer.run.pretraining import complete
    from megatron.trainer.start_up import initialize
    from megatron.trainer.start_up.optimizer import layout_of

    defaults, trained = training_program(program)
    args, _ = complete(parse_args(flags.split(), defaults=defaults))
    run = assemble(initialize.set_up(args), trained)
    (core,) = run.optimizer.chained_optimizers
    said = {parameter: group["muon"] for group in core.optimizer.param_groups for parameter in group["params"]}
    (chunk,) = run.chunks
    return {
        re.sub(r"layers\.\d+", "layers", name): (layout_of(parameter, name), said[parameter], parameter.dim())
        for name, parameter in unwrap_model(chunk).named_parameters()
    }


@pytest.mark.parametrize(
    "program, flags, num_matrices",
    [
        ("pretrain_gpt", f"{BASE} {data_flags()} --swiglu --qk-layernorm --untie-embeddings-and-output-weights", 4),
        ("pretrain_gpt", f"{BASE} {data_flags()} --num-experts 2 --moe-shared-expert-intermediate-size 32 "
         "--disable-bias-linear", 9),
        ("pretrain_gpt", f"{BASE} {data_flags()} {LATENT} --q-lora-rank 8 --qk-layernorm", 7),
        ("pretrain_gpt", f"{BASE} {data_flags()} {LATENT} --softmax-type learnable", 6),
        ("pretrain_bert", f"{BERT} {bert_data()}", 4),
    ],
)  # fmt: skip
def test_parameters_are_whose_the_page_says(program, flags, num_matrices):
    """Each parameter is in a row of the table, and the groups of the optimizer agree with it."""
    table = {}
    for line in PAGE.read_text().partition("## Which parameter is whose")[2].partition("\n## ")[0].splitlines():
        if line.startswith("| `") or line.startswith("| BERT"):
            names, whose, ranks = line.split("|")[1:4]
            table |= {name: (whose, ranks.strip()) for name in re.findall(r"`([\w.]+)`", names)}
    (found,) = workers.run(1, f"{__name__}:layouts", program=program, flags=f"{flags} --optimizer muon")
    for name, (layout, option, dimensions) in found.items():
        assert layout == option
        own = [row for key, row in table.items() if key in name]
        if not own:  # the row of norms and biases
            assert layout is None and dimensions == 1 and ("norm" in name or "bias" in name), name
            continue
        ((whose, ranks),) = own
        assert (layout is None, SHARES.get(layout, "")) == ("AdamW" in whose, ranks), name
    assert sum(layout is not None for layout, *_ in found.values()) == num_matrices


def groups_of_both() -> list[list[tuple]]:
    """The groups of this rank's optimizer, and of one that is built alone for the same chunks: how each is stepped, and
    the number of its parameters."""
    from megatron.trainer.arguments import parse_args
    from megatron.trainer.run.pretraining import complete
    from megatron.trainer.start_up import initialize
    from megatron.trainer.start_up.optimizer import build_optimizer
    from megatron.trainer.start_up.run import setup_model_and_optimizer

    defaults, program = training_program("pretrain_gpt")
    flags = f"{BASE} {data_flags()} {MUON} --pipeline-model-parallel-size 2 --go-on-without-lost-ranks"
    args, _ = complete(parse_args(flags.split(), defaults=defaults))
    args = replace(initialize.set_up(args), padded_vocab_size=256)
    built = setup_model_and_optimizer(args, program)
    with mock.patch.object(torch.distributed, "all_gather_object", side_effect=AssertionError("it is alone")):
        alone = build_optimizer(args, built.chunks, kinds=built.optimizer.kinds_of_parameters)
    torch.distributed.barrier()
    built.update.close()
    kind = ("wd_mult", "is_decoupled_lr", "max_lr", "muon")
    return [
        [(*(group[name] for name in kind), len(group["params"])) for group in optimizer.param_groups]
        for optimizer in (built.optimizer, alone)
    ]


def test_an_optimizer_that_is_built_alone_has_the_groups_of_all_ranks():
    """The last stage has no position embeddings, the only matrices that AdamW decays."""
    found = workers.run(4, f"{__name__}:groups_of_both", timeout=120)
    for whole, alone in found:
        assert whole == alone
    assert [group[:-1] for group in found[0][0]] == [group[:-1] for group in found[-1][0]]
    assert 0 in (group[-1] for group in found[-1][0])
