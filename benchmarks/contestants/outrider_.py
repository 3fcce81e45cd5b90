"""outrider in the race: the actors that a job uses, one row at a time."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace

from protocol import Answer, Setup, serve

from outrider.runner.cluster import local_ray
from outrider.runner.placement import plan
from outrider.runner.plan import ActorPlan, plan_replicas
from outrider.runner.topology import ray_resources, read_topology
from outrider.runner.wishes import Sizes, Wishes
from outrider.workers.messages import ModelSpec, Row, Sampling, ServeSpec
from outrider.workers.models.cards import read_card

START_SECONDS = 600.0


class Outrider:
    def __init__(self, setup: Setup) -> None:
        machine = read_topology()
        # Nothing is leased: the contestants take turns on the same cores, and several of them stay loaded.
        sizes = Sizes(read_card(setup.target).weight_bytes, read_card(setup.draft).weight_bytes)
        made = plan([machine], sizes, Wishes(replicas=1, layout="shared" if setup.threads < 4 else "auto"))
        models = [ModelSpec(path, "native", setup.precision) for path in (setup.target, setup.draft)]
        [replica] = plan_replicas(made, models[0], models[1], ServeSpec(batch=1, draft_tokens=None))
        assert replica.draft is not None
        replica = replace(replica, target=_unleased(replica.target), draft=_unleased(replica.draft))
        self._stack = ExitStack()
        self._stack.enter_context(local_ray(len(machine.usable_cores), ray_resources(machine)))
        from outrider.runner.pair import Pair

        self._pair = self._stack.enter_context(Pair(replica, START_SECONDS))
        self._key = 0
        self.modes = ["plain", "auto"]
        self.about = "; ".join(note for report in self._pair.reports.values() for note in report.notes)

    def generate(self, mode: str, prompt: list[int], new_tokens: int) -> Answer:
        self._key += 1
        row = Row(self._key, tuple(prompt), new_tokens, Sampling(), ignore_eos=True, assisted=mode != "plain")
        result = self._pair.answer(row)
        return Answer(list(result.tokens), result.rounds - result.prefill_rounds + 1)


def _unleased(actor: ActorPlan) -> ActorPlan:
    return replace(actor, seat=replace(actor.seat, leases=()))


if __name__ == "__main__":
    serve(Outrider)
