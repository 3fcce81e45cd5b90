"""Calls functions as another user of this host, in a child process that drops root's rights; so only root can test it."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

# A uid that no system uses.
GUEST = 54321
only_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can become a second user")


def as_guest(what: Callable[[], object], user: int = GUEST) -> str:
    """The repr of what the function returns as that user, or its exception as text."""
    ear, mouth = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setgid(user)
            os.setuid(user)
            said = repr(what())
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        os.write(mouth, said.encode())
        os._exit(0)
    os.close(mouth)
    with os.fdopen(ear, encoding="utf-8") as stream:
        said = stream.read()
    os.waitpid(child, 0)
    return said
