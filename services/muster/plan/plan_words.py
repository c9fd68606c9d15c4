"""Texts of plans, estimates and programs, the same on the command line and on pages. Pure."""

from __future__ import annotations

import posixpath
import shlex
from collections.abc import Mapping
from typing import Any

from muster.words.text import amount, duration, plural, size

# Muster puts the newest checkpoint that verifies into place. Whether the program reads it, and goes on with the next
# of its data, only the program knows.
RESUMES = "by the program; data position not checked"
BEGINS_ANEW = "no checkpoint of the program's is kept yet, so that a restart begins anew"


# What somebody looks for first.
_FIRST = ("job", "project", "training", "model", "data", "gang", "memory of a rank", "time and price", "length")


def plan_facts(plan: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the facts of a dry run (replies.Plan), without refusals, faults and warnings. A fact may have several
    lines. The estimate, where there is one, knows more of the model and the length."""
    job, spec = plan["job"], plan["job"]["spec"]
    facts = [("job", f"{job['name']}  ({job['namespace']})")]
    if job.get("project") not in (None, "default"):
        facts.append(("project", job["project"]))
    facts += _training(spec, plan) if spec.get("training") else _program(spec, plan)
    if (admission := plan.get("admission")) is not None:
        facts.append(("queue", "\n".join(admission_lines(admission))))
    if (estimate := plan.get("estimate")) is None:
        return facts
    merged = dict(facts)
    estimated = {name: words for name, words in estimate_facts(estimate) if name != "gang"}
    if formats := estimated.pop("data", None):
        merged["data"] += f"\n{formats}"
    merged |= estimated | {"memory of a rank": describe_memory(estimate)}
    return sorted(merged.items(), key=lambda fact: _FIRST.index(fact[0]) if fact[0] in _FIRST else len(_FIRST))


def does_not_fit(plan: Mapping[str, Any]) -> str:
    """Return what to change of a job whose ranks need more memory than they may have; empty for any other."""
    estimate = plan.get("estimate") or {}
    return (estimate["advice"] or "it needs more memory than there is") if estimate.get("fits") is False else ""


def _training(spec: Mapping[str, Any], plan: Mapping[str, Any]) -> list[tuple[str, str]]:
    training, checkpoint = spec["training"], spec["checkpoint"]
    lasts = (plural(value, unit[:-1]) for unit, value in training["length"].items() if value)
    return [
        ("training", f"{training['task']} {_model(training['model'], plan.get('parameters'))}"),
        ("data", "\n".join(_tidied(source["source"]) for source in training["data"]["train"])),
        ("gang", _gang(spec["gang"], plan)),
        ("batch", _batch(training["batch"], plan)),
        ("length", ", ".join(lasts)),
        ("precision", f"{training['precision']}, {_parallel(training['parallel'])}"),
        ("gradient", _gradient(training["optimizer"])),
        ("checkpoints", f"{checkpoint.get('uri') or 'the platform chooses'} (every: {checkpoint['every']})"),
    ]


def _program(spec: Mapping[str, Any], plan: Mapping[str, Any]) -> list[tuple[str, str]]:
    program, checkpoint = spec["program"], spec["checkpoint"]
    facts = [("program", program_command(spec))]
    if source := program.get("source"):
        facts.append(("source", source))
    if after := program.get("after"):
        facts.append(("evaluates", _evaluated(after)))
    facts += _inputs(program)
    if program.get("steps"):
        facts.append(("length", plural(program["steps"], "step")))
    below = checkpoint.get("folder") or "$MUSTER_CHECKPOINT_DIR"
    return [
        *facts,
        ("gang", _gang(spec["gang"], plan)),
        ("hangs", _hang(program["hang"])),
        ("checkpoints", f"{checkpoint.get('uri') or 'the platform chooses'} (what the program writes in {below})"),
    ]


def _inputs(program: Mapping[str, Any]) -> list[tuple[str, str]]:
    words = [f"{name}: {_input(each)}" for name, each in (program.get("inputs") or {}).items()]
    return [("inputs", "\n".join(words))] if words else []


def _input(each: Mapping[str, Any]) -> str:
    return each.get("source") or f"{each.get('job') or each.get('uri')} (step {each['step']})"


def _hang(hang: Mapping[str, Any]) -> str:
    if hang["off"]:
        return "not looked for"
    limits = [
        f"after {plural(hang[key], 'second')} {without}"
        for key, without in (("silentSeconds", "without output"), ("stepSeconds", "without a step"))
        if hang.get(key)
    ]
    return " or ".join(limits) or "by the pace of the program's own steps"


def admission_lines(admission: Mapping[str, Any]) -> list[str]:
    """Return what the queue would do with the job, and a line for each gang that would make room for it."""
    verdict = {"unknown": "can't be foreseen"}.get(admission["verdict"], admission["verdict"])
    lines = [f"{verdict}: {admission['because']}"]
    if admission["allowedBy"]:
        lines.append(f"allowed by {admission['allowedBy']}")
    return [*lines, *map(describe_eviction, admission["evictions"])]


def describe_eviction(eviction: Mapping[str, Any]) -> str:
    """Return the text for a gang that would make room: why that one, what it gives up and what it costs."""
    who = f"{eviction['project']}/{eviction['job']}" if eviction["job"] else f"a gang of {eviction['project']}"
    goes_on = f"goes on with {plural(eviction['nodesKept'], 'node')}"
    becomes = goes_on if eviction["nodesKept"] else "queues again"
    hours = [eviction[key] / 3600 for key in ("restartGpuSeconds", "uncommittedGpuSeconds")]
    cost = f"its restart costs {hours[0]:.2g} GPU-hours, a checkpoint that fails {hours[1]:.2g} more"
    gives = f"gives up {plural(eviction['gpus'], 'GPU')} and {becomes}"
    return f"{who}, {eviction['because']}, {gives}; {cost}"


def _model(model: Mapping[str, Any], parameters: int | None) -> str:
    source = model.get("preset") or _tidied(model.get("source") or "")
    source = source or ("own shape" if model.get("architecture") else "")
    if origin := model.get("from"):
        source = f"from {origin.get('job') or origin.get('uri')} (step {origin.get('step')})"
    return f"{source}, {amount(parameters)} parameters" if parameters else source


def _tidied(address: str) -> str:
    """Return an address as people read it: a path of this machine without `..`."""
    return posixpath.normpath(address) if address.startswith("/") else address


def _gradient(optimizer: Mapping[str, Any]) -> str:
    clip = optimizer["clipNorm"]
    clipped = f"clipped to a norm of {clip:g}" if clip else "not clipped"
    if optimizer.get("skipSpikes"):
        return f"{clipped}; batches with a spike in it are skipped"
    return f"{clipped}; every batch with finite numbers is learnt from"


def _parallel(parallel: Mapping[str, Any]) -> str:
    context = parallel.get("context", 1)
    split = f"; {context} ranks compute one share: its tokens split {context} ways" if context > 1 else ""
    return f"shard: {parallel['shard']}{split}"


def _gang(gang: Mapping[str, Any], plan: Mapping[str, Any]) -> str:
    low, high = plan["worldSize"]["min"], plan["worldSize"]["max"]
    nodes = gang["nodes"]
    workers = plural(nodes["max"], "worker")
    workers = workers if nodes["min"] == nodes["max"] else f"{nodes['min']} to {workers}"
    ranks = f"{low}" if low == high else f"{low} to {high}"
    what = "GPU" if gang["gpusPerNode"] else "CPU process"
    return f"{workers} × {plural(plan['ranksPerNode'], what)} = world size {ranks}"


def _batch(batch: Mapping[str, Any], plan: Mapping[str, Any]) -> str:
    steps = ", ".join(
        f"{plural(each['microSteps'], 'micro-step')} on {plural(each['ranks'], 'rank')}"
        for each in plan["accumulation"]
    )
    return f"{batch['tokensPerStep']:,} tokens = {plural(plan['samplesPerStep'], 'sample')} per step; {steps}"


def estimate_facts(estimate: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the facts of an estimate (plan/estimate.py), without memory by part, other gangs, warnings and gaps."""
    trained = estimate["trainedParameters"]
    whole = trained == estimate["parameters"]
    learns = "all of them learn" if whole else f"{amount(trained)} of them learn"
    where = estimate.get("instanceType") or estimate["device"]
    facts = [
        ("model", f"{amount(estimate['parameters'])} parameters, {learns}"),
        ("gang", f"{plural(estimate['nodes'], 'worker')}, {plural(estimate['ranks'], 'rank')} on {where}"),
        ("length", _length(estimate)),
    ]
    if formats := estimate.get("formats"):
        facts.append(("data", ", ".join(formats)))
    if sent := _sent(estimate.get("sent") or {}):
        facts.append(("a rank sends", sent))
    return [*facts, ("time and price", _time(estimate)), ("checkpoint size", _commits(estimate["commits"]))]


def _sent(sent: Mapping[str, int]) -> str:
    what = {"data": "weights and gradients", "context": "attention, between ranks that divide rows"}
    parts = [f"{size(count)} of {what[name]}" for name, count in sent.items() if count]
    return f"{', '.join(parts)} per step" if parts else ""


def describe_memory(estimate: Mapping[str, Any]) -> str:
    """Return the memory that a rank needs of its limit, with the sharding that the job would use."""
    chosen = [each for each in estimate["memory"] if each["shard"] == estimate.get("shard")]
    each = (chosen or estimate["memory"])[0]
    from muster.plan.memory import USABLE  # half of all that `muster ls` would import, which words no estimate

    may = f" of {size(each['capacity'] * USABLE)} that it may have" if each.get("capacity") else ""
    return f"{size(each['total'])}{may} ({each['shard']})"


def describe_speed(speed: Mapping[str, Any]) -> str:
    hours = speed.get("hours")
    lasts = f", {duration(hours * 3600)}" if hours else ""
    return f"{amount(speed['tokensPerSecond'])} tokens/s, {speed['stepSeconds']:.3g} s a step{lasts}"


def _length(estimate: Mapping[str, Any]) -> str:
    parts = []
    if steps := estimate.get("steps"):
        parts.append(f"{plural(steps, 'step')} of {amount(estimate['tokens'] / steps)} tokens")
        parts.append(f"{amount(estimate['tokens'])} tokens")
        parts.append(f"{estimate['tokensPerParameter']:.3g} tokens per parameter")
    if epochs := estimate.get("epochs"):
        parts.append("1 epoch" if epochs == 1 else f"{epochs:.3g} epochs")
    return ", ".join(parts) or "only the data says how long an epoch is"


def _time(estimate: Mapping[str, Any]) -> str:
    if not (speed := estimate.get("speed")):
        return "not known for this gang"
    price = estimate.get("price")
    money = "" if price is None else f", {price:,.2f} {estimate['currency']}"
    return f"{describe_speed(speed)}{money}\n{speed['basis']}: {speed['source']}"


def _commits(commits: Mapping[str, Any]) -> str:
    each = f"{size(commits['bytes'])} each, every {commits['every']}"
    if commits.get("seconds"):
        each += f" ({duration(commits['seconds'])})"
    if commits.get("uploadSeconds"):
        each += f", each uploads in {duration(commits['uploadSeconds'])}"
    if commits["firstBytes"] > commits["bytes"]:
        each += f"; the first, with the frozen weights, {size(commits['firstBytes'])}"
    return each


# --- programs ---


def program_command(spec: Mapping[str, Any]) -> str:
    """Return the program's command line, with how often it is started; `spec` is the job's, as a document."""
    program = spec["program"]
    once = "worker" if program.get("launcher") == "none" else "rank"
    return f"{shlex.join(program['command'])}  (once per {once})"


def program_facts(spec: Mapping[str, Any], status: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the facts of a program that a job's page and `muster get` show; none for a training. What becomes of it
    at a restart is said only while there may be one."""
    if not spec.get("program"):
        return []
    if after := spec["program"].get("after"):
        return [("program", program_command(spec)), ("evaluates", _evaluated(after))]
    facts = [("program", program_command(spec)), *_inputs(spec["program"])]
    if status.get("checkpoint"):
        facts.append(("resumes", RESUMES))
    elif not status.get("finishedAt"):
        facts.append(("resumes", BEGINS_ANEW))
    return facts + _results(status)


def _evaluated(after: Mapping[str, Any]) -> str:
    step = f"the checkpoint of step {after['each']}" if isinstance(after["each"], int) else "each checkpoint"
    each = {"best": "the best checkpoint", "last": "the last checkpoint"}.get(after["each"], step)
    return f"{each} of job {after['job']}"


def _results(status: Mapping[str, Any]) -> list[tuple[str, str]]:
    if status.get("resultsFault"):
        return [("results", f"left out: {status['resultsFault']}")]
    return [("results", results_words(status["results"]))] if status.get("results") else []


def results_words(results: Mapping[str, float]) -> str:
    """Return named numbers in one line."""
    return ", ".join(f"{name} {value:.6g}" for name, value in sorted(results.items()))
