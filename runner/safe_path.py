"""Python programs that this one starts take no file of the working directory for a library."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

# Where Python starts as ``python -c``, as multiprocessing does it, it otherwise looks for modules in the working directory
# first: with a file types.py there it does not even come up.
VARIABLE = "PYTHONSAFEPATH"


@contextmanager
def safe_path() -> Iterator[None]:
    """For all that is started meanwhile and inherits the environment."""
    if sys.flags.safe_path:  # the user's own wish, which is handed on as it was given
        yield
        return
    os.environ[VARIABLE] = "1"
    try:
        yield
    finally:
        os.environ.pop(VARIABLE, None)


def as_given() -> dict[str, str]:
    """The environment without that: for a command that is the user's own, and for this one from its beginning."""
    return {name: value for name, value in os.environ.items() if sys.flags.safe_path or name != VARIABLE}
