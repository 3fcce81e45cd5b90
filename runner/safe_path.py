"""Keep the working directory out of the module search path of the Python processes that this one starts."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

# multiprocessing starts ``python -c``, which searches the working directory for modules first: a file types.py there
# would keep it from starting.
VARIABLE = "PYTHONSAFEPATH"


@contextmanager
def safe_path() -> Iterator[None]:
    """Set the variable for the processes that are started meanwhile."""
    if sys.flags.safe_path:  # set by the user; children inherit it anyway
        yield
        return
    os.environ[VARIABLE] = "1"
    try:
        yield
    finally:
        os.environ.pop(VARIABLE, None)


def environment_as_given() -> dict[str, str]:
    """The environment without our variable: for the user's own commands, and for this command when it begins anew."""
    return {name: value for name, value in os.environ.items() if sys.flags.safe_path or name != VARIABLE}
