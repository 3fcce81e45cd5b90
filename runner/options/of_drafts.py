"""The options about drafts, and which of them have no effect without a draft model."""

from __future__ import annotations

from outrider.runner.options.values import NO_DRAFT

# Values of --draft that find candidates in texts, without a draft model.
FROM_TEXTS = ("lookup", "suffix")
# The options about drafts, each with the values besides its default that make sense without one.
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
# The options that need a draft model; the other two also apply to candidates that are found in texts.
OF_A_MODEL_ALONE = frozenset(OF_A_DRAFT) - {"draft_tokens", "answer_tokens"}


def idle_without_draft(draft: object, draft_tokens: object) -> frozenset[str]:
    """The options that have no effect with these values of ``--draft`` and ``--draft-tokens``."""
    if draft == NO_DRAFT or draft_tokens == 0:
        return frozenset(OF_A_DRAFT)
    return OF_A_MODEL_ALONE if draft in FROM_TEXTS else frozenset()


def keeps_answers(draft: str) -> bool:
    """Whether suffixes are searched, and so answers of other rows kept."""
    return draft in ("auto", "suffix") or draft.endswith("+suffix")
