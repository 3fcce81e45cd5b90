"""A target's running counters (time, tokens, candidates), and its timeline."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from outrider.workers.messages import LONGEST_COUNTED, TargetCounters
from outrider.workers.timeline import Timeline


class TargetStatistics:
    """Filled by the verifying thread. The caller's lock keeps ``snapshot`` and ``idling`` apart.

    Counting takes a few microseconds of a round; copies and metrics are made by the thread that harvests.
    """

    def __init__(self, timeline: Timeline | None = None, clock: Callable[[], float] = time.perf_counter) -> None:
        self.counters = TargetCounters()
        self.timeline = timeline
        self._clock = clock
        self._started = clock()
        self._idle_since: float | None = None

    def start(self) -> None:
        """Count the target's time from now on."""
        self._started = self._clock()

    def asked(self, limits: Sequence[int]) -> None:
        """How many candidates were asked for, of each row that could have some."""
        self.counters.asking_rows += len(limits)
        self.counters.asked += sum(limit for limit in limits if limit > 0)

    def decided(self, started: float, rows: int, candidates: int) -> None:
        """The policy has decided since ``started`` which candidates to ask for."""
        self._slice("decide", started, self._clock(), rows, candidates)

    def hop(self, seconds: float) -> None:
        """Count these seconds as latency of messages; ``waited`` has counted them as the draft's."""
        seconds = max(0.0, seconds)
        self.counters.hop_seconds += seconds
        self.counters.draft_seconds -= seconds

    def drafted(self, passes: int, skipped: int, corrected_right: int, corrected_wrong: int) -> None:
        """The draft's counts since its last reply."""
        self.counters.draft_passes += passes
        self.counters.draft_skipped += skipped
        self.counters.corrected_right += corrected_right
        self.counters.corrected_wrong += corrected_wrong

    def waited(self, what: str, started: float, rows: int, candidates: int) -> None:
        """The target has asked for candidates, or waited for them, from ``started`` until now."""
        ended = self._clock()
        self.counters.draft_seconds += ended - started
        self._slice(what, started, ended, rows, candidates)

    def verified(self, started: float, ended: float, rows: int, tokens: int) -> None:
        """A pass of the target over ``tokens`` tokens."""
        self.counters.rounds += 1
        self.counters.verify_seconds += ended - started
        self._slice("verify", started, ended, rows, tokens)

    def committed(
        self, proposed: int, accepted: int, tokens: int, runners_up: int = 0, runner_up_accepted: bool = False
    ) -> None:
        """One row's part of a round: its candidates, those that were accepted, the tokens that it gained, and its
        runners-up, of which one may have been accepted.
        """
        counters = self.counters
        counters.row_rounds += 1
        counters.tokens += tokens
        if proposed:
            counters.proposed += proposed
            counters.accepted += accepted
            counters.runners_up += runners_up
            counters.runners_up_accepted += runner_up_accepted
            counters.accepted_lengths[min(accepted, LONGEST_COUNTED)] += 1

    def found(self, proposed: int, accepted: int, from_others: int) -> None:
        """One row's candidates, all found in texts; ``from_others`` of the accepted were found in other rows' answers."""
        self.counters.found += proposed
        self.counters.found_accepted += accepted
        self.counters.others_accepted += from_others

    def forced(self, tokens: int) -> None:
        """Count tokens that were committed without a pass, since the grammar forces them."""
        self.counters.tokens += tokens
        self.counters.forced_tokens += tokens

    def round_ended(self, started: float, rows: int, tokens: int) -> None:
        """The end of a round: ``tokens`` have been committed since ``started``."""
        self._slice("commit", started, self._clock(), rows, tokens)

    @contextmanager
    def changing_layout(self) -> Iterator[None]:
        """The time in which target and draft move to other cores and passes are measured there."""
        started = self._clock()
        yield
        self._slice("change layout", started, self._clock(), 0, 0)

    @contextmanager
    def idling(self) -> Iterator[None]:
        """The time without rows."""
        self._idle_since = self._clock()
        try:
            yield
        finally:
            self._note_idle()
            self._idle_since = None

    def snapshot(self) -> TargetCounters:
        """A copy of the counters as they are at this moment."""
        self._note_idle()
        self.counters.seconds = self._clock() - self._started
        return replace(self.counters, accepted_lengths=list(self.counters.accepted_lengths))

    def _note_idle(self) -> None:
        if self._idle_since is not None:
            since, self._idle_since = self._idle_since, self._clock()
            self.counters.idle_seconds += self._idle_since - since
            self._slice("idle", since, self._idle_since)

    def _slice(self, name: str, started: float, ended: float, rows: int = 0, tokens: int = 0) -> None:
        if self.timeline is not None:
            self.timeline.add(name, started, ended, rows, tokens)
