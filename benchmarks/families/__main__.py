"""Try every causal family that transformers knows on the hf engine, and write the table of them.

    python -m benchmarks.families [FAMILY ...] [--seed 1] [--write docs/families.md]

Tiny random checkpoints, fp32, in process: prompts below and above each window, chunk and switch of rope, all in one batch,
with candidates by lookup. The texts are transformers' own, or there is a sentence. Exit code 1 where one is wrong.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import traceback
from collections import Counter
from pathlib import Path

import torch
import transformers

from benchmarks.families.check import CANDIDATES, LENGTHS, Outcome, Verdict, check
from benchmarks.families.settings import families
from outrider.workers.models.probe import said

HEAD = """# Families on the hf engine

Made by `python -m benchmarks.families --write docs/families.md` (transformers {transformers}, torch {torch}): a tiny
random checkpoint of every causal family that transformers knows, fp32, {rows} prompts of {shortest} to {longest} tokens in
one batch, with {candidates} candidates a round by lookup, below and beyond each window, chunk and switch of rope. *Right*
means the texts of transformers' own `generate`, token for token.

{counts}

The native engine's families stand in [models.md](models.md). How a model is found to be right or refused, in
[inside-the-engines.md](inside-the-engines.md#hf-is-a-model-computed-rightly).

| family | has | on the hf engine | because |
|---|---|---|---|
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", help="only these (default: all)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write", type=Path, help="the table's file")
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    # These models are far too small for more.
    torch.set_num_threads(1)
    outcomes = []
    for name in arguments.families or families():
        with tempfile.TemporaryDirectory() as folder:
            try:
                outcome = check(name, Path(folder), arguments.seed)
            except Exception as error:  # of one family, which the others need not wait for
                traceback.print_exc()
                outcome = Outcome(name, Verdict.WRONG, f"it fails: {said(error)}", ())
        outcomes.append(outcome)
        held = f"{outcome.accepted}/{outcome.proposed} held" if outcome.proposed else ""
        print(f"{name}: {outcome.verdict.value}. {outcome.said} [{held} {outcome.seconds:.1f} s]", flush=True)
    print(counts(outcomes))
    if arguments.write:
        arguments.write.write_text(table(outcomes))
    return 1 if any(outcome.verdict is Verdict.WRONG for outcome in outcomes) else 0


def counts(outcomes: list[Outcome]) -> str:
    found = Counter(outcome.verdict for outcome in outcomes)
    return f"{len(outcomes)} tried: " + ", ".join(f"{found[verdict]} {verdict.value}" for verdict in Verdict) + "."


def table(outcomes: list[Outcome]) -> str:
    head = HEAD.format(
        transformers=transformers.__version__,
        torch=torch.__version__.partition("+")[0],
        rows=len(LENGTHS),
        shortest=LENGTHS[0],
        longest=LENGTHS[-1],
        candidates=CANDIDATES,
        counts=counts(outcomes),
    )
    lines = [
        f"| {each.name} | {', '.join(each.features)} | {each.verdict.value} | {each.said.replace('|', '/')} |"
        for each in sorted(outcomes, key=lambda each: each.name)
    ]
    return head + "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
