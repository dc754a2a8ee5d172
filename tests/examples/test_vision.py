"""The examples that make data of packages: digits by class, and reviews."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy
import pytest

ROOT = Path(__file__).resolve().parents[2]


def prepared(folder: Path, *words: str) -> subprocess.CompletedProcess:
    command = [sys.executable, str(ROOT / "examples" / "digits.py"), "--folder", str(folder), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_digits_by_class(tmp_path):
    """Each image of the classes is in one of the three files, with labels from 0 on; the same every time."""
    load_digits = pytest.importorskip("sklearn.datasets").load_digits
    assert prepared(tmp_path / "a", "--classes", "5-9").returncode == 0
    assert prepared(tmp_path / "b", "--classes", "5-9").returncode == 0
    digits, found = load_digits(), []
    for name in ("train", "validation", "test"):
        with numpy.load(tmp_path / "a" / f"{name}.npz") as first, numpy.load(tmp_path / "b" / f"{name}.npz") as second:
            assert numpy.array_equal(first["images"], second["images"])
            assert first["images"].min() >= -1 and first["images"].max() <= 1 and first["images"].dtype == "float32"
            found += zip(map(bytes, first["images"]), first["labels"].tolist(), strict=True)
    chosen = digits.target >= 5
    images = map(bytes, (digits.images[chosen] / 8 - 1).astype("float32"))
    assert sorted(found) == sorted(zip(images, (digits.target[chosen] - 5).tolist(), strict=True))


@pytest.mark.parametrize("classes", ["4", "x", "3-12", "1,1", "5-"])
def test_classes_that_are_none(tmp_path, classes):
    """One sentence, and nothing is written."""
    result = prepared(tmp_path / "a", "--classes", classes)
    assert result.returncode == 2 and f"--classes {classes} are " in result.stderr
    assert not (tmp_path / "a").exists()


@pytest.mark.full
def test_from_digits_to_classes(tmp_path):
    """examples/vision.sh trains three times and draws; with the weights of other digits the loss ends lower."""
    pytest.importorskip("sklearn")

    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "OUTPUT": str(tmp_path), "PYTHONPATH": str(ROOT), "EPOCHS": "4", "PATH": path}
    subprocess.run(["bash", str(ROOT / "examples/vision.sh")], check=True, timeout=500, env=environment)
    ends = {}
    for name in ("tuning", "scratch"):
        records = [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        ends[name] = next(record["test_loss"] for record in records if "test_loss" in record)
    assert ends["tuning"] < ends["scratch"] and (tmp_path / "loss.png").exists()
