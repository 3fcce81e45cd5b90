"""The values of --draft: a model, a word for one or for none, and "+lookup" or "+suffix" after a model."""

from __future__ import annotations

from outrider.workers.errors import UsageError

# MODEL is the usual draft alone, AUTO the same with candidates found in texts. MTP is the target's own layer for
# multi-token prediction.
LOOKUP, SUFFIX, NONE, AUTO, MODEL, MTP = "lookup", "suffix", "none", "auto", "model", "mtp"
# After a draft's name: each row takes candidates from the model or from texts, whichever is better.
WITH_TEXTS = {f"+{kind}": kind for kind in (LOOKUP, SUFFIX)}
# The most candidates of a row from SUFFIX: candidates found in texts cost nothing but their slot in a pass.
MOST_FOUND = 32


def split_draft(name: str) -> tuple[str, str]:
    """The draft's name, and "+lookup", "+suffix" or "" after it."""
    beside = next((each for each in WITH_TEXTS if name.endswith(each)), "")
    base = name.removesuffix(beside)
    if beside and base in (NONE, LOOKUP, SUFFIX):
        raise UsageError(f'--draft: "{name}": + follows a model or auto; for {base} alone write --draft {base}')
    if beside and (not base or base.endswith(tuple(WITH_TEXTS))):
        raise UsageError(f'--draft: "{name}": + may be given once, after a model or auto, such as --draft auto{beside}')
    return base, beside
