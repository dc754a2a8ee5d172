"""How many examples a property draws, and which: in the usual selection always the same, so that a test that passes
passes again; with `--full` six times as many, drawn anew each time."""

from hypothesis import HealthCheck, settings

_BASE = 100  # a profile's `max_examples` is the percentage of a test's number that it draws
_WHATEVER_THE_LOAD = (HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large)


def load_profile(*, full: bool) -> None:
    """Choose the profile. Has to be called before the first test module is imported."""
    common = {"deadline": None, "suppress_health_check": _WHATEVER_THE_LOAD}  # other processes share the cores
    settings.register_profile("usual", max_examples=_BASE // 2, derandomize=True, **common)
    settings.register_profile("full", max_examples=_BASE * 3, **common)
    settings.load_profile("full" if full else "usual")


def draws(number: int, *, suppress: tuple[HealthCheck, ...] = ()) -> settings:
    """The settings of a property of which `number` examples are a fair number: half as many in the usual selection."""
    most = max(1, number * settings.default.max_examples // _BASE)
    return settings(max_examples=most, suppress_health_check=(*_WHATEVER_THE_LOAD, *suppress))
