"""What rounds were expected to take and to bring, and what they did: the proof of the prices that k is chosen by."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from outrider.workers.target.layout_trial import Round


@dataclass(slots=True)
class _Sums:
    rounds: int = 0
    seconds: float = 0.0
    foreseen_seconds: float = 0.0
    tokens: int = 0
    foreseen_tokens: float = 0.0
    verify_seconds: float = 0.0
    tried: int = 0
    held: int = 0


class Foresight:
    """Sums by arrangement, and by whether there were candidates, over rounds in which nobody read a prompt."""

    def __init__(self) -> None:
        self._sums: dict[str, _Sums] = {}

    def observe(self, arrangement: str, round: Round, seconds: float) -> None:
        if not round.steady or round.foreseen is None:
            return
        name = arrangement if any(round.proposed) else f"{arrangement}, no candidates"
        sums = self._sums.setdefault(name, _Sums())
        sums.rounds += 1
        sums.seconds += seconds
        sums.foreseen_seconds += round.foreseen.seconds
        sums.tokens += round.gained
        sums.foreseen_tokens += round.foreseen.tokens
        sums.verify_seconds += round.verifying
        sums.tried += sum(min(count, held + 1) for count, held in zip(round.proposed, round.held, strict=True))
        sums.held += sum(round.held)

    def record(self) -> dict[str, Any]:
        return {
            name: {key: round(value, 4) for key, value in asdict(sums).items()} for name, sums in list(self._sums.items())
        }
