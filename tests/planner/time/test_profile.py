"""The profile's file: written in whole or not at all, read strictly."""

import json

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.planner.time.profile import Spread, load_profile
from tests.planner.profiles import profile


def test_what_was_saved_is_loaded(tmp_path):
    """Every number comes back as it was."""
    made = profile()
    made.save(tmp_path / "deep" / "profile.json")
    assert load_profile(tmp_path / "deep" / "profile.json") == made


def test_a_write_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    """The old profile stays whole, and no torn file beside it."""
    path = tmp_path / "profile.json"
    profile().save(path)
    before = path.read_bytes()

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        profile(sizes=(1,)).save(path)
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: content | {"version": 2}, r"no profile of version 1 \(2\)"),
        (lambda content: content | {"colour": "red"}, "colour"),
        (lambda content: content | {"processes": 0}, "processes"),
        (lambda content: content | {"dtype": "float64"}, "dtype"),
        (lambda content: [content], "no profile of version 1"),
        (lambda content: content | {"version": True}, r"no profile of version 1 \(True\)"),
        (lambda content: content | {"processes": True}, "processes is True: input should be a valid integer"),
        (lambda content: content | {"shares_processor": 1}, "shares_processor is 1: input should be a valid boolean"),
        (lambda content: content | {"machine": content["machine"] | {"threads": "1"}}, "machine.threads is '1'"),
        (lambda content: {key: value for key, value in content.items() if key != "model"}, "model"),
    ],
)
def test_another_form_is_refused_by_name(tmp_path, change, message):
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(change(json.loads(profile().model_dump_json()))))
    with pytest.raises(ValueError, match=message) as refusal:
        load_profile(path)
    assert "profile_model.py" in str(refusal.value)


def test_a_torn_file_is_refused(tmp_path):
    path = tmp_path / "profile.json"
    twice = b'{"version": 1, "version": 1}'
    for content in (profile().model_dump_json()[:1000].encode(), b"", b"\x80\x02}q", b"[" * 10**5, twice):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"profile.json is no JSON.*profile_model.py"):
            load_profile(path)


@given(st.lists(st.floats(0, 1e3), min_size=1, max_size=50))
def test_a_spread_has_median_and_deciles(samples):
    """Those of numpy."""
    spread = Spread.of(samples)
    assert (spread.low, spread.median, spread.high) == pytest.approx(numpy.percentile(samples, [10, 50, 90]))
    assert spread.count == len(samples)


def test_nothing_timed_is_no_spread():
    with pytest.raises(ValueError, match="one iteration or more"):
        Spread.of([])


def test_halves_come_together(tmp_path):
    """I, W and what is held between them, of a stage: all are there or none, and a file has them again."""
    whole = profile(halves=True)
    whole.save(tmp_path / "profile.json")
    loaded = load_profile(tmp_path / "profile.json")
    assert loaded == whole and loaded.stages[0].halves is not None
    assert profile().stages[0].halves is None
    content = json.loads((tmp_path / "profile.json").read_text())
    del content["stages"][0]["deferred_bytes"]
    (tmp_path / "profile.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match="backward_input, backward_weight and deferred_bytes come together"):
        load_profile(tmp_path / "profile.json")
