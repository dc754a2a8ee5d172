"""Calibrations come from the package or a file; a wrong one is named with its fault."""

import json

import pytest

from megatron.planner.time.calibration import DEFAULT_NAME, FITTED, NAMES, Calibration, Constants, load_calibration


def test_those_of_the_package():
    assert DEFAULT_NAME in NAMES
    for name in NAMES:
        found = load_calibration(name)
        assert found.name == name and found.about and found.date
        assert set(found.unexplained) < set(found.entries)
        assert all(getattr(found.fitted, each) > 0 for each in FITTED)


def test_a_file(tmp_path):
    path = tmp_path / "mine.json"
    load_calibration().model_copy(update={"name": "mine"}).save(path)
    found = load_calibration(str(path))
    assert found.name == "mine" and found.fitted == load_calibration().fitted


def document(**changes: object) -> dict:
    return json.loads(load_calibration().model_dump_json()) | changes


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (document(constants={"product_efficiency": 0.8}), "constants: missing 3 required"),
        (document(constants=document()["constants"] | {"speed": 1}), "constants: .*speed"),
        (document(constants=document()["constants"] | {"memory_efficiency": 1.2}), "memory_efficiency is 1.2"),
        (document(extra=1), "extra"),
        ({"name": "x"}, "about"),
    ],
)
def test_faults_of_a_file(tmp_path, content, reason):
    path = tmp_path / "broken.json"
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=reason):
        load_calibration(str(path))


def test_no_such_calibration():
    with pytest.raises(ValueError, match="there is no calibration 'b200'; give a file, or one of a100"):
        load_calibration("b200")


def test_constants_are_parts_of_one():
    with pytest.raises(ValueError, match="tensor_efficiency is 0"):
        Constants(product_efficiency=0.5, product_overhead=0.0, memory_efficiency=0.5, tensor_efficiency=0.0)
    assert isinstance(load_calibration(), Calibration)
