"""Which layouts of a target and its draft are worth trying, given the cores of their replica. Pure."""

from __future__ import annotations

from outrider.runner.planning.placement import TARGET_CORES_A_DRAFT_CORE, PlannedActor
from outrider.workers.messages import Layout
from outrider.workers.speculation import LayoutKind


def layouts_of(
    target: PlannedActor, draft: PlannedActor | None, movable: bool, parallel: bool = False
) -> tuple[Layout, ...]:
    """The first is where a job begins. ``movable`` says whether both may be taken to other cores of their replica.

    On cores of its own the draft runs ahead, so that both work at the same time. On shared cores they take turns; where
    they are movable the cores can be divided as well, or the draft left out altogether.

    A ``parallel`` draft never runs ahead: it would have to guess that all its candidates hold, and the token behind them,
    which comes true too rarely to pay for the cores.
    """
    turns = Layout("turns", LayoutKind.TURNS)
    if draft is None:
        return (turns,)
    if not set(target.cores) & set(draft.cores):
        return (turns,) if parallel else (Layout("ahead", LayoutKind.AHEAD),)
    cores = target.cores
    if not movable or len(cores) < 2:
        return (turns,)
    given = max(1, len(cores) // TARGET_CORES_A_DRAFT_CORE)
    shared = (
        Layout("turns", LayoutKind.TURNS, cores, cores),
        Layout("plain", LayoutKind.TURNS, cores, cores, plain=True),
    )
    return shared if parallel else (*shared, Layout("ahead", LayoutKind.AHEAD, cores[given:], cores[:given]))
