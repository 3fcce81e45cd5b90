"""The interface of the transports between a target and its draft. No Ray in here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from outrider.workers.messages import DraftReply, DraftRequest


class DraftFailed(Exception):
    """The draft has answered this request with an error. Its process is alive."""


class DraftLost(Exception):
    """The draft's process is gone, or cannot be reached any more."""


class Reply(Protocol):
    """A pending answer. Both methods may raise ``DraftLost``."""

    def ready(self, timeout: float) -> bool:
        """Whether the answer arrives within this many seconds."""

    def take(self) -> DraftReply:
        """The answer, once it is ready; raises ``DraftFailed`` where it is an error."""


class DraftTransport(Protocol):
    """The way to one draft. Requests are answered in their order."""

    name: str

    def ask(self, request: DraftRequest) -> Reply: ...

    def reconfigure(self, cores: Sequence[int], draft_ahead: bool, timeout: float) -> None:
        """Move the draft to these cores, and start or stop drafting ahead; returns after the timeout at the latest."""
