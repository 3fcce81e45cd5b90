"""Watches the head of a cluster, and this host's raylet."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from typing import Self

from outrider.runner.hosts.port_check import POLL_SECONDS, check_port, host_and_port

# Ray waits a minute for its head and then ends this process, so we stop the job before that.
SILENCE_SECONDS = 30.0


class Head:
    """The head of a cluster: lost when its port has not answered for ``patience`` seconds, or when this host is cut off.

    When the driver's own raylet (at ``own``) has died, the head ends all actors of the driver, on all hosts.
    """

    def __init__(
        self,
        address: str,
        own: tuple[str, int],
        patience: float = SILENCE_SECONDS,
        poll: float = POLL_SECONDS,
    ) -> None:
        self.address, self._where = address, host_and_port(address)
        self._own = own
        self._patience, self._poll = patience, poll
        # When a check of the port first failed. (Not the time of the last answer: this process may have been suspended.)
        self._silent_since: float | None = None
        self._cut_off: str | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="head", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self._thread.join()

    def answers(self) -> bool:
        """Whether the head answers now. Without it calls of Ray block for a minute or for ever."""
        with suppress(OSError):
            check_port(self._where)
            self._silent_since = None
            return True
        if self._silent_since is None:
            self._silent_since = time.monotonic()
        return False

    @property
    def silent(self) -> bool:
        """Whether the last check of its port failed."""
        return self._silent_since is not None

    def cut_off(self) -> None:
        """The head answers, but has given up this host."""
        self._cut_off = "Ray on this host has died, and with it this job's part in the cluster"

    def lost(self) -> str | None:
        since = self._silent_since
        if self._cut_off is None and since is not None and (seconds := time.monotonic() - since) >= self._patience:
            return f"the head of the cluster at {self.address} has not answered for {seconds:.0f} s"
        return self._cut_off

    def _watch(self) -> None:
        refused = 0
        while not self._closed.wait(self._poll):
            refused = refused + 1 if self._own_is_dead() else 0
            # Twice in a row, and only while the head answers: if both die, the head's loss is the reason to report.
            if self.answers() and refused > 1:
                self.cut_off()

    def _own_is_dead(self) -> bool:
        """Whether the raylet's port refuses connections; one that is only slow is left to the head."""
        try:
            check_port(self._own)
        except OSError as error:
            return isinstance(error, ConnectionRefusedError)
        return False
