"""Which options ask something of a draft model, and which have no effect without one."""

from __future__ import annotations

from outrider.runner.options.values import NO_DRAFT

# These propose without a draft model.
FROM_TEXTS = ("lookup", "suffix")
# What asks something of a draft model, with the values beside the usual one that ask nothing.
OF_A_DRAFT: dict[str, tuple[object, ...]] = {
    "draft_precision": (),
    "draft_tokens": (0,),
    "draft_confidence": (),
    "draft_learns": (),
    "draft_shortlist": (0,),
    "draft_deadline": (),
    "draft_cores": (),
    "layout": ("shared",),
    "runners_up": (),
    "small_draft_cache": (),
    "answer_tokens": (),
}
# Candidates that are found in texts are counted, too.
OF_A_MODEL_ALONE = frozenset(OF_A_DRAFT) - {"draft_tokens", "answer_tokens"}


def idle_without_draft(draft: object, draft_tokens: object) -> frozenset[str]:
    """The options that have no effect where these two say that no draft model runs."""
    if draft == NO_DRAFT or draft_tokens == 0:
        return frozenset(OF_A_DRAFT)
    return OF_A_MODEL_ALONE if draft in FROM_TEXTS else frozenset()


def keeps_answers(draft: str) -> bool:
    """Does this draft look in what other rows wrote?"""
    return draft in ("auto", "suffix") or draft.endswith("+suffix")
