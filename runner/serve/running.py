"""What runs batches, as the service sees it: what it can ask, and what it hears."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

# What could not be written is tried again after so long: a disk that is full may have been freed by then.
FREED_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class BatchJob:
    """A batch and its job directory, in which its input lies; ``endpoint`` is what all of its rows ask for."""

    batch: str
    model: str
    endpoint: str
    directory: Path


# What is heard, each of one batch


@dataclass(frozen=True, slots=True)
class Admitted:
    """All rows of the batch have been found good, and stand in its journal."""

    batch: str
    rows: int


@dataclass(frozen=True, slots=True)
class Refused:
    """Its input is not what can be run: ``errors`` as the API shows them."""

    batch: str
    errors: Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Progress:
    """How far it is: rows, and what was written in so many seconds of work on this batch since the models have it."""

    batch: str
    done: int
    failed: int
    tokens: int
    proposed: int
    accepted: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Left:
    """Nobody holds its job directory any more: ``whole`` if all rows have ended, else because it was stopped."""

    batch: str
    whole: bool


@dataclass(frozen=True, slots=True)
class Broken:
    """It cannot be run: why, in a sentence. Nobody holds its job directory."""

    batch: str
    sentence: str


Event = Admitted | Refused | Progress | Left | Broken
Hear = Callable[[Event], None]


class Failure(NamedTuple):
    """Why a single request has no answer: an HTTP status, a sentence, and the API's code where it has one."""

    status: int
    sentence: str
    code: str | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """What a single request gets: pieces of text, then the whole record or an error."""

    pieces: Sequence[Mapping[str, Any]] = ()
    record: Mapping[str, Any] | None = None
    error: Failure | None = None

    @property
    def last(self) -> bool:
        return self.record is not None or self.error is not None


class StopAtOnceError(Exception):
    """Rows under way are left as they are: what is written of them is kept."""


class Runner(Protocol):
    """Nothing of it waits. It tells what comes of what it was asked, from threads of its own."""

    def admit(self, job: BatchJob) -> None:
        """Check the batch's input and write its journal: ``Admitted`` or ``Refused`` follows, or ``Broken``.

        Where the disk is full it is tried again.
        """
        ...

    def run(self, job: BatchJob) -> None:
        """Do its rows, in turn with those of other batches: ``Progress``, and then ``Left`` or ``Broken``.

        Where the disk is full it is tried again. A batch that was begun with other options, or whose journal cannot be
        used, waits until it is stopped.
        """
        ...

    def stop(self, batch: str) -> None:
        """Do no more of its rows: ``Left`` follows, if it was being run or waited for that."""
        ...

    def ask(
        self, model: str, entry: Mapping[str, Any], streamed: bool, hear: Callable[[Answer], None]
    ) -> Callable[[], None]:
        """A single request; to call what comes back is to take it back."""
        ...

    def refuse_requests(self) -> None:
        """The server is being stopped: single requests that are open are told so, and those that still come."""
        ...

    def state(self) -> Mapping[str, str]:
        """For each model by name what it is at: loaded, loading, waiting."""
        ...

    def close(self, at_once: bool) -> None:
        """Let rows under way end, or keep what is written of them; waits for that."""
        ...
