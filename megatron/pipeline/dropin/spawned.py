"""What a process imports as its main module that a launched script has spawned.

Problem: `multiprocessing` has a spawned child import the parent's main module, so that it knows the functions and
classes there. The script alone would be imported without the schedules, and without the layer that a CPU needs.

Solution: the child imports this module as `__mp_main__`. It does what the launcher does, without the lines, and then
runs the script's code under that name, with what stands under `if __name__ == "__main__"` left out. The environment
says which script, since Python puts this file's name into `sys.argv[0]` for the time being.
"""

if __name__ == "__mp_main__":
    import os
    from pathlib import Path

    from megatron.pipeline import dropin
    from megatron.pipeline.dropin.launcher import SCRIPT_VARIABLE, execute

    dropin.install(quiet=True)
    __file__ = os.environ[SCRIPT_VARIABLE]
    execute(Path(__file__), globals())
