"""Replay of a decision: reads an Observed from a real system and prints the Decision with its reasons.

`muster-operator dump … > observed.json` takes such a document from a running system; nothing here touches one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from muster.operator.core.audit import audit
from muster.operator.core.causes import diagnose
from muster.operator.core.decide import RULES, decide
from muster.operator.core.decision import JobDecision
from muster.operator.core.observed import ObservedJob, ObservedWorker, from_json
from muster.operator.core.worker_summary import summarize_workers
from muster.words.base import dump


def main_replay(path: str) -> int:
    """Print the decision for the document at `path`. Exit status: 1 if audit refuses it, 2 if it can't be read."""
    try:
        seen = from_json(Path(path).read_bytes())
    except OSError as error:
        print(f"can't read {path}: {error.strerror}; name a file that `muster-operator dump` wrote")
        return 2
    except ValueError as error:
        print(f"{path} is not an observed state: {error}\nname a file that `muster-operator dump` wrote")
        return 2
    decision = decide(seen)
    faults = audit(replace(seen, fresh=True), decision)  # a real pass would have looked again, freshly
    print("\n".join(explain(seen, decision, faults)))
    return 1 if faults else 0


def explain(seen: ObservedJob, decision: JobDecision, faults: tuple[str, ...]) -> Iterator[str]:
    """The decision in lines for a person: what was seen, what is decided and why."""
    status, summary = seen.status, summarize_workers(seen)
    read = "fresh" if seen.fresh else "cached"
    yield f"job {seen.namespace}/{seen.name} ({seen.uid}), version {seen.version}, {read} read"
    yield f"  status: {status.phase} ({status.code}): {status.because}"
    commit = f"step {seen.committed.step}" if seen.committed else "none"
    workers = f"{summary.ready} of {status.gang.wanted} workers run"
    yield f"  attempt {status.attempt}: {workers}; newest checkpoint: {commit}"
    yield from (f"  {_worker(worker)}" for worker in seen.workers[:20])
    if len(seen.workers) > 20:
        yield f"  … and {len(seen.workers) - 20} more workers"
    yield from (f"  signal {s.kind} for attempt {s.attempt}: {s.message}" for s in seen.signals)
    if seen.wait:
        yield f"  admission: {seen.wait.code}: {seen.wait.because}"
    diagnosis = diagnose(summary) if summary.mine else None
    if diagnosis:
        yield f"  evidence: {diagnosis.failure.cause} (strength {diagnosis.strength}): {diagnosis.failure.message}"
    rule = next(rule.__name__ for rule in RULES if rule(summary) is not None)
    yield f"decision by rule `{rule}`: {decision.code}: {decision.because}"
    if decision.trusts_absence:
        yield "  rests on something being absent" + (
            "" if seen.fresh else ": the operator would look again, freshly, first"
        )
    if decision.status != status:
        yield "  writes status:"
        yield from (f"    {line}" for line in _changes(dump(status), dump(decision.status)))
    yield from (f"  does: {action}" for action in decision.actions)
    if decision.wake_after is not None:
        yield f"  looks again after {decision.wake_after:.1f} s"
    if not decision.actions and decision.status == status:
        yield "  changes nothing"
    yield from (f"  AUDIT REFUSES: {fault}" for fault in faults)


def _worker(worker: ObservedWorker) -> str:
    beat = worker.heartbeats[0] if worker.heartbeats else None
    parts = [f"{worker.id} on {worker.node}: {worker.state}"]
    parts += [worker.reason] if worker.reason else []
    parts += [f"exit code {worker.exit.exit_code}"] if worker.exit else []
    parts += [f"step {beat.step}, phase {beat.phase}"] if beat else []
    parts += ["being removed"] if worker.removing else []
    return ", ".join(parts)


def _changes(before: Any, after: Any, path: str = "") -> Iterator[str]:
    if isinstance(before, dict) and isinstance(after, dict):
        for key in sorted(before.keys() | after.keys()):
            yield from _changes(before.get(key), after.get(key), f"{path}.{key}" if path else key)
    elif isinstance(before, list) and isinstance(after, list):
        for index in range(max(len(before), len(after))):
            old, new = (side[index] if index < len(side) else None for side in (before, after))
            yield from _changes(old, new, f"{path}[{index}]")
    elif before != after:
        yield f"{path}: {_short(before)} -> {_short(after)}"


def _short(value: Any) -> str:
    text = "nothing" if value is None else repr(value)
    return text if len(text) <= 160 else text[:159] + "…"
