"""A GPT as HybridModel: refusals by name, and, with a megatron.core that has it, the numbers of the GPTModel."""

from megatron import backend

backend.install()

from dataclasses import replace

import pytest
import torch

from megatron.pipeline.start_up.core_version import TRAINED, installed_core
from tests import workers
from tests.trainer.arguments.command_line import CPU, arguments
from tests.trainer.models import test_gpt

PLAIN = "--hidden-dropout 0 --attention-dropout 0"
KINDS = {
    "plain": "",
    "untied, gated, grouped, rotary": "--untie-embeddings-and-output-weights --swiglu --disable-bias-linear "
    "--normalization RMSNorm --group-query-attention --num-query-groups 2 --position-embedding-type rope "
    "--qk-layernorm",
}
EMBEDDING = "embedding.word_embeddings.weight"
HYBRID = "--num-layers 8 --hybrid-layer-pattern"
needs_hybrid = pytest.mark.skipif(not installed_core().has_hybrid_model, reason="this megatron.core has no HybridModel")


def as_gpt(name: str) -> str:
    """The name that a weight of the HybridModel has in the GPTModel."""
    words = name.replace("final_norm", "final_layernorm").split(".")
    if name.startswith("decoder.layers."):
        words[2] = str(int(words[2]) // 2)
    return ".".join(words)


def require_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name, tensor in found.items() if not torch.equal(tensor, expected[name])] == []


@needs_hybrid
@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_those_of_the_gpt_however_it_is_cut(kind):
    """Stages divided in turn, unevenly by the pattern, and several on a rank: bit-equal weights."""
    gpt = test_gpt.whole_model(1, KINDS[kind])
    for stages, more in (
        (1, f"{HYBRID} *-*-*-*-"),
        (2, f"{HYBRID} *-*-*-*- --pipeline-model-parallel-size 2"),
        (2, f"{HYBRID} *-*-*-|*- --pipeline-model-parallel-size 2"),
        (2, f"{HYBRID} *-|*-|*-|*- --pipeline-model-parallel-size 2 --pipeline-schedule interleaved"),
    ):
        hybrid = test_gpt.whole_model(stages, f"{KINDS[kind]} {more}")
        copied = {} if "untie" in KINDS[kind] or stages == 1 else {"output_layer.weight": gpt[EMBEDDING]}
        require_equal({as_gpt(name): tensor for name, tensor in hybrid.items()}, gpt | copied)


@needs_hybrid
@pytest.mark.parametrize("kind", KINDS)
def test_losses_and_gradients_are_those_of_the_gpt(kind):
    """Of a forward and a backward, to the last bit; with other weights they are not."""
    (gpt, other), (hybrid, _) = (
        workers.run(1, f"{__name__}:gradients", flags=f"{PLAIN} {KINDS[kind]} {more}")[0]
        for more in ("", f"{HYBRID} *-*-*-*-")
    )
    require_equal({as_gpt(name): tensor for name, tensor in hybrid.items()}, gpt)
    assert not torch.equal(gpt["loss"], other["loss"])


def gradients(flags: str) -> list[dict[str, torch.Tensor]]:
    """The loss and the gradients of a GPT of two seeds, by the names of its parameters."""
    from megatron.core import parallel_state
    from megatron.trainer.models import core_config, gpt
    from megatron.trainer.start_up import initialize

    found = []
    for seed in (1234, 1):
        args = arguments(f"{flags} --seed {seed}")
        args = initialize.set_up(replace(args, padded_vocab_size=256))
        try:
            provider = lambda own: lambda pre, post: gpt.gpt_model(args, own, pre_process=pre, post_process=post)  # noqa: B023, E731
            (model,) = gpt.build_chunks(provider, core_config.transformer_config(args))
            tokens = torch.arange(32).remainder(7).view(1, 32)
            losses = model(tokens, torch.arange(32).view(1, 32), None, labels=tokens.roll(-1))
            losses.mean().backward()
            named = {name: parameter.grad for name, parameter in model.named_parameters()}
            found.append({"loss": losses.detach().clone(), **named})
        finally:
            parallel_state.destroy_model_parallel()
    return found


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("M-*-", "has 'M', which is for Mamba layers, and only attention"),
        ("*E", "has 'E', which is for experts"),
        ("*-/*-", "has '/', which is for layers that predict further tokens"),
        ("*x", "has 'x' and only attention"),
        ("**--", "has to be *- for each layer"),
        ("*-*|-*-", "has to be *- for each layer, in each stage"),
        ("*-|", "has to be *- for each layer, in each stage"),
        ("*-*- --num-layers 2", "has 4 layers, and --num-layers says 2; leave it out"),
        ("*-|*-", "has 2 stages, and --pipeline-model-parallel-size is 1; leave the | out"),
        ("*-*- --first-last-layers-bf16", "--first-last-layers-bf16 cannot be used with"),
        ("*-*- --num-experts 4", "--num-experts cannot be used with --hybrid-layer-pattern"),
        ("*-*- --recompute-activations", "--recompute-activations cannot be used with"),
    ],
)
def test_other_patterns_are_refused(flags, sentence):
    with pytest.raises(ValueError) as refused:
        arguments(f"--hybrid-layer-pattern {flags}", without="--num-layers" if "--num-layers" not in flags else "")
    assert sentence in str(refused.value)


def test_a_checkpoint_gives_its_pattern():
    """--use-checkpoint-args: also where Megatron-LM counts attention and MLP apart, and stages are divided anew."""
    from argparse import Namespace

    from megatron.trainer.arguments import parse_args, validate_args
    from megatron.trainer.checkpoint.arguments import with_saved_arguments
    from tests.trainer.arguments.command_line import argv

    divided = "--hybrid-layer-pattern *-|*- --pipeline-model-parallel-size 2"
    for given, kept in (("", "*-*-"), (divided, "*-|*-"), ("--num-layers 4 --hybrid-layer-pattern *-*-", "*-*-")):
        for num_layers in (2, 4):
            args = parse_args(argv(given, without="" if "--num-layers" in given else "--num-layers"))
            saved = Namespace(**{**vars(args), "num_layers": num_layers, "hybrid_layer_pattern": "*-|*-"})
            args = with_saved_arguments(args, saved, "DIR")
            validate_args(args, world_size=2 if given == divided else 1)
            assert (args.hybrid_layer_pattern, args.num_layers) == (kept, 2)


def test_megatron_lms_own_flags_are_taken():
    """The specification that its scripts name beside a pattern; a pattern alone says how many layers there are."""
    spec = "--spec megatron.core.models.hybrid.hybrid_layer_specs hybrid_stack_spec"
    flags = f"--hybrid-layer-pattern *-*-*-|*- {spec} --pipeline-model-parallel-size 2"
    args = arguments(flags, without="--num-layers", world_size=2)
    assert (args.num_layers, args.pipeline_model_parallel_layout) == (4, "Ettt|tL")
    with pytest.raises(ValueError, match="is for --hybrid-layer-pattern; give both, or neither"):
        arguments(spec)
    with pytest.raises(ValueError, match=r"needs megatron.core 0.18 or later.*--num-layers 2 in its place"):
        arguments("--hybrid-layer-pattern *-*-", without="--num-layers", platform=replace(CPU, core=TRAINED[0, 17]))
