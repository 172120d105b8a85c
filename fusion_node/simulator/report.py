"""What a simulation has shown: a document for machines and tables for people."""

from __future__ import annotations

import resource
import statistics
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from fusion_node.simulator.metrics import Metrics
from fusion_node.simulator.settings import Settings
from fusion_node.simulator.world import World

PERCENTILES = (5, 25, 50, 75, 95, 99)


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """By nearest rank; empty for no values."""
    ordered = sorted(values)
    if not ordered:
        return {}
    return {f"p{p}": round(ordered[min(len(ordered) - 1, len(ordered) * p // 100)], 4) for p in PERCENTILES}


def document(world: World, *, seconds: float) -> dict[str, Any]:
    """Everything that was measured, ready for JSON.

    Args:
        seconds: of this computer's time that the simulation took.
    """
    settings, metrics = world.settings, world.metrics
    data = {
        "settings": _settings(settings),
        "model": {"name": world.model.name, "num_layers": world.model.num_layers, "row_bytes": world.model.row_bytes},
        "requests": _requests(metrics),
        "stalls": _stalls(metrics),
        "coverage": _coverage(metrics),
        "waste": {
            "replayed_bytes": round(metrics.replayed_bytes),
            "of_them_prefilled_anew_bytes": round(metrics.prefilled_bytes),
            "sent_bytes": round(metrics.bytes_sent),
            "replayed_share": round(metrics.replayed_bytes / metrics.bytes_sent, 6) if metrics.bytes_sent else 0.0,
        },
        "ejections": _ejections(metrics),
        "faults": dict(sorted(metrics.faults.items())),
        "nodes": {"joined": metrics.joined, "left": metrics.left},
        "leases": {"overlaps": metrics.lease_overlaps, "broken": metrics.broken_leases},
        "trace_digest": world.heap.digest(),
    }
    return {
        "name": "simulate",
        "seconds": round(seconds, 1),
        "checks": _checks(metrics),
        "data": data,
        "cost": {
            "events": world.heap.num_events,
            "frames": world.links.num_frames,
            "events_per_s": round(world.heap.num_events / seconds) if seconds else 0,
            "peak_memory_bytes": peak_memory_bytes(),
        },
    }


def peak_memory_bytes() -> int:
    """Of this process so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _settings(settings: Settings) -> dict[str, Any]:
    names = [name for name in settings.__dataclass_fields__ if name != "partitions"]
    values: dict[str, Any] = {name: getattr(settings, name) for name in names}
    values["mean_lifetime_s"] = None if values["mean_lifetime_s"] == float("inf") else values["mean_lifetime_s"]
    values["partitions"] = [[each.start_s, each.stop_s, each.share] for each in settings.partitions]
    values["membership"] = "real" if settings.is_membership_real else "modelled"
    return values


def tokens_per_s(metrics: Metrics) -> list[float]:
    """Of each whole answer of at least two tokens, after its first one."""
    return [each.tokens / each.decode_s for each in metrics.requests if not each.error and each.decode_s > 0.0]


def _requests(metrics: Metrics) -> dict[str, Any]:
    done = [each for each in metrics.requests if not each.error]
    errors = Counter(each.error for each in metrics.requests if each.error)
    return {
        "answered": len(done),
        "failed": dict(sorted(errors.items())),
        "tokens": sum(each.tokens for each in metrics.requests),
        "wrong_tokens": metrics.wrong_tokens,
        "tokens_per_s": percentiles(tokens_per_s(metrics)),
        "time_to_first_token_s": percentiles([each.first_s for each in done if each.first_s is not None]),
    }


def stalls_by_fault(metrics: Metrics) -> dict[str, list[float]]:
    """Seconds of each repair, by what had befallen the node that was replaced."""
    by_fault: dict[str, list[float]] = {}
    for stall in metrics.stalls:
        by_fault.setdefault(stall.fault, []).append(stall.seconds)
    return dict(sorted(by_fault.items()))


def _stalls(metrics: Metrics) -> dict[str, Any]:
    kinds = Counter(stall.kind for stall in metrics.stalls)
    return {
        "by_fault": {
            fault: {"count": len(values), **percentiles(values)} for fault, values in stalls_by_fault(metrics).items()
        },
        "by_cause_named": dict(sorted(Counter(stall.cause for stall in metrics.stalls).items())),
        "by_repair": dict(sorted(kinds.items())),
    }


def _ejections(metrics: Metrics) -> dict[str, Any]:
    """Of nodes that were in an answer's route before a repair, and not after it."""
    hours = metrics.answered_s / 3600.0
    return {
        "by_standing": dict(sorted(Counter(each.standing.value for each in metrics.ejections).items())),
        "live": sum(each.standing.lives for each in metrics.ejections),
        "false": metrics.false_ejections,
        "wrong": metrics.num_wrong,
        "answered_hours": round(hours, 2),
        "wrong_per_answered_hour": round(metrics.num_wrong / hours, 4) if hours else 0.0,
    }


def _coverage(metrics: Metrics) -> dict[str, Any]:
    covered = [sample.covered for sample in metrics.samples]
    return {
        "share_of_time_with_all_layers": round(sum(each == 1.0 for each in covered) / len(covered), 6),
        "mean_share_of_layers": round(statistics.fmean(covered), 6),
        "least_share_of_layers": round(min(covered), 6),
        "live_nodes_mean": round(statistics.fmean(sample.live for sample in metrics.samples), 1),
        "users_served_at_once_mean": round(statistics.fmean(sample.active for sample in metrics.samples), 1),
    }


def _checks(metrics: Metrics) -> list[dict[str, Any]]:
    """In the form of the benchmarks: what has to hold in every world."""
    num_unnamed = sum(each.error in ("", "FusionError") for each in metrics.requests if each.error)
    return [
        _check("wrong_tokens", "tokens that were lost, repeated or changed", metrics.wrong_tokens, "tokens"),
        _check("lease_overlaps", "KV that was promised to two users", metrics.lease_overlaps, "leases"),
        _check("broken_leases", "leases that ended before their time", metrics.broken_leases, "leases"),
        _check("unnamed_errors", "requests that ended without a result or a named error", num_unnamed, "requests"),
    ]


def _check(name: str, what: str, value: float, unit: str) -> dict[str, Any]:
    return {
        "id": name,
        "what": what,
        "value": value,
        "unit": unit,
        "target": 0,
        "comparison": "==",
        "ok": value == 0,
    }


# for people


def print_report(report: dict[str, Any], console: Console) -> None:
    """Two tables: what users felt, and what befell the swarm."""
    data, cost = report["data"], report["cost"]
    requests, coverage = data["requests"], data["coverage"]
    settings = data["settings"]
    console.print(
        f"{settings['nodes']} nodes, {settings['users']} users, {settings['hours']:g} h of {data['model']['name']}, "
        f"seed {settings['seed']}, membership {settings['membership']}"
    )
    table = Table("what users felt", *(f"p{p}" for p in PERCENTILES), title=None)
    for column in table.columns[1:]:
        column.justify = "right"
    table.add_row("tokens/s of an answer", *_cells(requests["tokens_per_s"]))
    table.add_row("seconds to the first token", *_cells(requests["time_to_first_token_s"]))
    for fault, values in data["stalls"]["by_fault"].items():
        name = "nothing that was injected" if fault == "none" else fault
        table.add_row(f"stall after {name} ({values['count']})", *_cells(values))
    console.print(table)
    facts = Table("what happened", "", show_header=True)
    facts.columns[1].justify = "right"
    failed = ", ".join(f"{count} {name}" for name, count in requests["failed"].items()) or "none"
    facts.add_row("answers", f"{requests['answered']}")
    facts.add_row("requests that failed", failed)
    facts.add_row("tokens that were wrong, lost or repeated", f"{requests['wrong_tokens']}")
    facts.add_row("leases that overlapped, or were broken", f"{data['leases']['overlaps']}, {data['leases']['broken']}")
    facts.add_row("time with all layers served", f"{100 * coverage['share_of_time_with_all_layers']:.2f} %")
    facts.add_row("nodes on average; joined, left", _nodes(data))
    facts.add_row("faults", ", ".join(f"{count} {name}" for name, count in data["faults"].items()) or "none")
    facts.add_row("sent", _size(data["waste"]["sent_bytes"]))
    facts.add_row("of it replayed or prefilled again", _size(data["waste"]["replayed_bytes"]))
    ejections = data["ejections"]
    facts.add_row("live nodes replaced", f"{ejections['live']}")
    facts.add_row("of them named without a fault", f"{ejections['false']}")
    facts.add_row(
        "of them well; per hour of an answer", f"{ejections['wrong']}; {ejections['wrong_per_answered_hour']:g}"
    )
    facts.add_row("events, per second of CPU", f"{cost['events']:,}, {cost['events_per_s']:,}")
    facts.add_row("peak memory", _size(cost["peak_memory_bytes"]))
    facts.add_row("trace digest", data["trace_digest"])
    console.print(facts)


def _nodes(data: dict[str, Any]) -> str:
    return f"{data['coverage']['live_nodes_mean']:g}; {data['nodes']['joined']}, {data['nodes']['left']}"


def _cells(values: dict[str, float]) -> list[str]:
    return [f"{values[f'p{p}']:.2f}" if values else "" for p in PERCENTILES]


def _size(num_bytes: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.3g} TB"
