"""How a target's requests reach its draft, and the answers come back: the seam, and Ray's own calls as one way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from outrider.workers.errors import first_line
from outrider.workers.messages import Ask, Candidates


class DraftFailed(Exception):
    """The draft could not answer this request. It lives."""


class DraftLost(Exception):
    """The draft's process is gone, or cannot be reached any more."""


class Reply(Protocol):
    """An answer under way. Both methods may raise ``DraftLost``."""

    def ready(self, timeout: float) -> bool:
        """Whether it is here, or comes within so many seconds."""

    def take(self) -> Candidates:
        """What came, once that is ready; raises ``DraftFailed`` where it is an error."""


class Line(Protocol):
    """To one draft. Requests are answered in the order in which they were made."""

    name: str

    def ask(self, ask: Ask) -> Reply: ...

    def settle(self, cores: Sequence[int], run_ahead: bool, timeout: float) -> None:
        """Have the draft work in another way; returns after the timeout at the latest."""


class CallLine:
    """Each request a call of the actor's ``propose``: works between any two hosts, and takes Ray about a millisecond."""

    name = "calls"

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def ask(self, ask: Ask) -> Reply:
        try:
            return _Call(self._actor.propose.remote(ask))
        except RayError as error:
            raise DraftLost(first_line(error)) from error

    def settle(self, cores: Sequence[int], run_ahead: bool, timeout: float) -> None:
        try:
            ray.get(self._actor.settle.remote(cores, run_ahead), timeout=timeout)
        except GetTimeoutError:
            return  # it will come to it; until then it works as it did
        except RayError as error:
            raise DraftLost(first_line(error)) from error


class _Call:
    def __init__(self, future: ray.ObjectRef[Candidates]) -> None:
        self._future = future

    def ready(self, timeout: float) -> bool:
        done, _ = ray.wait([self._future], timeout=timeout)
        return bool(done)

    def take(self) -> Candidates:
        try:
            candidates: Candidates = ray.get(self._future)
            return candidates
        except RayTaskError as error:
            raise DraftFailed(first_line(error)) from error
        except RayError as error:
            raise DraftLost(first_line(error)) from error
