"""A loaded model at work: the target's loop in its own thread, and the draft that answers it. No Ray in here."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import replace

from outrider.workers.errors import WorkerError
from outrider.workers.messages import Harvest, Row, RowFailure, RowResult
from outrider.workers.verify import Verifier


class TargetServer:
    """Runs a verifier as long as there are rows, and hands out what has ended.

    ``submit`` and ``harvest`` may be called from any thread; the verifier is touched by its own thread only.
    """

    def __init__(self, verifier: Verifier) -> None:
        self._verifier = verifier
        self._changed = threading.Condition()
        self._inbox: list[Row] = []
        self._ended: list[RowResult | RowFailure] = []
        self._failure: BaseException | None = None
        threading.Thread(target=self._run, name="verify", daemon=True).start()

    def submit(self, rows: Sequence[Row]) -> None:
        with self._changed:
            self._inbox.extend(rows)
            self._changed.notify_all()

    def harvest(self, timeout: float) -> Harvest:
        """What has ended since the last harvest; waits for something to end, but no longer than the timeout."""
        deadline = time.monotonic() + timeout
        with self._changed:
            self._changed.wait_for(lambda: self._ended or self._failure, timeout=max(0.0, deadline - time.monotonic()))
            # What ended before the failure is good, and goes out first.
            if self._failure is not None and not self._ended:
                raise WorkerError(f"the target failed: {self._failure!r}") from self._failure
            ended, self._ended = tuple(self._ended), []
            return Harvest(ended, replace(self._verifier.progress))

    def _run(self) -> None:
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._inbox or not self._verifier.idle)
                    rows, self._inbox = self._inbox, []
                self._verifier.add(rows)
                ended = self._verifier.round()
                if ended:
                    with self._changed:
                        self._ended.extend(ended)
                        self._changed.notify_all()
        except BaseException as error:
            with self._changed:
                self._failure = error
                self._changed.notify_all()
