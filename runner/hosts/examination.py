"""Examines Ray nodes before they take part in a job: first the host's report, then its models with their digests.

A host that has never hashed the weights has to read them, so there is no deadline for the digests.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from outrider.runner.hosts import ray_nodes as nodes
from outrider.runner.hosts.host_report import FoundModel, HostReport, find_models, report_host
from outrider.runner.hosts.host_selection import RayNode, declared_cores, other_outrider

# After this time the user is told that a host reads its weights.
PATIENCE_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Unfit:
    """A Ray node that cannot take part, and why."""

    id: str
    name: str
    why: str


@dataclass(slots=True)
class _Examination:
    """One node's examination; ``future`` is that of its report, and then that of its models."""

    id: str
    name: str
    declared: Mapping[int, int]
    future: Any
    since: float
    report: HostReport | None = None
    said: bool = False


class Examinations:
    """Examines several Ray nodes at the same time. ``models``: by name, the model's directory on the driver's host."""

    def __init__(self, models: Mapping[str, str], share_cores: bool, versions: Mapping[str, str]) -> None:
        self._models = models
        self._share_cores = share_cores
        self._versions = versions
        self._under_way: dict[str, _Examination] = {}

    @property
    def under_way(self) -> Collection[str]:
        return self._under_way.keys()

    def begin(self, asked: Sequence[Mapping[str, Any]]) -> None:
        for node, name in zip(asked, nodes.names(asked), strict=True):
            future = nodes.start(report_host, node["NodeID"], self._share_cores)
            declared = declared_cores(node["Resources"])
            self._under_way[node["NodeID"]] = _Examination(node["NodeID"], name, declared, future, time.monotonic())

    def keep(self, there: Collection[str]) -> None:
        """Drop examinations of nodes that have left."""
        self._under_way = {node: each for node, each in self._under_way.items() if node in there}

    def drop_silent(self) -> list[Unfit]:
        """Drop nodes whose report has not come within the time limit, and return them."""
        limit = nodes.ANSWER_SECONDS
        silent = [each for each in self._under_way.values() if each.report is None and _age(each) > limit]
        for each in silent:
            del self._under_way[each.id]
        return [Unfit(each.id, each.name, f"does not answer: no answer within {limit:g} s") for each in silent]

    def step(self, seconds: float, say: Callable[[str], None]) -> list[RayNode | Unfit]:
        """The nodes whose examination ends within ``seconds``; notes once for each node that it is reading weights."""
        ended: list[RayNode | Unfit] = []
        deadline = time.monotonic() + seconds
        while self._under_way:
            asked = {each.future: each for each in self._under_way.values()}
            answered = nodes.answered(list(asked), max(0.0, deadline - time.monotonic()))
            if not answered:
                break
            for future in answered:
                if (end := self._go_on(asked[future], nodes.answer(future))) is not None:
                    del self._under_way[end.id]
                    ended.append(end)
        for each in self._under_way.values():
            if each.report is not None and not each.said and _age(each) > PATIENCE_SECONDS:
                each.said = True
                size = f"{self._size() / 1e9:.1f} GB"
                say(f"{each.name} reads {size} of weights to hash them; only once, if its cache can be written")
        return ended

    def _go_on(self, examined: _Examination, answer: Any) -> RayNode | Unfit | None:
        if isinstance(answer, str):
            return Unfit(examined.id, examined.name, f"does not answer: {answer}")
        if examined.report is None:
            report: HostReport = answer
            if other_outrider(report, self._versions):  # it may not have the function that would be called next
                return RayNode(examined.id, examined.name, examined.declared, report)
            examined.report, examined.since = report, time.monotonic()
            examined.future = nodes.start(find_models, examined.id, tuple(self._models))
            return None
        models: dict[str, FoundModel] = answer
        return RayNode(examined.id, examined.name, examined.declared, replace(examined.report, models=models))

    def _size(self) -> int:
        from outrider.workers.models.model_info import weight_files

        return sum(file.stat().st_size for path in self._models.values() for file in weight_files(Path(path)))


def _age(examined: _Examination) -> float:
    return time.monotonic() - examined.since
