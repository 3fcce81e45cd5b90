"""outrider in the race: the actors of a job, on as many rows at once as are asked for."""

from __future__ import annotations

import sys
import time
from contextlib import ExitStack
from pathlib import Path

from protocol import Answer, Request, Setup, serve, timed, working_copy

sys.path.append(str(Path(__file__).resolve().parents[2]))
from unleased import unleased_replica

from outrider.runner.hosts.ray_start import local_ray
from outrider.runner.planning.topology import ray_resources, read_topology
from outrider.workers.messages import ReplicaSpec, Row, Sampling

START_SECONDS = 600.0
# How the two models share the cores is found out before anything counts.
WITH_SUFFIXES = "auto+suffix"
MOST_WARM_UP_SECONDS, WARM_UP_TOKENS = 60.0, 32
# As a job keeps of its answers.
KEPT_TOKENS = 1 << 21


class Outrider:
    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._machine = read_topology()
        self._ray = ExitStack()
        self._lost = self._ray.enter_context(local_ray(len(self._machine.usable_cores), ray_resources(self._machine)))
        self._actors = ExitStack()
        self._key = 0
        self._opened: tuple[int, bool] | None = None
        self.modes = dict.fromkeys(("plain", "auto", WITH_SUFFIXES), setup.most_rows)
        self.about = f"the working copy {working_copy()}, {setup.kind}"

    def answer(self, request: Request) -> Answer:
        wanted = len(request.prompts), request.mode == WITH_SUFFIXES
        if wanted != self._opened:
            self._open(request, *wanted)
            self._opened = wanted
        return timed(lambda new_tokens: self._write(request.mode, request.prompts, new_tokens), request.new_tokens)

    def _open(self, request: Request, rows: int, suffix: bool) -> None:
        """Actors for batches of this many rows."""
        # Ray reads its token while it is imported.
        from outrider.runner.bench.pair import Pair

        self._actors.close()
        # Of prompts that come again nothing is kept: no answers for other rows, and nothing that the draft learned.
        kept = 0 if request.again else KEPT_TOKENS
        spec = ReplicaSpec(rows, None, suffix=suffix, answer_tokens=kept, draft_learns=not request.again)
        precision, _, cache = self._setup.kind.partition("/")
        plan = unleased_replica(self._machine, self._setup.target, self._setup.draft, precision, spec, cache or "auto")
        self._pair = self._actors.enter_context(Pair(plan, START_SECONDS, self._lost))
        latest = time.monotonic() + MOST_WARM_UP_SECONDS
        while time.monotonic() < latest:
            self._write("auto", request.prompts, WARM_UP_TOKENS)
            if self._pair.layout is not None or not self._pair.chooses_layout:
                break

    def _write(self, mode: str, prompts: list[list[int]], new_tokens: int) -> tuple[list[list[int]], float | None]:
        self._pair.set_layout("plain" if mode == "plain" else None)
        sampling = Sampling(end_tokens=())
        rows = [
            Row(self._key + at, tuple(ids), new_tokens, sampling, assisted=mode != "plain")
            for at, ids in enumerate(prompts)
        ]
        self._key += len(rows)
        results = self._pair.answers(rows)
        a_round = sum(len(row.tokens) for row in results) / sum(row.rounds - row.prefill_rounds + 1 for row in results)
        return [list(row.tokens) for row in results], a_round


if __name__ == "__main__":
    serve(Outrider)
