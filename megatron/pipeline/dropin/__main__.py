"""The entry point of `python -m megatron.pipeline.dropin SCRIPT ...`."""

from megatron.pipeline.dropin.launcher import main

if __name__ == "__main__":
    main()
