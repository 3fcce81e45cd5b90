"""Which arrangements of a target and its draft are worth trying, given the cores they were seated on. Pure."""

from __future__ import annotations

from outrider.runner.planning.placement import TARGET_CORES_A_DRAFT_CORE, PlannedActor
from outrider.workers.messages import Arrangement
from outrider.workers.speculation import Overlap


def arrangements_of(target: PlannedActor, draft: PlannedActor | None, movable: bool, batch: int) -> tuple[Arrangement, ...]:
    """The first is where a job begins. ``movable`` says whether both may be taken to other cores of their seat.

    On cores of their own both work at the same time: the draft runs ahead, or two groups of rows cross. On shared cores
    they take turns; where they are movable the cores can be divided as well, or the draft left out altogether.
    """
    turns = Arrangement("turns", Overlap.TURNS)
    if draft is None:
        return (turns,)
    if not set(target.cores) & set(draft.cores):
        return _crosswise((), (), batch)
    cores = target.cores
    if not movable or len(cores) < 2:
        return (turns,)
    given = max(1, len(cores) // TARGET_CORES_A_DRAFT_CORE)
    return (
        Arrangement("turns", Overlap.TURNS, cores, cores),
        Arrangement("plain", Overlap.TURNS, cores, cores, plain=True),
        *_crosswise(cores[given:], cores[:given], batch),
    )


def _crosswise(target: tuple[int, ...], draft: tuple[int, ...], batch: int) -> tuple[Arrangement, ...]:
    ahead = Arrangement("ahead", Overlap.AHEAD, target, draft)
    return (ahead, Arrangement("groups", Overlap.GROUPS, target, draft)) if batch > 1 else (ahead,)
