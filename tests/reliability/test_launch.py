"""How tests start jobs."""

import sys

from tests.reliability import launch


def test_a_job_imports_what_this_process_imports(tmp_path, monkeypatch):
    """Also from a folder that only PYTHONPATH names, as where packages lie beside the Python's own."""
    beside, directory = tmp_path / "beside", tmp_path / "job"
    beside.mkdir()
    directory.mkdir()
    (beside / "lies_beside.py").touch()
    monkeypatch.setenv("PYTHONPATH", str(beside))
    with launch.Job([sys.executable, "-c", "import lies_beside, megatron.documents"], directory=directory) as job:
        job.wait(timeout=60).assert_succeeded()
