"""Metrics of the server in Prometheus' text format; counters count from the server's start."""

from __future__ import annotations

from outrider.runner.serve.service import Service


def metrics(service: Service) -> str:
    totals = service.totals()
    lines = []

    def add(name: str, kind: str, meaning: str, values: dict[str, float]) -> None:
        lines.append(f"# HELP outrider_{name} {meaning}")
        lines.append(f"# TYPE outrider_{name} {kind}")
        lines.extend(f"outrider_{name}{labels} {value}" for labels, value in values.items())

    add("batches", "gauge", "Batches by status", _labelled("status", totals["batches"]))
    add("rows_total", "counter", "Rows of batches that have ended", _labelled("outcome", totals["rows"]))
    add("tokens_total", "counter", "Tokens of the answers of batches", {"": totals["tokens"]})
    add("proposed_total", "counter", "Candidates that were proposed for them", {"": totals["proposed"]})
    add("accepted_total", "counter", "Candidates of these that held", {"": totals["accepted"]})
    states = {f'{{model="{_escaped(model)}",state="{state}"}}': 1 for model, state in service.runner.state().items()}
    add("model_state", "gauge", "What each model is at", dict(states))
    return "\n".join(lines) + "\n"


def _labelled(label: str, values: dict[str, int]) -> dict[str, float]:
    return {f'{{{label}="{_escaped(name)}"}}': value for name, value in values.items()}


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
