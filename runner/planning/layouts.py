"""The layouts of a target and its draft that are worth trying on their replica's cores. Pure."""

from __future__ import annotations

from outrider.runner.planning.placement import TARGET_CORES_A_DRAFT_CORE, PlannedActor
from outrider.workers.messages import Layout
from outrider.workers.speculation import LayoutKind


def layouts_of(
    target: PlannedActor, draft: PlannedActor | None, movable: bool, parallel: bool = False, texts: bool = False
) -> tuple[Layout, ...]:
    """The layouts to try; a job begins with the first. ``movable``: both actors can move to other cores of their replica.

    *shared*: both on the same cores, one after the other. *split*: the draft has cores of its own and drafts ahead, so that
    both work at the same time. *plain*: no draft. If both are movable, all three are tried.

    A ``parallel`` draft does not draft ahead, even on cores of its own: all of its candidates would have to be accepted and
    the next token guessed, which is too rare to pay for the cores.

    Without a draft model there is one layout, whose name in job.json says whether candidates come from ``texts``.
    """
    if draft is None:
        return (
            Layout("no draft model", LayoutKind.SEQUENTIAL)
            if texts
            else Layout("plain", LayoutKind.SEQUENTIAL, plain=True),
        )
    shared = Layout("shared", LayoutKind.SEQUENTIAL)
    if not set(target.cores) & set(draft.cores):
        return (Layout("split", LayoutKind.SEQUENTIAL if parallel else LayoutKind.OVERLAPPED),)
    cores = target.cores
    if not movable or len(cores) < 2:
        return (shared,)
    given = max(1, len(cores) // TARGET_CORES_A_DRAFT_CORE)
    on_all_cores = (
        Layout("shared", LayoutKind.SEQUENTIAL, cores, cores),
        Layout("plain", LayoutKind.SEQUENTIAL, cores, cores, plain=True),
    )
    split = Layout("split", LayoutKind.OVERLAPPED, cores[given:], cores[:given])
    return on_all_cores if parallel else (*on_all_cores, split)
