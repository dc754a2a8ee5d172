"""What one host thread knows of another: through conditions (events are made of them) and through queues."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from queue import SimpleQueue
from unittest import mock

from tests.pipeline.runtime.cuda.recording.clocks import joined


@contextmanager
def watched_threads(recorder, modules):
    """In this block conditions pass on what their holders know, and so do the queues of `modules`."""
    enter, leave, wait = threading.Condition.__enter__, threading.Condition.__exit__, threading.Condition.wait

    def learn(condition) -> None:
        with recorder.lock:
            recorder.look()
            joined(recorder.host.clock, condition.__dict__.setdefault("recorded", {}))

    def teach(condition) -> None:
        with recorder.lock:
            joined(condition.__dict__.setdefault("recorded", {}), recorder.host.clock)

    def entered(condition):
        result = enter(condition)
        learn(condition)
        return result

    def left(condition, *exception):
        teach(condition)
        return leave(condition, *exception)

    def waited(condition, timeout=None):
        teach(condition)
        result = wait(condition, timeout)
        learn(condition)
        return result

    class Queue(SimpleQueue):
        def put(self, item):
            with recorder.lock:
                super().put((dict(recorder.host.clock), item))

        def get(self):
            clock, item = super().get()
            with recorder.lock:
                recorder.look()
                joined(recorder.host.clock, clock)
            return item

    with (
        mock.patch.object(threading.Condition, "__enter__", entered),
        mock.patch.object(threading.Condition, "__exit__", left),
        mock.patch.object(threading.Condition, "wait", waited),
    ):
        patches = [mock.patch.object(module, "SimpleQueue", Queue) for module in modules]
        for patch in patches:
            patch.start()
        try:
            yield
        finally:
            for patch in patches:
                patch.stop()
