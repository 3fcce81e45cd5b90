"""How a counter is declared: metrics, the sums over replicas, the summary, series and the report are made from that."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import Field, dataclass, field, fields
from typing import Any

PHASE_SUFFIX = "_seconds"


@dataclass(frozen=True, slots=True, kw_only=True)
class Counter:
    """The metadata of one field in a class of running totals."""

    # A phrase for the metrics and the report.
    meaning: str
    # Exported to Prometheus while the job runs.
    metric: bool = False
    # A part of the target's time; the phase is the field's name without PHASE_SUFFIX.
    phase: bool = False
    # Kept over time, for the report's charts.
    over_time: bool = False
    # Stands in a job's summary under its own name, as a whole number.
    in_summary: bool = False
    # The driver's value is the sum over its targets.
    from_targets: bool = False


def counter(meaning: str, **how: bool) -> Any:
    """A field that counts from 0."""
    return field(default=0, metadata={"counter": Counter(meaning=meaning, **how)})


def clock(meaning: str, **how: bool) -> Any:
    """A field that sums seconds."""
    return field(default=0.0, metadata={"counter": Counter(meaning=meaning, **how)})


def names(kind: type[Any], which: Callable[[Counter], bool] = lambda counter: True) -> tuple[str, ...]:
    """The counters of such a class, in the order of their declaration."""
    return tuple(name for name, counter in counters(kind).items() if which(counter))


def counters(kind: type[Any]) -> dict[str, Counter]:
    return {each.name: _counter(each) for each in fields(kind) if "counter" in each.metadata}


def phases(kind: type[Any]) -> dict[str, str]:
    """Each phase with what it means."""
    found = counters(kind).items()
    return {name.removesuffix(PHASE_SUFFIX): counter.meaning for name, counter in found if counter.phase}


def _counter(one: Field[Any]) -> Counter:
    found: Counter = one.metadata["counter"]
    return found
