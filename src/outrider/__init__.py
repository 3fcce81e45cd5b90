"""Outrider: batch jobs for assisted generation, one process per model, every process pinned.

job = outrider.run("prompts.jsonl", model="meta-llama/Llama-2-7b-chat-hf")
for row in job.results():
    print(row.id, row.text)
"""

from typing import TYPE_CHECKING

__version__ = "0.1.0"
__all__ = ["Job", "OutriderError", "open", "run"]

if TYPE_CHECKING:
    from outrider.runner.api import Job, open, run
    from outrider.workers.errors import OutriderError
else:
    # Every process of a job imports this package, and few of them run jobs.
    _HOMES = dict.fromkeys(("Job", "open", "run"), "outrider.runner.api") | {"OutriderError": "outrider.workers.errors"}

    def __getattr__(name):
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib import import_module

        globals()[name] = found = getattr(import_module(_HOMES[name]), name)
        return found

    def __dir__():
        return sorted({*globals(), *__all__})
