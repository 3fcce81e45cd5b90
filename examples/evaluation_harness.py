"""outrider as a model of lm-evaluation-harness (`pip install lm_eval`): all of a task's requests are one batch job.

    python examples/evaluation_harness.py --tasks my_task --include-path DIR -m MODEL [--precision w4a8] [--limit N]

Log-likelihoods come from `echo` with `logprobs` and no token written. Which tokens belong to a continuation is told by
where they begin in the text; spaces at a context's end belong to what follows, as in the harness's own models. Nothing is
known of a text's first token: where a tokenizer puts none before a text, `--prefix '<|endoftext|>'` (or what the model
knows as a text's begin) stands before each that has no context.
"""

from __future__ import annotations

import argparse
import hashlib
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

# What a task may ask of generation that rows know by the same name.
KNOWN = ("top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed")


class Outrider(LM):
    """``options`` are those of ``outrider.run``; its jobs lie in the directory ``out``."""

    def __init__(self, out: Path = Path(), prefix: str = "", **options: Any) -> None:
        super().__init__()
        self.out, self.prefix, self.options = out, prefix, options

    def _records(self, rows: list[dict[str, Any]]) -> Iterator[Any]:
        # The same rows of another model, or in another precision, are another job.
        digest = hashlib.sha256(json.dumps([rows, self.options], sort_keys=True, default=str).encode()).hexdigest()
        job = outrider.run(rows, out=self.out / f"harness-{digest[:8]}-job", **self.options)
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
        return self._likelihoods([request.args for request in requests])

    def loglikelihood_rolling(self, requests: list[Instance]) -> list[float]:
        return [value for value, _ in self._likelihoods([("", request.args[0]) for request in requests])]

    def _likelihoods(self, pairs: Sequence[tuple[str, str]]) -> list[tuple[float, bool]]:
        pairs = [(context if context.strip() else self.prefix + context, scored) for context, scored in pairs]
        found = []
        for told, (context, continuation) in zip(self._scored([a + b for a, b in pairs]), pairs, strict=True):
            places = _places(told, len(context.rstrip()) if continuation else len(context))
            values = [told["token_logprobs"][index] for index in places]
            if continuation and not values:
                raise ValueError(f"{continuation[:60]!r} lies within a token that begins in its context, and has no score")
            if None in values:
                raise ValueError(
                    f"{continuation[:60]!r} has no context, and nothing is known of a text's first token: give --prefix, "
                    "the text of the token that the model knows as a text's begin"
                )
            greedy = all(
                value >= max(told["top_logprobs"][index].values()) for index, value in zip(places, values, strict=True)
            )
            found.append((sum(values), greedy))
        return found

    def generate_until(self, requests: list[Instance]) -> list[str]:
        rows = []
        for number, (context, asked) in enumerate(request.args for request in requests):
            left = dict(asked)
            stop, most = left.pop("until", None) or [], left.pop("max_gen_toks", 256)
            sampled, temperature = left.pop("do_sample", None), left.pop("temperature", None)
            row = {
                "id": str(number),
                "prompt": context,
                "stop": [stop] if isinstance(stop, str) else list(stop),
                "max_tokens": most,
                "temperature": _temperature(sampled, temperature),
            }
            row |= {name: left.pop(name) for name in KNOWN if name in left}
            if left:
                raise ValueError(f"generation_kwargs: outrider does not know {', '.join(sorted(left))}; leave it out")
            rows.append(row)
        return [record.text for record in self._records(rows)]


def _places(told: dict[str, Any], start: int) -> list[int]:
    """The tokens that begin there or later. One that a tokenizer puts before a text takes no room in it, and is none."""
    offsets, tokens = told["text_offset"], told["tokens"]
    first = int(offsets[1:2] == offsets[:1] and not tokens[0].startswith("bytes:"))
    return [index for index in range(first, len(offsets)) if offsets[index] >= start]


def _temperature(sampled: bool | None, temperature: float | None) -> float:
    """A temperature alone asks for samples, too; samples without one are drawn as the model has it."""
    if sampled is None:
        return temperature or 0.0
    return 0.0 if not sampled else 1.0 if temperature is None else temperature


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", default="pocket")
    parser.add_argument("--precision", default="auto")
    parser.add_argument("--tasks", nargs="+", required=True)
    parser.add_argument("--include-path", type=Path, help="a directory with tasks of your own")
    parser.add_argument("--limit", type=int)
    parser.add_argument("--prefix", default="", help="what begins a text without a context, such as '<|endoftext|>'")
    parser.add_argument("--out", type=Path, default=Path(), help="the directory for its jobs")
    asked = parser.parse_args()
    options = {"model": asked.model, "precision": asked.precision, "draft": "none", "progress": False}
    model = Outrider(asked.out, asked.prefix, **options)
    tasks = TaskManager(include_path=None if asked.include_path is None else str(asked.include_path))
    result = lm_eval.simple_evaluate(model, tasks=asked.tasks, task_manager=tasks, limit=asked.limit)
    print(json.dumps(result["results"], indent=2, default=str))


if __name__ == "__main__":
    main()
