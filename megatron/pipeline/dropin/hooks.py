"""The replacements in `megatron.training`: the project's flags and schedule, and a drain before weights are read.

Megatron-LM has no extension point. Its modules call one another's functions by names at module level, so a function is
replaced in every module that has imported it. Each replacement calls the original; without `--pipeline-schedule` the
replacement does nothing else.
"""

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any

from megatron.pipeline.dropin.flags import add_flags, asks_for_schedule
from megatron.pipeline.dropin.sentences import errors_end_the_job

_BLACKWELL = 10
_session = None  # this process's session; None if its arguments name no schedule


def install_hooks() -> None:
    """Import `megatron.training` and replace the functions of `NEEDED`, and those that only some versions have."""
    from megatron.training import arguments, checkpointing, training

    modules = {"arguments.py": arguments, "checkpointing.py": checkpointing, "training.py": training}
    needed = [(modules[file], name, ours) for file, names in NEEDED.items() for name, ours in names.items()]
    where_there = (  # functions that only some versions have, in which all ranks wait for each other
        (training, "logical_and_across_model_parallel_group", _known_on_all_ranks),
        (training, "reduce_max_stat_across_model_parallel_group", _known_on_all_ranks),
        (training, "get_signal_handler", _with_agreed_requests),
    )
    for module, name, ours in (*needed, *(each for each in where_there if hasattr(each[0], each[1]))):
        replace(module, name, ours)


def replace(module: ModuleType, name: str, ours: Callable) -> None:
    """Put `ours` in the place of a function in all of Megatron-LM's modules, and in the script.

    `ours` gets the original function as its first argument.

    Raises:
        ValueError: `module` has no function `name`.
    """
    original = getattr(module, name, None)
    if original is None:
        raise ValueError(
            f"{module.__file__} has no {name}, which the schedules replace; use another Megatron-LM, or a fork that "
            "keeps the name"
        )
    replacement = functools.wraps(original)(functools.partial(ours, original))
    for holder_name, holder in list(sys.modules.items()):
        if holder_name == "__main__" or holder_name.split(".")[:2] == ["megatron", "training"]:
            for key, value in list(vars(holder).items()):
                if value is original:
                    setattr(holder, key, replacement)


def _with_our_flags(original: Callable, parser):
    return add_flags(original(parser))


def _with_no_other_file(original: Callable, *args: Any, **named: Any):
    """Refuse a file of arguments beside the project's flags: the file replaces the whole command line."""
    parsed = original(*args, **named)
    file = getattr(parsed, "yaml_cfg", None)
    with errors_end_the_job():
        given = {word.split("=")[0] for word in sys.argv} & {"--pipeline-schedule", "--pipeline-program"}
        if given and file is not None:
            raise ValueError(
                f"--yaml-cfg {file} takes the place of the command line, with {given.pop()} in it; give flags "
                "instead of the file"
            )
    return parsed


def _with_our_rules(original: Callable, args, *further, **named):
    """Refuse combinations of arguments that are not supported.

    The arguments are complete here, and no process group exists yet.
    """
    with _any_number_of_queues(original, args):
        validated = original(args, *further, **named)
    _prepare(args if validated is None else validated)
    return validated


@contextmanager
def _any_number_of_queues(validate: Callable, args) -> Iterator[None]:
    """A block in which Megatron-LM validates as on a Blackwell GPU, where it accepts any number of hardware queues.

    Before Blackwell, Megatron-LM demands one hardware queue for the overlap of tensor parallelism. The schedule checks
    the number of queues that it needs by itself (`start.py`).
    """
    names = vars(sys.modules[validate.__module__])
    generation = names.get("get_device_arch_version")
    if not asks_for_schedule(args) or generation is None:
        yield
        return
    names["get_device_arch_version"] = lambda: _BLACKWELL
    try:
        yield
    finally:
        names["get_device_arch_version"] = generation


def _prepare(args) -> None:
    global _session
    if _session is not None and _session.is_of(args):
        return
    from megatron.pipeline.dropin.refusals import require_supported

    with errors_end_the_job():
        require_supported(args)
        if not asks_for_schedule(args):
            _session = None
            return
        from megatron.pipeline.dropin.session import Session
        from megatron.pipeline.dropin.start import prepare

        _session = Session(args, prepare(args))


