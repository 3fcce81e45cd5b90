"""outrider as a model of lm-evaluation-harness (`pip install lm_eval`): all of a task's requests are one batch job.

    python examples/evaluation_harness.py --tasks my_task --include-path DIR -m MODEL [--precision w4a8] [--limit N]

Log-likelihoods come from `echo` with `logprobs` and no token written. Which tokens belong to a continuation is told by
where they begin in the text; spaces at a context's end belong to what follows, as in the harness's own models.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

try:
    import lm_eval
except ModuleNotFoundError:
    raise SystemExit("lm_eval is not installed: pip install lm_eval") from None
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.tasks import TaskManager

import outrider


class Outrider(LM):
    """``options`` are those of ``outrider.run``."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options

    def _records(self, rows: list[dict[str, Any]]) -> Iterator[Any]:
        job = outrider.run(rows, **self.options)
        for failed in job.errors():
            raise RuntimeError(f"{failed.id}: {failed.error}")
        return job.results()

    def _scored(self, texts: Sequence[str]) -> Iterator[dict[str, Any]]:
        rows = [
            {"id": str(i), "prompt": text, "echo": True, "logprobs": 1, "max_tokens": 0} for i, text in enumerate(texts)
        ]
        for record in self._records(rows):
            assert record.logprobs is not None
            yield record.logprobs

    def loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:
        texts, starts = [], []
        for context, continuation in (request.args for request in requests):
            texts.append(context + continuation)
            starts.append(len(context.rstrip()) if continuation else len(context))
        found = []
        for told, start in zip(self._scored(texts), starts, strict=True):
            places = [
                index
                for index, (offset, value) in enumerate(zip(told["text_offset"], told["token_logprobs"], strict=True))
                if value is not None and offset >= start
            ]
            values = [told["token_logprobs"][index] for index in places]
            greedy = all(
                value >= max(told["top_logprobs"][index].values()) for index, value in zip(places, values, strict=True)
            )
            found.append((sum(values), greedy))
        return found

    def loglikelihood_rolling(self, requests: list[Instance]) -> list[float]:
        scored = self._scored([request.args[0] for request in requests])
        return [sum(value for value in told["token_logprobs"] if value is not None) for told in scored]

    def generate_until(self, requests: list[Instance]) -> list[str]:
        rows = []
        for number, (context, asked) in enumerate(request.args for request in requests):
            stop = asked.get("until") or []
            rows.append(
                {
                    "id": str(number),
                    "prompt": context,
                    "stop": [stop] if isinstance(stop, str) else list(stop),
                    "max_tokens": asked.get("max_gen_toks", 256),
                    "temperature": asked.get("temperature", 0.0) if asked.get("do_sample") else 0.0,
                }
            )
        return [record.text for record in self._records(rows)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", default="pocket")
    parser.add_argument("--precision", default="auto")
    parser.add_argument("--tasks", nargs="+", required=True)
    parser.add_argument("--include-path", type=Path, help="a directory with tasks of your own")
    parser.add_argument("--limit", type=int)
    asked = parser.parse_args()
    model = Outrider(model=asked.model, precision=asked.precision, draft="none", progress=False)
    tasks = TaskManager(include_path=None if asked.include_path is None else str(asked.include_path))
    result = lm_eval.simple_evaluate(model, tasks=asked.tasks, task_manager=tasks, limit=asked.limit)
    print(json.dumps(result["results"], indent=2, default=str))


if __name__ == "__main__":
    main()
