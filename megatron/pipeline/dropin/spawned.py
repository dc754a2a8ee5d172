"""The main module of a process that a launched script has spawned.

Problem: `multiprocessing` makes a spawned child process import the parent's main module, so that the child knows its
functions and classes. The script alone would be imported without the schedules, and without the layer that a CPU needs.

Solution: the child process imports this module as `__mp_main__`. The module installs the schedules as the launcher
does, without writing lines, and then runs the script's code under the name `__mp_main__`, so the code under
`if __name__ == "__main__"` does not run. The environment holds the script's path, since Python puts this file's name
into `sys.argv[0]` during the import.
"""

if __name__ == "__mp_main__":
    import os
    from pathlib import Path

    from megatron.pipeline import dropin
    from megatron.pipeline.dropin.launcher import SCRIPT_VARIABLE, execute

    dropin.install(quiet=True)
    __file__ = os.environ[SCRIPT_VARIABLE]
    execute(Path(__file__), globals())
