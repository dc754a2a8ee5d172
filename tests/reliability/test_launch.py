"""How tests start jobs."""

import sys

from tests.reliability import launch


def test_a_job_imports_what_this_process_imports(tmp_path, monkeypatch):
    """Also from a folder that only PYTHONPATH names, as where packages lie beside the Python's own."""
    (tmp_path / "lies_beside.py").touch()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with launch.Job([sys.executable, "-c", "import lies_beside, megatron.documents"], directory=tmp_path) as job:
        job.wait(timeout=60).assert_succeeded()
