"""`backend.install`: megatron.core on a machine without CUDA, and nothing replaced where there is CUDA."""

import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

from megatron import backend

backend.install()

from megatron.backend import cpu, fixes

on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="the stand-ins exist only where there is no CUDA")


def run_python(program: str) -> str:
    """What it writes to stderr."""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    return result.stderr


@on_cpu
def test_late_installation_is_refused(monkeypatch):
    """Where megatron.core was imported first, install() says what to do instead of failing somewhere later."""
    monkeypatch.setattr(backend, "_installed", False)
    with pytest.raises(RuntimeError, match=r"megatron\.core was imported before megatron\.backend\.install\(\)"):
        backend.install()


@pytest.mark.full
@on_cpu
def test_installation_is_silent_repeatable_and_leaves_compilation_alone(monkeypatch):
    """Twice is once; torch.compile is what it was; no warning about missing GPU libraries is printed. Work gets 32
    hardware queues, unless the user has set another number."""
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    said = run_python(
        "import os, torch\ncompile_function, queues = torch.compile, '32'\n"
        "if child := os.fork():\n"
        "    assert os.waitpid(child, 0)[1] == 0\n"
        "else:\n"
        "    os.environ['CUDA_DEVICE_MAX_CONNECTIONS'] = queues = '12'\n"
        "from megatron import backend\nbackend.install(); backend.install()\n"
        "assert torch.compile is compile_function and backend.is_installed()\n"
        "assert not torch.cuda.is_available() and os.environ['CUDA_DEVICE_MAX_CONNECTIONS'] == queues"
    )
    assert said == ""


@on_cpu
def test_factories_take_the_name_cuda():
    """Every tensor factory that megatron.core calls with device="cuda" makes a CPU tensor."""
    assert torch.zeros(2, device="cuda").device.type == "cpu"
    assert torch.tensor([1.0], dtype=torch.float, device="cuda").device.type == "cpu"
    assert torch.empty((1,), device=torch.cuda.current_device()).device.type == "cpu"
    assert torch.arange(3, device=torch.device("cuda")).tolist() == [0, 1, 2]
    assert torch.ones_like(torch.zeros(2), device="cuda").sum() == 2
    assert torch.zeros(1).cuda(torch.cuda.current_device()).device.type == "cpu"


@on_cpu
def test_a_device_as_context_is_obeyed_by_factories():
    """transformers builds models within `torch.device("meta")`: a factory that does not obey leaves garbage there."""
    with torch.device("meta"):
        made = [torch.arange(3), torch.empty(3), torch.nn.Linear(2, 2).weight]
    assert all(each.is_meta for each in made), made


@on_cpu
def test_tracker_states_differ_and_are_kept():
    """The random-number tracker forks: inside other numbers than outside, and the outside stream goes on unchanged."""
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, model_parallel_cuda_manual_seed

    def draws(tensor_rank: int) -> tuple[float, float, float]:
        model_parallel_cuda_manual_seed(7, tp_rank=tensor_rank, ep_rank=0, etp_rank=0)
        before = torch.rand(1).item()
        with get_cuda_rng_tracker().fork():
            inside = torch.rand(1).item()
        return before, inside, torch.rand(1).item()

    first, second = draws(0), draws(1)
    assert first[0] == second[0] and first[2] == second[2]
    assert first[1] != second[1] and first[1] != first[0]
    torch.manual_seed(7)
    assert [first[0], first[2]] == [torch.rand(1).item(), torch.rand(1).item()]


@on_cpu
def test_autocast_named_cuda_casts():
    """A region that megatron.core opens for "cuda" casts on the CPU."""
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16


@on_cpu
def test_streams_and_events_run_at_once():
    """What modules do with streams and events on CUDA is harmless here."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        event = stream.record_event()
    event.synchronize()
    torch.cuda.synchronize()
    assert event.query()


@pytest.mark.gpu
def test_nothing_is_replaced_on_cuda():
    """With CUDA the functions of torch are torch's own."""
    run_python(
        "import torch\n"
        "def functions():\n"
        "    return [torch.zeros, torch.compile, torch.cuda.current_device, torch.Tensor.type, torch.autocast]\n"
        "kept = functions()\n"
        "from megatron import backend\nbackend.install()\n"
        "assert all(a is b for a, b in zip(kept, functions()))"
    )


@on_cpu
def test_core_whose_fuser_has_no_switch(monkeypatch):
    """Before 0.16 the fuser is what torch.compile is when megatron.core is imported: the identity."""
    from megatron.core import jit

    monkeypatch.delattr(jit, "disable_jit_fuser")
    with cpu.import_stand_ins():
        assert torch.compile(len) is len


@pytest.mark.parametrize("has_format", [True, False])
def test_what_a_core_has_not_is_not_repaired(has_format, monkeypatch):
    """Before 0.15 the distributed optimizer has no state in which tied embeddings could lie in the wrong place."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    repaired = []
    for name in [name for name in vars(fixes) if name.startswith(("_repair_", "repair_"))]:
        monkeypatch.setattr(fixes, name, lambda *which, name=name, **options: repaired.append(name))
    if not has_format:
        monkeypatch.delattr(DistributedOptimizer, "sharded_param_state_fully_reshardable")
    fixes.apply()
    assert ("_repair_places_in_buckets" in repaired) is has_format and {"_repair_experts", "repair_attention"} <= {
        *repaired
    }
