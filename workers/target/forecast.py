"""Forecasts of rounds (seconds and tokens) against their outcome: a check of the costs by which k is chosen."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from outrider.workers.messages import Layout


@dataclass(frozen=True, slots=True)
class Forecast:
    """The expected ``seconds`` and ``tokens`` of a round.

    ``drafting`` are the seconds beside the target's pass, ``reading`` those of them in which the draft prefills new texts,
    and ``context`` the tokens in the rows' caches.

    Here and below only tokens that the target has to choose count: forced ones come with or without candidates.
    """

    seconds: float
    tokens: float
    drafting: float = 0.0
    context: int = 0
    reading: float = 0.0

    @property
    def rate(self) -> float:
        """Tokens a second without the prefill, which is done once for all later rounds."""
        return self.tokens / (self.seconds - self.reading)


@dataclass(frozen=True, slots=True)
class Round:
    """One round: how many candidates each row had, how many of them were accepted, and how many runners-up.

    ``live`` counts the rows of the pass, ``read`` the tokens of prompts that were fed. ``steady``: all rows had read their
    prompts and take candidates. The pass over ``fed`` tokens took ``verifying`` seconds.
    """

    proposed: tuple[int, ...]
    accepted: tuple[int, ...]
    live: int
    steady: bool
    read: int = 0
    fed: int = 0
    verifying: float = 0.0
    forecast: Forecast | None = None
    runners_up_accepted: int = 0

    @property
    def gained(self) -> int:
        """Tokens committed."""
        return len(self.accepted) + sum(self.accepted) + self.runners_up_accepted


@dataclass(slots=True)
class _Sums:
    """Its fields are keys of job.json (``costs``)."""

    rounds: int = 0
    seconds: float = 0.0
    forecast_seconds: float = 0.0
    tokens: int = 0
    forecast_tokens: float = 0.0
    verify_seconds: float = 0.0
    tried: int = 0
    accepted: int = 0


class ForecastCheck:
    """Sums over steady rounds, by layout and by whether there were candidates."""

    def __init__(self) -> None:
        self._sums: dict[str, _Sums] = {}

    def observe(self, layout: Layout, round: Round, seconds: float) -> None:
        if not round.steady or round.forecast is None:
            return
        name = layout.name if layout.plain or any(round.proposed) else f"{layout.name}, no candidates"
        sums = self._sums.setdefault(name, _Sums())
        sums.rounds += 1
        sums.seconds += seconds
        sums.forecast_seconds += round.forecast.seconds
        sums.tokens += round.gained
        sums.forecast_tokens += round.forecast.tokens
        sums.verify_seconds += round.verifying
        sums.tried += sum(min(count, accepted + 1) for count, accepted in zip(round.proposed, round.accepted, strict=True))
        sums.accepted += sum(round.accepted)

    def record(self) -> dict[str, Any]:
        return {
            name: {key: round(value, 4) for key, value in asdict(sums).items()} for name, sums in list(self._sums.items())
        }
