"""This project's pipeline schedules in a user's own checkout or fork of Megatron-LM.

Problem: most users train with their own Megatron-LM, with their own models, data, arguments, checkpoints and logs. A
schedule that needs another program is of no use to these users.

Solution: the user's training runs unchanged, and a few functions of `megatron.training` are replaced when the training
starts. Either a launcher replaces the functions,

    torchrun ... -m megatron.pipeline.dropin pretrain_gpt.py <their flags> --pipeline-schedule 2bw

or the script does so by one import at its top, before it imports anything of Megatron:

    import megatron.pipeline.dropin
    megatron.pipeline.dropin.install()

Without `--pipeline-schedule` the training is Megatron-LM's own, unchanged. No other folder imports this one.
"""

_installed = False


def install(*, quiet: bool = False) -> None:
    """Put the schedules into `megatron.training`. Call it before the first import of Megatron; later calls are no-ops.

    Rank 0 writes a line that names the Megatron-LM that was found, and one line for each of its unusual properties. On
    a machine without CUDA `cpu.py` makes the user's training run on the CPU. With CUDA torch, megatron.core and the
    environment stay unchanged.

    Args:
        quiet: whether to write no lines; for processes that a rank starts.

    Raises:
        ValueError: no Megatron-LM is found, or the functions of the one found cannot be replaced, or a package that it
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
