"""One tokenizer process for all tests of this process, since each start would load transformers. It ends with this one."""

from __future__ import annotations

from functools import cache

from outrider.runner.job.tokenizer_process import TokenizerProcess


@cache
def tokenizer_process() -> TokenizerProcess:
    return TokenizerProcess()
