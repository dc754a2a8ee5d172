"""What Transformer Engine's published sources say of its signatures and behaviour, as data for the stand-in.

    python tests/stand_ins/pin_transformer_engine.py CHECKOUT v2.3 v2.6 v2.18

reads each release of a git checkout with `ast`, runs nothing of it, and writes `transformer_engine.json`: by version
the commit, the signatures of what megatron.core calls, by file, and facts of the code that our runtime relies on.
Releases behind `--facts` get no signatures.
"""

import argparse
import ast
import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

DATA = Path(__file__).with_name("transformer_engine.json")

_MODULE, _DELAYS = "module/linear.py", ("put", "pop", "enable_delay_wgrad_compute", "disable_delay_wgrad_compute")
_OF_FP8 = ("fp8.py", "quantization.py")  # the latter since 2.9
_ASKED = tuple(
    f"FP8GlobalStateManager.{name}" for name in (
        "is_fp8_available", "is_mxfp8_available", "is_fp8_block_scaling_available", "is_fp8_enabled",
    )
)  # fmt: skip
CALLED = {
    "module/linear.py": ("Linear.__init__", "Linear.forward"),
    "module/layernorm_linear.py": ("LayerNormLinear.__init__", "LayerNormLinear.forward"),
    "module/grouped_linear.py": ("GroupedLinear.__init__", "GroupedLinear.forward", "GroupedLinear.backward_dw"),
    "module/layernorm.py": ("LayerNorm.__init__",),
    "module/rmsnorm.py": ("RMSNorm.__init__",),
    "module/_common.py": tuple(f"WeightGradStore.{name}" for name in ("__init__", "delay_wgrad_compute", *_DELAYS)),
    "module/base.py": ("TransformerEngineBaseModule.backward_dw", "get_dummy_wgrad"),
    "attention/dot_product_attention/dot_product_attention.py": (
        "DotProductAttention.__init__", "DotProductAttention.forward",
    ),
    "attention/rope.py": ("apply_rotary_pos_emb",),
    "cross_entropy.py": ("parallel_cross_entropy",),
    **dict.fromkeys(_OF_FP8, ("fp8_autocast", "fp8_model_init", *_ASKED)),
    "distributed.py": ("checkpoint", "CudaRNGStatesTracker.add", "CudaRNGStatesTracker.fork"),
}  # fmt: skip
"""What megatron.core 0.16.1 calls or subclasses, by file under `transformer_engine/pytorch`."""


def pinned(read: Callable[[str], str | None]) -> tuple[dict, dict]:
    """(file -> name -> signature, facts) of a release; `read`: path under `transformer_engine/pytorch` -> text."""
    trees = {path: ast.parse(text) for path in CALLED if (text := read(path)) is not None}
    signatures = {
        path: {name: _signature(found) for name in CALLED[path] if (found := _function(tree, name)) is not None}
        for path, tree in trees.items()
    }
    return signatures, _facts(trees)


def _facts(trees: dict[str, ast.Module]) -> dict:
    linear, base = trees[_MODULE], trees["module/base.py"]
    late = _function(base, "TransformerEngineBaseModule.backward_dw")
    store = _function(trees["module/_common.py"], "WeightGradStore.__init__")
    forward = _function(linear, "Linear.forward")
    return {
        # backward_dw: whether it sets `.grad` always, or only if it is None; null: there is no backward_dw
        "weight_grad_is_set": late and _condition(late, "weight_tensor"),
        "bias_grad_is_set": late and _condition(late, "bias_tensor"),
        "calls_hooks": late and any(name.endswith("_hooks") for name in _called(late)),
        "queue": store and next((each for each in _values(store, "context") if each != "None"), None),
        # when the linear's function looks up `main_grad`, and whether it then adds to it
        "main_grad_is_read_in": "forward" if _reads_main_grad_in_forward(linear) else "backward",
        "accumulates_if": _values(linear, "accumulate_wgrad_into_param_main_grad"),
        "chooses_store_in": "forward" if _values(forward, "wgrad_store") else "backward",
        # the biases whose gradients the linear's function computes
        "apply_bias": _values(linear, "apply_bias")[0],
        "adds_bias_apart_if": [
            ast.unparse(each.test)
            for each in ast.walk(linear)
            if isinstance(each, ast.If) and _values(ast.Module(each.body, []), "gemm_bias_unfused_add") == ["True"]
        ],
        # FP8 weights that are kept between microbatches
        "keeps_fp8_weights_as": sorted({ast.unparse(each) for each in _keywords(linear, "cache_name")}),
        "fp8_workspaces_in": sorted(
            each.name
            for each in ast.walk(base)
            if isinstance(each, ast.FunctionDef)
            and any(_is_attribute(inner, "_fp8_workspaces") for inner in ast.walk(each))
        ),
        # when an FP8 context moves the histories of delayed scaling on
        "updates_scales_if": [
            ast.unparse(each.test).replace("cls.FP8_AUTOCAST_DEPTH", "depth").replace("qstate.autocast_depth", "depth")
            for name in _OF_FP8
            for end in ast.walk(trees.get(name, ast.Module([], [])))
            if isinstance(end, ast.FunctionDef) and end.name in ("fp8_autocast_exit", "autocast_exit")
            for each in ast.walk(end)
            if isinstance(each, ast.If)
        ],
        "marks_skip_backward_post_hook": sorted(
            path for path, tree in trees.items() if _values(tree, "skip_backward_post_hook")
        ),
    }


