"""The state of FP8: always off."""

import contextlib


class FP8GlobalStateManager:
    @staticmethod
    def is_fp8_enabled() -> bool:
        return False


@contextlib.contextmanager
def fp8_autocast(enabled: bool = True, **options):
    if enabled:
        raise NotImplementedError("the stand-in of Transformer Engine has no FP8")
    yield