def _with_our_schedule(original: Callable, *which: Any, **named: Any) -> Callable[..., list]:
    theirs, session = original(*which, **named), _session
    if session is None:
        return theirs

    def run(**call: Any) -> list:
        if call.get("forward_only"):
            session.drain()
            return theirs(**call)
        return session.run_batch(call)

    return run


def _with_engine_update(original: Callable, *args: Any, **named: Any):
    built = original(*args, **named)
    if _session is not None:
        with errors_end_the_job():
            _session.take_parts(*built)
            _session.begin()
    return built


def _with_both_versions_loaded(original: Callable, *args: Any, **named: Any):
    # The run's own checkpoint is loaded with (chunks, optimizer, scheduler); other checkpoints are read, too.
    is_of_the_run = len(args) >= 3 and args[1] is not None
    if _session is None or not is_of_the_run:
        return original(*args, **named)
    with errors_end_the_job():
        _session.take_parts(*args[:3])
    iteration, *rest = original(*args, **named)
    _session.loaded(iteration)
    return (iteration, *rest)


def _asking_for_both_versions(original: Callable, load_dir, args, rank0=False, sharded_state_dict=None, **named: Any):
    checkpoints = None if _session is None else _session.checkpoints
    if checkpoints is not None and not rank0 and sharded_state_dict is not None:
        checkpoints.ask_for(sharded_state_dict, starts_anew=getattr(args, "finetune", False))
    found = original(load_dir, args, rank0=rank0, sharded_state_dict=sharded_state_dict, **named)
    if checkpoints is not None and found[0] is not None:
        if rank0:
            checkpoints.note_common(found[1], found[0])
        else:
            checkpoints.note_loaded(found[0])
    return found


def _with_both_versions(original: Callable, *args: Any, **named: Any):
    state = original(*args, **named)
    if _session is not None:
        _session.add_to_checkpoint(state)
    return state


def _drained_and_saved(original: Callable, *args: Any, **named: Any):
    session = _session
    if session is None:
        return original(*args, **named)
    session.drain()
    session.is_saving = True
    try:
        return original(*args, **named)
    finally:
        session.is_saving = False


def _to_the_end(original: Callable, *args: Any, **named: Any):
    """Drain the pipeline when the loop returns, or raises SystemExit after a request to stop.

    After any other error the pipeline cannot be drained, and the guard ends all ranks.
    """
    session = _session
    if session is None:
        return original(*args, **named)
    result, leaves = None, None
    with _guarded(session):
        try:
            result = original(*args, **named)
        except SystemExit as error:
            leaves = error
        session.finish()
    if leaves is None:
        return result
    try:
        raise leaves  # outside the guard, which takes an exit status other than 0 for a failure
    finally:
        del leaves  # otherwise the exception keeps this frame, and so the data loaders, past the process's end


def _guarded(session):
    import torch

    from megatron.pipeline.runtime.failure import failure_guard

    if not torch.distributed.is_initialized():
        return nullcontext()
    return failure_guard.guard(timeout=session.timeout)


def _known_on_all_ranks(original: Callable, value, *args: Any, **named: Any):
    """Return the value without a reduction if the engine steps.

    The engine's report is equal on all ranks, and a reduction would make the ranks wait.
    """
    if _session is not None and _session.steps_itself:
        return value
    return original(value, *args, **named)


def _with_agreed_requests(original: Callable):
    """Agree on requests to stop through the engine's reductions.

    All ranks read the sum of the requests from the report of the same batch.
    """
    handler, session = original(), _session
    if session is None or not session.steps_itself or not hasattr(handler, "_signal_received"):
        return handler
    return SimpleNamespace(signals_received=lambda: [session.agrees_to_stop(handler._signal_received)])


NEEDED = {
    "arguments.py": {
        "add_megatron_arguments": _with_our_flags,
        "parse_args": _with_no_other_file,
        "validate_args": _with_our_rules,
    },
    "checkpointing.py": {
        "generate_state_dict": _with_both_versions,
        "_load_base_checkpoint": _asking_for_both_versions,
    },
    "training.py": {
        "get_forward_backward_func": _with_our_schedule,
        "setup_model_and_optimizer": _with_engine_update,
        "load_checkpoint": _with_both_versions_loaded,
        "save_checkpoint": _drained_and_saved,
        "train": _to_the_end,
    },
}
"""The functions that are replaced: file of `megatron.training` -> name at module level -> replacement.

`origin` looks for these names before anything is imported.
"""
