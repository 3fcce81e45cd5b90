"""Requests to a draft as calls of Ray: between hosts, and where shared memory is not available."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from outrider.workers.draft.transport import DraftFailed, DraftLost, Reply
from outrider.workers.errors import first_line
from outrider.workers.messages import DraftReply, DraftRequest


class CallTransport:
    """Each request is a call of the actor's ``propose``. Works between any two hosts, and adds about a millisecond."""

    name = "calls"

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def ask(self, request: DraftRequest) -> Reply:
        try:
            return _PendingCall(self._actor.propose.remote(request))
        except RayError as error:
            raise DraftLost(first_line(error)) from error

    def reconfigure(self, cores: Sequence[int], draft_ahead: bool, timeout: float) -> None:
        try:
            ray.get(self._actor.reconfigure.remote(cores, draft_ahead), timeout=timeout)
        except GetTimeoutError:
            return  # the call stays queued: the draft reconfigures later
        except RayError as error:
            raise DraftLost(first_line(error)) from error


class _PendingCall:
    def __init__(self, future: ray.ObjectRef[DraftReply]) -> None:
        self._future = future

    def ready(self, timeout: float) -> bool:
        done, _ = ray.wait([self._future], timeout=timeout)
        return bool(done)

    def take(self) -> DraftReply:
        try:
            candidates: DraftReply = ray.get(self._future)
            return candidates
        except RayTaskError as error:
            raise DraftFailed(first_line(error)) from error
        except RayError as error:
            raise DraftLost(first_line(error)) from error
