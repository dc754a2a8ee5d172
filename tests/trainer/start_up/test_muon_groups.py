"""Which parameters Muon steps: those of docs/muon.md's table, in GPTs and a BERT."""

import re
from pathlib import Path

import pytest

from megatron.pipeline.runtime.update.muon import COLUMNS, QKV, ROWS
from tests import workers
from tests.trainer.run.run_case import BASE, data_flags, training_program
from tests.trainer.run.test_bert import BASE as BERT
from tests.trainer.run.test_bert import data_flags as bert_data

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
