"""Ray's nodes: listing them, and running functions on them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import GetTimeoutError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from outrider.runner.hosts.host_selection import declared_cores
from outrider.runner.hosts.worker_errors import explain

ANSWER_SECONDS = 120.0


def alive() -> list[dict[str, Any]]:
    return [node for node in ray.nodes() if node["Alive"]]


def own() -> str:
    """The id of the node that this process is connected to."""
    return str(ray.get_runtime_context().get_node_id())


def offering(nodes: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The nodes that declare cores; others (a head that only schedules, say) are not used."""
    return [node for node in nodes if declared_cores(node["Resources"])]


def names(nodes: Sequence[Mapping[str, Any]]) -> list[str]:
    """Names for messages: host name, address and the beginning of Ray's id (one host may have several Ray nodes)."""
    return [f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']}, {node['NodeID'][:6]})" for node in nodes]


def start(function: Callable[..., Any], node: str, *given: Any) -> Any:
    """Run a function of an installed module on a node; returns its future."""
    task = ray.remote(num_cpus=0, max_retries=0)(function)
    return task.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote(*given)


def answered(futures: Sequence[Any], seconds: float) -> list[Any]:
    """Wait up to ``seconds`` for the first answer; all futures that are ready then."""
    first, others = ray.wait(list(futures), num_returns=1, timeout=seconds)
    more = ray.wait(others, num_returns=len(others), timeout=0)[0] if first and others else []
    return [*first, *more]


def answer(future: Any) -> Any:
    """The value of a future, or a sentence about why it has none."""
    try:
        return ray.get(future, timeout=0)
    except GetTimeoutError:
        return f"no answer within {ANSWER_SECONDS:g} s"
    except Exception as error:  # another installation may raise anything
        return explain(error)


def ask(function: Callable[..., Any], arguments: Mapping[str, tuple[Any, ...]]) -> dict[str, Any]:
    """Run a function on each of these nodes: its values, or sentences about why there are none."""
    futures = {node: start(function, node, *given) for node, given in arguments.items()}
    ray.wait(list(futures.values()), num_returns=len(futures), timeout=ANSWER_SECONDS)
    return {node: answer(future) for node, future in futures.items()}
