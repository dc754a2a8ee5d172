"""This project's pipeline schedules in a user's own checkout or fork of Megatron-LM.

Problem: most users train with their own Megatron-LM: their models, data, arguments, checkpoints and logs. A schedule
that needs another program is of no use to them.

Solution: their training runs as it is, and a few functions of `megatron.training` are replaced when it starts. Either a
launcher does it,

    torchrun ... -m megatron.pipeline.dropin pretrain_gpt.py <their flags> --pipeline-schedule 2bw

or one import at the top of the script, before anything of Megatron is imported:

    import megatron.pipeline.dropin
    megatron.pipeline.dropin.install()

Without `--pipeline-schedule` training is theirs, untouched. Nothing of this room is imported by the other rooms.
"""

_installed = False


def install(*, quiet: bool = False) -> None:
    """Put the schedules into `megatron.training`; again is free. Call before the first import of Megatron.

    Rank 0 writes a line that says which Megatron-LM was found, and one for whatever is unusual about it. On a machine
    without CUDA `cpu.py` makes their training run on the CPU; with CUDA nothing of torch, of megatron.core or of the
    environment is changed.

    Args:
        quiet: no lines; for processes that a rank starts.

    Raises:
        ValueError: there is no Megatron-LM here, or not one whose functions could be replaced, or something that it
            imports is missing.
    """
    global _installed
    if _installed:
        return
    from megatron.pipeline.dropin import cpu, hooks, origin
    from megatron.pipeline.dropin.sentences import say

    found = origin.find()
    origin.check(found)
    if not quiet:
        say(str(found))
        for note in origin.notes(found):
            say(f"note: {note}")
    try:
        cpu.install(quiet=quiet)
        hooks.install_hooks()
    except ImportError as error:
        raise ValueError(origin.explain(found, error)) from error
    _installed = True
