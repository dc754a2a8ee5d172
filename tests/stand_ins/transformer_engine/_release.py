"""The release that the stand-in behaves like: its signatures and its facts."""

import ast
import contextlib
import functools
import inspect
import json
from collections.abc import Callable, Iterator
from pathlib import Path

_DATA = json.loads(Path(__file__).parents[1].joinpath("transformer_engine.json").read_text(encoding="utf-8"))[
    "releases"
]


def with_signatures() -> list[str]:
    """The releases that the stand-in can behave like, oldest first."""
    return [version for version, record in _DATA.items() if "signatures" in record]


def newest() -> str:
    return with_signatures()[-1]


_version = newest()


def fact(name: str) -> object:
    """A fact of the release, of those that pin_transformer_engine.py extracts."""
    return _DATA[_version]["facts"][name]


@contextlib.contextmanager
def release(version: str) -> Iterator[None]:
    """Behave like another release, for megatron.core too, in which modules are made anew."""
    global _version
    from packaging.version import Version

    from megatron.core import utils

    before = _version, utils._te_version
    _version, utils._te_version = version, Version(version)
    try:
        yield
    finally:
        _version, utils._te_version = before


@functools.cache
def signature(version: str, name: str) -> inspect.Signature:
    """The signature of a function of a release. Raises KeyError."""
    [text] = [names[name] for names in _DATA[version]["signatures"].values() if name in names]
    arguments = ast.parse(f"def function{text}: pass").body[0].args
    parameters, kind = [], inspect.Parameter
    defaults = [kind.empty] * (len(arguments.args) - len(arguments.defaults)) + list(map(_value, arguments.defaults))
    parameters += [
        kind(each.arg, kind.POSITIONAL_OR_KEYWORD, default=default)
        for each, default in zip(arguments.args, defaults, strict=True)
    ]
    if arguments.vararg is not None:
        parameters.append(kind(arguments.vararg.arg, kind.VAR_POSITIONAL))
    parameters += [
        kind(each.arg, kind.KEYWORD_ONLY, default=kind.empty if default is None else _value(default))
        for each, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    ]
    if arguments.kwarg is not None:
        parameters.append(kind(arguments.kwarg.arg, kind.VAR_KEYWORD))
    return inspect.Signature(parameters)


def _value(default: ast.expr) -> object:
    try:
        return ast.literal_eval(default)
    except ValueError:
        return ast.unparse(default)


def pinned(function: Callable) -> Callable:
    """Give a function the release's signature: others of its arguments may only have their defaults."""
    known = inspect.signature(function).parameters

    @functools.wraps(function)
    def call(*args, **kwargs):
        of_release = signature(_version, function.__qualname__)
        bound = of_release.bind(*args, **kwargs)
        bound.apply_defaults()
        taken = {}
        for name, value in bound.arguments.items():
            parameter = of_release.parameters[name]
            if parameter.kind is parameter.VAR_KEYWORD:
                taken |= value
            elif name in known:
                taken[name] = value
            elif value is not parameter.default and value != parameter.default:
                raise NotImplementedError(f"the stand-in's {function.__qualname__} has no {name}, which is {value!r}")
        if more := taken.keys() - known.keys():
            raise NotImplementedError(f"the stand-in's {function.__qualname__} has no {', '.join(sorted(more))}")
        return function(**taken)

    return call


class Missing:
    """A name that megatron.core reads when it is imported, and that the stand-in does not have."""

    def __init__(self, *args, **kwargs):
        raise NotImplementedError(f"the stand-in of Transformer Engine has no {type(self).__name__}")


def missing(*names: str) -> list[type[Missing]]:
    """Classes of these names that nobody can make."""
    return [type(name, (Missing,), {}) for name in names]
