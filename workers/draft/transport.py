"""The interface of transports: how a target's requests reach its draft, and the answers come back. No Ray in here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from outrider.workers.messages import DraftReply, DraftRequest


class DraftFailed(Exception):
    """The draft could not answer this request. It lives."""


class DraftLost(Exception):
    """The draft's process is gone, or cannot be reached any more."""


class Reply(Protocol):
    """An answer under way. Both methods may raise ``DraftLost``."""

    def ready(self, timeout: float) -> bool:
        """Whether it is here, or comes within so many seconds."""

    def take(self) -> DraftReply:
        """What came, once that is ready; raises ``DraftFailed`` where it is an error."""


class DraftTransport(Protocol):
    """To one draft. Requests are answered in the order in which they were made."""

    name: str

    def ask(self, request: DraftRequest) -> Reply: ...

    def reconfigure(self, cores: Sequence[int], draft_ahead: bool, timeout: float) -> None:
        """Have the draft work in another way; returns after the timeout at the latest."""
