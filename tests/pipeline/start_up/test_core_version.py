"""Which megatron.core serves this project's own programs: others are refused by name, before they are imported.

With others small models train as with the installed one: two versions of the package registry, the newest where
MEGATRON_LM=/path/to/Megatron-LM names a checkout, and MEGATRON_CORES=/path/to/one:/path/to/another, folders that hold
`megatron/core`.
"""

import os
import re
import subprocess
import sys
from functools import cache
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from megatron.pipeline.start_up import core_version

ROOT = Path(__file__).parents[3]
CORES = [Path(each) for each in os.environ.get("MEGATRON_CORES", "").split(os.pathsep) if each]
CHECKOUT = os.environ.get("MEGATRON_LM")
MODEL = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 "
    "--micro-batch-size 1 --global-batch-size 4 --train-iters 3 --lr 1e-3 --mock-data --tokenizer-type NullTokenizer "
    "--vocab-size 100 --eval-iters 0 --log-interval 1 --num-workers 0 --pipeline-model-parallel-size 2"
)
LAUNCHER = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
UNMASKED = "--pipeline-schedule 2bw --hidden-dropout 0 --attention-dropout 0"
CASES = {
    "flush": "--pipeline-schedule flush",
    "interleaved": "--pipeline-schedule interleaved --num-virtual-stages-per-pipeline-rank 2",
    "zb-h1": "--pipeline-schedule zb-h1",
    "2bw": "--pipeline-schedule 2bw",
    "predictions": "--pipeline-schedule 2bw --2bw-provisional stage",
    # A further layer draws its dropout in another order from core 0.17 on.
    "experts, latents and further tokens": f"{UNMASKED} --num-experts 4 --mtp-num-layers 1 "
    "--position-embedding-type rope --multi-latent-attention --kv-lora-rank 16 --qk-head-dim 16 "
    "--qk-pos-emb-head-dim 8 --v-head-dim 16",
}
HYBRID = f"{UNMASKED} --num-layers 8 --hybrid-layer-pattern *-*-|*-*-"


def core_of(folder: Path, version: str) -> Path:
    """A megatron.core of which only the version can be read."""
    core = folder / "megatron" / "core"
    core.mkdir(parents=True)
    numbers = zip(("MAJOR", "MINOR", "PATCH"), version.split("."), strict=True)
    (core / "package_info.py").write_text("\n".join(f"{name} = {value}" for name, value in numbers))
    (core / "__init__.py").write_text("raise AssertionError('imported')")
    return core


@pytest.mark.parametrize("version", ["0.15.3", "0.21.0"])
def test_other_versions_are_refused(monkeypatch, tmp_path, version):
    """By name, with the folder; the supported ones, and a core that is missing, are not."""
    spec = ModuleSpec("megatron.core", None, is_package=True)
    spec.submodule_search_locations = [str(core_of(tmp_path, version))]
    monkeypatch.setattr(core_version, "find_spec", lambda name: spec)
    with pytest.raises(
        ValueError, match=rf"megatron.core {re.escape(version)} of {tmp_path} is not supported.*0.16 to 0.20"
    ):
        core_version.require_trained_core()
    spec.submodule_search_locations = [str(core_of(tmp_path / "known", "0.16.0"))]
    core_version.require_trained_core()
    monkeypatch.setattr(core_version, "find_spec", lambda name: None)
    core_version.require_trained_core()


@cache
def trained(flags: str, core: Path | None = None) -> tuple[int, str, list[float]]:
    """Exit status, output and losses of a run on two ranks, with a megatron.core in front of the installed one."""
    path = os.pathsep.join(map(str, filter(None, (core, ROOT))))
    done = subprocess.run(
        [sys.executable, *([] if "--dry-run" in flags else LAUNCHER), str(ROOT / "pretrain_gpt.py"), *MODEL.split(),
         *flags.split()],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=500,
    )  # fmt: skip
    losses = [float(each) for each in re.findall(r"lm loss: (\S+)", done.stdout)]
    return done.returncode, done.stdout + done.stderr, losses


@pytest.mark.parametrize("flags", [f"{CASES['2bw']} --dry-run 2", pytest.param(CASES["2bw"], marks=pytest.mark.full)])
def test_a_start_says_so(tmp_path, flags):
    core_of(tmp_path, "0.15.3")
    status, said, _ = trained(flags, tmp_path)
    assert status != 0 and "error: megatron.core 0.15.3 of" in said


@pytest.fixture(scope="module")
def fetched(request, tmp_path_factory) -> Path:
    """A folder with a megatron.core: one that is there, or a version of the package registry."""
    if isinstance(request.param, Path):
        return request.param
    folder = tmp_path_factory.mktemp("core")
    command = ("-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder))
    wanted = f"megatron-core=={request.param}"
    done = subprocess.run([sys.executable, *command, wanted], capture_output=True, text=True, timeout=300)
    if done.returncode:
        pytest.skip(f"{wanted} cannot be had from the package registry: {done.stderr.strip().splitlines()[-1]}")
    return folder


NEWEST = pytest.param(
    Path(CHECKOUT or "."), id="newest",
    marks=pytest.mark.skipif(CHECKOUT is None, reason="MEGATRON_LM names no checkout of Megatron-LM"),
)  # fmt: skip
OF_CORES = pytest.mark.parametrize("fetched", ["0.16.0", "0.16.1", NEWEST, *CORES], indirect=True, ids=str)


@pytest.mark.full
@OF_CORES
@pytest.mark.parametrize("case", CASES)
def test_a_core_trains_alike_or_is_refused(fetched, case):
    """Losses are those with the installed version."""
    status, said, losses = trained(CASES[case], fetched)
    version = core_version.core_version(fetched / "megatron" / "core")
    if version[:2] not in core_version.TRAINED:
        assert status != 0 and f"megatron.core {core_version.dotted(version)} of" in said
        return
    assert (status, len(losses)) == (0, 3), said
    assert losses == pytest.approx(trained(CASES[case])[2], rel=1e-6)


@pytest.mark.full
@OF_CORES
def test_a_run_goes_on_from_its_checkpoint(fetched, tmp_path):
    """The third iteration has the loss that it had without an interruption."""
    flags = f"{CASES['experts, latents and further tokens']} --save {tmp_path} --save-interval 2 --exit-interval 2"
    first = trained(flags, fetched)
    assert (first[0], len(first[2])) == (0, 2), first[1]
    status, said, losses = trained(flags.replace("--save ", f"--load {tmp_path} --save "), fetched)
    assert (status, losses) == (0, trained(CASES["experts, latents and further tokens"], fetched)[2][2:]), said


@pytest.mark.full
@OF_CORES
def test_a_hybrid_model_trains_as_the_gpt(fetched):
    """Where the core has it; else the flag is refused by name."""
    version = core_version.core_version(fetched / "megatron" / "core")
    status, said, losses = trained(HYBRID, fetched)
    if not core_version.TRAINED[version[:2]].has_hybrid_model:
        assert status != 0 and "needs megatron.core 0.18 or later" in said
        return
    assert status == 0, said
    assert losses == trained(UNMASKED, fetched)[2] and len(losses) == 3
