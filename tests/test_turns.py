"""Processes that share the tests: one that is to be alone is, and gets its turn."""

import threading
import time

import pytest

from tests.turns import Turns

PATIENCE = 20.0


def enter(folder, *, alone):
    """Somebody else who wants to enter: whether they are in, and what lets them leave."""
    inside, leave = threading.Event(), threading.Event()

    def visit():
        with Turns(folder).taken(alone=alone):
            inside.set()
            leave.wait(PATIENCE)

    thread = threading.Thread(target=visit)
    thread.start()
    return thread, inside, leave


@pytest.mark.parametrize(
    ("first", "second", "shared"), [(False, False, True), (True, False, False), (False, True, False)]
)
def test_who_is_alone_shares_with_nobody(tmp_path, first, second, shared):
    """Whoever came first; once they leave, the other enters."""
    with Turns(tmp_path).taken(alone=first):
        thread, inside, leave = enter(tmp_path, alone=second)
        assert inside.wait(PATIENCE if shared else 0.2) == shared
    assert inside.wait(PATIENCE)
    leave.set()
    thread.join()


def test_who_is_alone_again_keeps_the_room(tmp_path):
    """Nobody enters between the two, and everybody after them."""
    turns = Turns(tmp_path)
    with turns.taken(alone=True, keep=True):
        thread, inside, leave = enter(tmp_path, alone=False)
    assert not inside.wait(0.2)
    with turns.taken(alone=True):
        assert not inside.wait(0.2)
    assert inside.wait(PATIENCE)
    leave.set()
    thread.join()


def test_who_waits_to_be_alone_is_next(tmp_path):
    """Those who would share come after, though the room is open to them."""
    order = []
    with Turns(tmp_path).taken(alone=False):
        thread, inside, leave = enter(tmp_path, alone=True)
        leave.set()
        time.sleep(0.2)
        order.append(inside.is_set())
    for _ in range(3):
        with Turns(tmp_path).taken(alone=False):
            order.append(inside.is_set())
    thread.join()
    assert order[0] is False and order[-1] is True
