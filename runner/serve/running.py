"""The interface between the service and what runs batches: ``Runner``'s methods, and the events that it reports."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

# After this time an operation that failed for want of disk space is tried again.
FREED_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class BatchJob:
    """A batch and its job directory, which holds its input; ``endpoint``: the URL of all its rows."""

    batch: str
    model: str
    endpoint: str
    directory: Path


# Events, each of one batch


@dataclass(frozen=True, slots=True)
class Admitted:
    """The batch's rows have been checked, and are in its journal."""

    batch: str
    rows: int


@dataclass(frozen=True, slots=True)
class Refused:
    """The batch's input cannot be run; ``errors`` as the API shows them."""

    batch: str
    errors: Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Progress:
    """Ended rows, and the tokens, candidates and seconds of work since the model's process has had the batch."""

    batch: str
    done: int
    failed: int
    tokens: int
    proposed: int
    accepted: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Left:
    """The job directory is no longer locked; ``whole``: all rows have ended (else the batch was stopped)."""

    batch: str
    whole: bool


@dataclass(frozen=True, slots=True)
class Broken:
    """The batch cannot be run; ``sentence``: why. Its job directory is not locked."""

    batch: str
    sentence: str


Event = Admitted | Refused | Progress | Left | Broken
OnEvent = Callable[[Event], None]


class Failure(NamedTuple):
    """Why a single request has no answer: an HTTP status, a sentence, and the API's error code, if any."""

    status: int
    sentence: str
    code: str | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """A part of the answer to a single request: pieces of text, and at the end the whole record or an error."""

    pieces: Sequence[Mapping[str, Any]] = ()
    record: Mapping[str, Any] | None = None
    error: Failure | None = None

    @property
    def last(self) -> bool:
        return self.record is not None or self.error is not None


class StopAtOnceError(Exception):
    """Stop without waiting for rows in progress; their tokens so far are saved."""


class Runner(Protocol):
    """Runs batches. Its methods return at once (except ``close``); events come later, from its own threads."""

    def admit(self, job: BatchJob) -> None:
        """Check the batch's input and fill its journal: ``Admitted``, ``Refused`` or ``Broken`` follows.

        If the disk is full, it is tried again.
        """
        ...

    def run(self, job: BatchJob) -> None:
        """Do the batch's rows, in turn with those of other batches: ``Progress`` follows, then ``Left`` or ``Broken``.

        If the disk is full, it is tried again. A batch that was begun with other options, or whose journal cannot be used,
        waits until it is stopped.
        """
        ...

    def stop(self, batch: str) -> None:
        """Do no more of the batch's rows: ``Left`` follows if it was running or waiting."""
        ...

    def ask(
        self, model: str, entry: Mapping[str, Any], streamed: bool, on_answer: Callable[[Answer], None]
    ) -> Callable[[], None]:
        """Answer a single request; the returned function withdraws it."""
        ...

    def refuse_requests(self) -> None:
        """Answer open and future single requests with the error that the server is being stopped."""
        ...

    def state(self) -> Mapping[str, str]:
        """The state of each model by name: loaded, loading, leaving or waiting."""
        ...

    def close(self, at_once: bool) -> None:
        """Let rows in progress end, or with ``at_once`` save their tokens; waits until that is done."""
        ...
