"""What the replicas' metrics and statistics are together."""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Iterable, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, generate_latest

__all__ = ["Counts", "merged_metrics", "merged_stats"]

_SUMS = ("running", "waiting", "preemptions", "generated_tokens", "tokens_per_s")
_MEANS = ("kv_usage", "prefix_hit_rate", "tokens_per_round")
_TABLES = ("off_reasons", "finished")


class Counts:
    """What the front door itself counts."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self.retried = Counter(
            "outrider:door_retried", "Requests passed on again, as their replica did not answer.", registry=self._registry
        )
        self.lost = Counter("outrider:door_lost", "Answers cut off, as their replica was lost.", registry=self._registry)
        self._answers = Counter("outrider:door_http_requests", "HTTP answers.", ("route", "status"), registry=self._registry)

    def answered(self, route: str, status: int) -> None:
        """Count one HTTP answer."""
        self._answers.labels(route, str(status)).inc()

    def written(self) -> bytes:
        """The counts as Prometheus reads them."""
        return generate_latest(self._registry)


def merged_metrics(texts: Mapping[str, bytes]) -> bytes:
    """Metrics of several replicas, each with the label `replica`; a family's samples stand together below its description."""
    families: dict[str, tuple[list[str], list[str]]] = {}
    for replica, text in texts.items():
        described: set[str] = set(families)
        family = ""
        for line in text.decode().splitlines():
            if line.startswith("# "):
                family = line.split(" ", 3)[2]
                comments, _ = families.setdefault(family, ([], []))
                if family not in described:
                    comments.append(line)
            elif line:
                families.setdefault(family, ([], []))[1].append(_labelled(line, replica))
    lines: Iterable[str] = (line for comments, samples in families.values() for line in (*comments, *samples))
    return "".join(f"{line}\n" for line in lines).encode()


def _labelled(sample: str, replica: str) -> str:
    name, brace, rest = sample.partition("{")
    if brace:
        return f'{name}{{replica="{replica}",{rest}'
    name, _, value = sample.partition(" ")
    return f'{name}{{replica="{replica}"}} {value}'


def merged_stats(stats: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The snapshot for dashboards: sums and means over replicas, latencies of the first, and each replica's own."""
    every = list(stats.values())
    merged = dict(every[0])
    for name in _SUMS:
        merged[name] = sum(one[name] for one in every)
    for name in _MEANS:
        merged[name] = round(sum(one[name] for one in every) / len(every), 6)
    for name in _TABLES:
        merged[name] = dict(sum((Tally(one[name]) for one in every), Tally()))
    methods: dict[str, Tally[str]] = {}
    for one in every:
        for method, counts in one["by_method"].items():
            methods.setdefault(method, Tally()).update(counts)
    merged["by_method"] = {method: dict(counts) for method, counts in methods.items()}
    return merged | {"replicas": {name: dict(one) for name, one in stats.items()}}
