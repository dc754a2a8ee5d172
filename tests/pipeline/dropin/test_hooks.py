"""What is put in place: where a function is held, what each wrapper hands on, and nothing without a schedule."""

import sys
from contextlib import contextmanager
from functools import partial
from types import ModuleType, SimpleNamespace

import pytest

from megatron.pipeline.dropin import hooks
from tests.pipeline.dropin.arguments import arguments


class Recorder:
    """A session that notes what is asked of it."""

    def __init__(self, *, steps_itself=True):
        self.called = []
        self.steps_itself = steps_itself
        self.checkpoints = None
        self.is_saving = False

    def __getattr__(self, name):
        def call(*args, **named):
            self.called.append(name)
            return name

        return call


@pytest.fixture
def session(monkeypatch):
    recorder = Recorder()
    monkeypatch.setattr(hooks, "_session", recorder)
    return recorder


@pytest.fixture
def no_guard(monkeypatch):
    @contextmanager
    def unguarded(session):
        yield

    monkeypatch.setattr(hooks, "_guarded", unguarded)


def test_a_function_is_replaced_wherever_megatrons_modules_hold_it(monkeypatch):
    """Under another name, too; in nobody else's module."""
    original = lambda: "theirs"  # noqa: E731
    modules = {}
    for name in ("megatron.training.one", "megatron.training.two", "megatron.core.three", "elsewhere"):
        module = modules[name] = ModuleType(name)
        module.__file__ = f"{name}.py"
        module.known_as = original
        monkeypatch.setitem(sys.modules, name, module)
    hooks.replace(modules["megatron.training.one"], "known_as", lambda theirs: f"ours, around {theirs()}")
    said = {name: module.known_as() for name, module in modules.items()}
    assert said["megatron.training.one"] == said["megatron.training.two"] == "ours, around theirs"
    assert said["megatron.core.three"] == said["elsewhere"] == "theirs"
    with pytest.raises(ValueError, match="has no absent, which the schedules replace"):
        hooks.replace(modules["megatron.training.one"], "absent", lambda theirs: theirs)


def test_without_a_schedule_each_wrapper_is_the_original(monkeypatch):
    """All of them hand on what they were given, and return what it returned."""
    monkeypatch.setattr(hooks, "_session", None)
    wrappers = [around for names in hooks.NEEDED.values() for around in names.values()]
    wrappers += [hooks._known_on_all_ranks, hooks._with_agreed_requests]
    others = {hooks._with_our_flags, hooks._with_our_rules, hooks._with_no_other_file, hooks._with_agreed_requests,
              hooks._asking_for_both_versions}  # fmt: skip
    for around in set(wrappers) - others:
        assert around(lambda *args, **named: (args, named), 1, 2, key=3) == ((1, 2), {"key": 3}), around
    assert hooks._with_agreed_requests(lambda: "handler") == "handler"
    load = hooks._asking_for_both_versions(lambda *args, **named: (args, named), "folder", "args", rank0=True)
    assert load == (("folder", "args"), {"rank0": True, "sharded_state_dict": None})


def test_a_save_drains_first_and_is_known_as_one(session):
    """Also if it fails."""

    def save(*args):
        assert session.called == ["drain"] and session.is_saving
        raise OSError("full")

    with pytest.raises(OSError, match="full"):
        hooks._drained_and_saved(save, 7)
    assert not session.is_saving


@pytest.mark.parametrize("status", [0, 16, None])
def test_an_exit_status_survives(status, session, no_guard):
    """The loop's: launchers tell by it why a job has ended. The pipeline is drained first."""

    def train():
        raise SystemExit(status)

    with pytest.raises(SystemExit) as raised:
        hooks._to_the_end(train)
    assert raised.value.code == status and session.called == ["finish"]


def test_an_error_does_not_drain(session, no_guard):
    """Other ranks may hang; the guard ends them."""

    def train():
        raise RuntimeError("lost")

    with pytest.raises(RuntimeError, match="lost"):
        hooks._to_the_end(train)
    assert session.called == []


def test_checkpoints_of_others_pass_by(session):
    """Only the run's own has chunks, optimizer and scheduler."""
    load = partial(hooks._with_both_versions_loaded, lambda *args, **named: (5, 0))
    assert load(["chunk"], None, None) == load(model=["chunk"]) == (5, 0) and session.called == []
    assert load(["chunk"], "optimizer", "scheduler", strict=True) == (5, 0)
    assert session.called == ["take_parts", "loaded"]


def test_what_reports_say_is_asked_of_no_rank(session):
    """Where the engine steps; elsewhere it is reduced, as before."""
    reduce = partial(hooks._known_on_all_ranks, lambda value, group=None: f"reduced {value}")
    assert reduce(1.5, group="mp") == 1.5
    session.steps_itself = False
    assert reduce(1.5, group="mp") == "reduced 1.5"


def test_requests_to_stop_go_through_the_session(session):
    handler = SimpleNamespace(_signal_received=True, signals_received=lambda: ["theirs"])
    assert hooks._with_agreed_requests(lambda: handler).signals_received() == ["agrees_to_stop"]
    session.steps_itself = False
    assert hooks._with_agreed_requests(lambda: handler).signals_received() == ["theirs"]


def test_their_rule_about_queues_is_asked_as_on_blackwell(monkeypatch):
    """With a schedule; it says by itself how many it needs. Without, on the machine that there is."""
    asked = []
    module = ModuleType("megatron.training.rules")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    module.get_device_arch_version = lambda: 9

    def validate_args(args):
        asked.append(module.get_device_arch_version())

    validate_args.__module__ = module.__name__
    monkeypatch.setattr(hooks, "_prepare", lambda args: None)
    for flags in ("--pipeline-schedule 2bw", ""):
        hooks._with_our_rules(validate_args, arguments(flags))
    assert asked == [10, 9] and module.get_device_arch_version() == 9


def test_a_file_in_place_of_the_command_line(monkeypatch, capsys):
    """It would take our flags away in silence."""
    parse = partial(hooks._with_no_other_file, lambda: SimpleNamespace(yaml_cfg="run.yaml"))
    monkeypatch.setattr(sys, "argv", ["train.py", "--yaml-cfg", "run.yaml"])
    assert parse().yaml_cfg == "run.yaml"
    monkeypatch.setattr(sys, "argv", ["train.py", "--yaml-cfg", "run.yaml", "--pipeline-schedule=2bw"])
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(SystemExit) as raised:
        parse()
    assert raised.value.code == 2 and "--yaml-cfg run.yaml takes the place" in capsys.readouterr().err
