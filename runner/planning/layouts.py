"""Which layouts of a target and its draft are worth trying, given the cores of their replica. Pure."""

from __future__ import annotations

from outrider.runner.planning.placement import TARGET_CORES_A_DRAFT_CORE, PlannedActor
from outrider.workers.messages import Layout
from outrider.workers.speculation import LayoutKind


def layouts_of(
    target: PlannedActor, draft: PlannedActor | None, movable: bool, parallel: bool = False, texts: bool = False
) -> tuple[Layout, ...]:
    """The first is where a job begins. ``movable`` says whether both may be taken to other cores of their replica.

    Named as ``--layout`` names them. *shared*: both on the same cores, one after the other. *split*: the draft has cores of
    its own and drafts ahead, so that both work at the same time. *plain*: no draft. Where both are movable, all three are
    worth trying.

    A ``parallel`` draft never drafts ahead, on cores of its own either: it would have to guess that all its candidates are
    accepted, and the token after them, which comes true too rarely to pay for the cores.

    Without a draft model there is nothing to lay out. The name says so in job.json, and whether candidates come from
    ``texts``.
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
