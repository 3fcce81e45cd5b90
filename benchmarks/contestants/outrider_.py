"""outrider in the race: the actors that a job uses, one row at a time."""

from __future__ import annotations

from contextlib import ExitStack

from protocol import Answer, Setup, serve
from unleased import unleased_replica

from outrider.runner.hosts.ray_start import local_ray
from outrider.runner.planning.topology import ray_resources, read_topology
from outrider.workers.messages import ReplicaSpec, Row, Sampling

START_SECONDS = 600.0
MOST_WARM_UPS, WARM_UP_TOKENS = 40, 32


class Outrider:
    def __init__(self, setup: Setup) -> None:
        machine = read_topology()
        replica_spec = ReplicaSpec(batch=1, draft_tokens=setup.own_draft_tokens)
        replica = unleased_replica(machine, setup.target, setup.draft, setup.precision, replica_spec)
        self._stack = ExitStack()
        lost = self._stack.enter_context(local_ray(len(machine.usable_cores), ray_resources(machine)))
        from outrider.runner.bench.pair import Pair

        self._pair = self._stack.enter_context(Pair(replica, START_SECONDS, lost))
        self._key = 0
        # How the two share their cores is found out before anything counts.
        for _ in range(MOST_WARM_UPS):
            if self._pair.layout is not None or not self._pair.chooses_layout:
                break
            self.generate("warming up", [1, 2, 3], WARM_UP_TOKENS)
        self.modes = ["plain", "auto" if setup.own_draft_tokens is None else f"k={setup.own_draft_tokens}"]
        self.about = "; ".join(note for report in self._pair.reports.values() for note in report.notes)
        if self._pair.layout is not None:
            self.about += f"; {self._pair.layout.sentence}"

    def generate(self, mode: str, prompt: list[int], new_tokens: int) -> Answer:
        self._key += 1
        self._pair.set_layout("plain" if mode == "plain" else None)
        row = Row(self._key, tuple(prompt), new_tokens, Sampling(end_tokens=()), assisted=mode != "plain")
        result = self._pair.answer(row)
        return Answer(list(result.tokens), result.rounds - result.prefill_rounds + 1)


if __name__ == "__main__":
    serve(Outrider)
