"""Whether the head of a cluster is still there, and still counts this host in."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from typing import Self

from outrider.runner.hosts.port_check import POLL_SECONDS, check_port, host_and_port

# Ray gives its head a minute to come back, and then ends the process with words of its own.
SILENCE_SECONDS = 30.0


class Head:
    """The head of a cluster: lost when nobody has answered at its port for a while, or when it has given us up.

    Once the driver's own raylet (at ``own``) is dead, the head ends what that driver has started, on all hosts.
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
        # Since when it has not answered at its port: time in which this process stood still says nothing.
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
        """Whether it does at this moment. What Ray is asked while its head is silent, it answers in a minute or never."""
        with suppress(OSError):
            check_port(self._where)
            self._silent_since = None
            return True
        if self._silent_since is None:
            self._silent_since = time.monotonic()
        return False

    @property
    def silent(self) -> bool:
        """Whether it was so the last time that its port was checked."""
        return self._silent_since is not None

    def cut_off(self) -> None:
        """It answers, but no longer counts this host in."""
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
            # Without a head nobody ends anything. Where both die together, one is seen before the other.
            if self.answers() and refused > 1:
                self.cut_off()

    def _own_is_dead(self) -> bool:
        """One that is merely slow is for the head to judge."""
        try:
            check_port(self._own)
        except OSError as error:
            return isinstance(error, ConnectionRefusedError)
        return False