def _function(tree: ast.AST, name: str) -> ast.FunctionDef | None:
    """A function by its qualified name, or the `forward` of the autograd function of which it is the `apply`."""
    for part in name.split("."):
        defined = [each for each in getattr(tree, "body", ()) if getattr(each, "name", None) == part]
        if not defined:
            aliases = [each.value for each in ast.walk(tree) if isinstance(each, ast.Assign) and _names(each) == [part]]
            return _function(tree, f"{aliases[0].value.id}.forward") if aliases else None
        tree = defined[-1]
    return tree


def _signature(function: ast.FunctionDef) -> str:
    for each in ast.walk(function.args):
        if isinstance(each, ast.arg):
            each.annotation = None
    function.args.args = [each for each in function.args.args if each.arg != "ctx"]  # of an autograd function
    return f"({ast.unparse(function.args)})"


def _names(assignment: ast.Assign) -> list[str]:
    return [getattr(each, "attr", getattr(each, "id", None)) for each in assignment.targets]


def _is_attribute(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == name


def _values(tree: ast.AST, name: str) -> list[str]:
    """What is assigned to a variable or an attribute of that name, without the name of the record that it stands in."""
    found = [
        ast.unparse(each.value) for each in ast.walk(tree) if isinstance(each, ast.Assign) and name in _names(each)
    ]
    return list(dict.fromkeys(each.replace("ctx.", "").replace("bwd_args.", "").replace("self.", "") for each in found))


def _keywords(tree: ast.AST, name: str) -> Iterator[ast.expr]:
    for each in ast.walk(tree):
        if isinstance(each, ast.Call):
            yield from (keyword.value for keyword in each.keywords if keyword.arg == name and not
                        isinstance(keyword.value, ast.Name))  # fmt: skip
        elif isinstance(each, ast.Assign) and _names(each) == [name]:
            yield each.value


def _called(tree: ast.AST) -> list[str]:
    return [getattr(each.func, "attr", "") for each in ast.walk(tree) if isinstance(each, ast.Call)]


def _condition(function: ast.FunctionDef, owner: str) -> str | None:
    """When `owner.grad` is assigned: "if None" or "always"."""
    guarded = False
    for each in ast.walk(function):
        if isinstance(each, ast.If) and ast.unparse(each.test) == f"{owner}.grad is None":
            guarded = True
    sets = any(
        isinstance(each, ast.Assign) and ast.unparse(each.targets[0]) == f"{owner}.grad" for each in ast.walk(function)
    )
    return ("if None" if guarded else "always") if sets else None


def _reads_main_grad_in_forward(tree: ast.Module) -> bool:
    forward = _function(tree, "_Linear.forward")
    return any(
        isinstance(each, ast.Assign) and _names(each) == ["main_grad"] and _is_attribute(each.value, "main_grad")
        for each in ast.walk(forward)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", help="a git repository of Transformer Engine")
    parser.add_argument("releases", nargs="+", help="tags, oldest first")
    parser.add_argument("--facts", nargs="*", default=(), help="tags of which only the facts are kept")
    args = parser.parse_args()

    def git(*words: str) -> str | None:
        done = subprocess.run(["git", "-C", args.checkout, *words], capture_output=True, text=True, check=False)
        return done.stdout if done.returncode == 0 else None

    data = {"source": "https://github.com/NVIDIA/TransformerEngine", "root": "transformer_engine/pytorch"}
    data["releases"] = {}
    for tag in sorted({*args.facts, *args.releases}, key=lambda tag: [int(part) for part in tag[1:].split(".")]):
        signatures, facts = pinned(lambda path, tag=tag: git("show", f"{tag}:transformer_engine/pytorch/{path}"))
        version = git("show", f"{tag}:build_tools/VERSION.txt").strip()
        data["releases"][version] = {
            "commit": git("rev-parse", f"{tag}^{{commit}}").strip(),
            "facts": facts,
            **({"signatures": signatures} if tag in args.releases else {}),
        }
    DATA.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
