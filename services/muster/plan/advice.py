"""Next steps for a job, from its status: the text that a person reads when a job does not run. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from muster.plan.layouts import KEEP_GATHERED, SMALLEST
from muster.recipe.verifiers import OUT_OF_MEMORY, OUT_OF_TIME
from muster.words.gang import ranks_per_node
from muster.words.names import ExitCode
from muster.words.signals import Cause
from muster.words.status import Failure, JobStatus, Phase, Progress

_BY_CAUSE: Mapping[Cause, tuple[str, ...]] = {
    Cause.USER_ERROR: (
        "Read the message and the end of the log: the job itself is wrong, so it is not restarted.",
        "Put it right and submit it again, or clone it with the change.",
    ),
    Cause.OUT_OF_MEMORY: ("Clone the job with a shorter training.data.sequenceLength, or train a smaller model.",),
    Cause.NUMERIC: (
        "Look at the loss before the failure (metrics): a rise points to the learning rate, a single jump to the data.",
        "Clone the job with a lower training.optimizer.lr or more warm-up; with fp16, try bf16.",
    ),
    Cause.HANG: (
        "Look at the logs of all workers: the rank that is silent first is the one that hangs.",
        "If it comes again on the same node, take that node out of service.",
    ),
    Cause.INFRASTRUCTURE: (
        "Nothing to do while it restarts by itself; attempts shows which nodes failed.",
        "When the budget is spent: look at those nodes and clone the job from its last checkpoint (model.from).",
    ),
    Cause.PREEMPTION: ("Nothing to do: preemptions cost no restart budget; the job resumes from its last checkpoint.",),
    Cause.EVICTION: ("Nothing to do: evictions cost no restart budget; the job resumes from its last checkpoint.",),
    Cause.STORAGE: (
        "Check that the checkpoint folder exists, can be written by the workers and has space.",
        "The job goes on by itself once storage answers, as long as its budget lasts.",
    ),
    Cause.UNKNOWN: ("Read the end of the named worker's log: the exit code alone does not tell the cause.",),
}
# Of a program, whose settings are its own.
_BY_PROGRAM: Mapping[Cause, tuple[str, ...]] = {
    Cause.USER_ERROR: (
        "Read the message and the end of the log: the program ended by itself, so it is not restarted.",
        "Put it right and submit it again; the folder is uploaded anew if it has changed.",
    ),
    Cause.OUT_OF_MEMORY: ("Let the program take a smaller batch for each rank, or ask for more GPUs.",),
    Cause.NUMERIC: ("Look at the log before the failure: the program's numbers are its own.",),
    Cause.INFRASTRUCTURE: (
        "Nothing to do while it restarts by itself; attempts shows which nodes failed.",
        "When the budget is spent: look at those nodes, and clone the job.",
    ),
}


# Fields of a job in the reason of NodeTooSmall.
_LIMITS = re.compile(r"gang\.(?:gpusPerNode|resources\.cpu|resources\.memory)")
# The operator's codes that ask for something other than what their phase or cause does.
_BY_CODE: Mapping[str, tuple[str, ...]] = {
    "GangTooLarge": ("Clone the job with fewer gang.nodes or gpusPerNode: this gang would not fit an empty fleet.",),
    "NodeTooSmall": ("Clone the job and ask for less per node: no node of this cluster has what the reason names.",),
    "WorkersRejected": ("Read the reason: a quota or a part of the platform refuses the pods; it is tried again.",),
    "AwaitingCommits": (
        "See that the operator reaches the checkpoint address, and that the job's folder is where it was.",
        "It is looked for again by itself; to begin anew, clone the job.",
    ),
    "InvalidSpec": ("Put right what the reason names, and submit the job anew.",),
    "TopologyUnsatisfiable": ("Clone the job with topology.preferred instead of required, or with fewer nodes.",),
    "NamespaceLimit": ("Wait until another job of the namespace ends, or ask for a higher limit.",),
    "ProjectLimit": ("Wait until a job that the reason names ends, or ask an admin for a higher quota.",),
    "PersonLimit": ("Wait until a job of yours ends, or ask a maintainer of the project for a higher quota.",),
    "MonthLimit": (
        "Ask an admin to raise the budget that the reason names (`muster projects set PROJECT --set NAME=VALUE`).",
        "Or wait: a new month (UTC) begins with nothing used. It goes on by itself, from its last checkpoint.",
    ),
    "ExceedsLimit": ("Clone the job with a smaller gang, or ask an admin for a higher limit.",),
    "AwaitingPreemption": (
        "Nothing to do: the jobs that the reason names commit, and then this one gets their nodes.",
    ),
    "AwaitingScheduler": ("Look at the queue of the scheduler that spec.gang.scheduler names: it admits the gang.",),
    "CrashLoop": (
        "Look at the attempts: they end before a new checkpoint. Read the end of the last log.",
        "A shorter checkpoint.every makes progress survive shorter lives.",
    ),
    "RepeatedFailure": (
        "Read the traceback in the named worker's log: the program fails at this step whenever it gets there.",
        "Mend the cause, then clone the job with training.model.from its last checkpoint.",
    ),
    "DeadlineExceeded": (
        "Clone the job with a longer activeDeadlineSeconds, from its last checkpoint (training.model.from).",
    ),
    "WouldRestart": ("Set recovery.dryRun to false if the operator should act on this by itself.",),
    "Stalling": ("Nothing yet: a stall that lasts ends the attempt and the job restarts from its last checkpoint.",),
}

# Of a program, which decides by itself when it saves: no setting of a training applies.
_PROGRAM_BY_CODE: Mapping[str, tuple[str, ...]] = {
    "CrashLoop": (
        "Look at the attempts: they end before a new checkpoint. Read the end of the last log.",
        "Let the program save more often: each checkpoint that is kept makes progress survive shorter lives.",
    ),
    "RepeatedFailure": (
        "Read the traceback in the named worker's log: the program fails at this step whenever it gets there.",
        "Mend the cause, then clone the job with its last checkpoint as an input (program.inputs).",
    ),
    "DeadlineExceeded": (
        "Clone the job with a longer activeDeadlineSeconds and its last checkpoint as an input (program.inputs).",
    ),
}

# Of a gang that trains all the same. What was found is said first, for `because` tells of the phase.
_BY_CONDITION: Mapping[str, str] = {
    "Straggler": "If it comes again on the same node, take that node out of service.",
    "DataBound": "Put the data nearer to the workers, or ask for more gang.resources.cpu.",
    "CheckpointOverdue": "See that the checkpoint folder can be written and has space.",
    "BatchesSkipped": "Look at the loss (metrics): a rise points to the learning rate, single steps to the data.",
    "TrackingFailed": "Training goes on without it, `muster metrics` has every number; the next attempt tries anew.",
    "SidecarFailed": "Training goes on without it. The container is not the job's own: tell who runs the cluster.",
}


STOPPED_SHARE = 0.05  # of a verifier's programs, from which on it is worth a word
_SETTINGS: Mapping[str, str] = {OUT_OF_TIME: "timeoutSeconds", OUT_OF_MEMORY: "memoryMegabytes"}


def advice(
    status: JobStatus,
    *,
    suspend: bool,
    cancel: bool,
    handed_over: bool,
    ahead: int,
    spec: Mapping[str, Any] | None = None,
    name: str = "JOB",
    folder: str = "",
    one_machine: bool = False,
) -> list[str]:
    """Return the next steps for the job of that name, the most useful first; none when nothing needs to be done.

    Where no API knows the job by its name, `folder` is its checkpoint folder, which commands take instead.
    `one_machine` says that the nodes are those of a `muster up`.
    """
    if cancel and not status.phase.terminal:
        return ["Nothing: the job is being cancelled and ends when its last worker is gone."]
    if not handed_over and not status.phase.terminal:
        return ["Nothing yet: the job is stored and is being handed to the operator. If this stays, look at /readyz."]
    if status.code == "MonthLimit" and not suspend:
        return list(_BY_CODE[status.code])
    if status.phase == Phase.SUSPENDED or suspend:
        return [f"Continue the job when you are ready: `muster resume {name}`."]
    if one_machine and (start := start_with(status.code, status.because, spec or {})):
        return [start, f"Or clone the job with a smaller gang: `muster clone {name} --set gang.gpusPerNode=0`."]
    if status.code == "NodeTooSmall" and (fields := _LIMITS.findall(status.because)):
        return [f"Clone the job with a smaller {' and '.join(fields)}: no node has that much."]
    if (spec or {}).get("program") and status.code in _PROGRAM_BY_CODE:
        return list(_PROGRAM_BY_CODE[status.code])
    if status.code in _BY_CODE:
        return list(_BY_CODE[status.code])
    if status.phase == Phase.FAILED:
        return _failed(status, spec or {}, name)
    if status.phase == Phase.RESTARTING and status.last_failure is not None:
        return ["Nothing now: the job restarts by itself.", *_by_failure(status.last_failure, spec or {})]
    if status.phase == Phase.QUEUED:
        return _queued(status, ahead)
    if status.phase == Phase.SUCCEEDED:
        model = folder or name
        if (spec or {}).get("program"):
            return [
                f"The program is done. `muster logs {name}` has its output, and `muster checkpoints ls {model}` lists "
                "what is kept of its checkpoint folder."
            ]
        return [
            f"The job is done. Try the model: `muster chat {model}`. Export it: `muster export {model} --to FOLDER`.",
            f"`muster checkpoints ls {model}` lists its checkpoints.",
        ]
    if status.phase == Phase.CANCELLED:
        return [f"Run the job again: `muster clone {name}`."]
    steps = [
        f"{condition.type}: {condition.message}. {_BY_CONDITION[condition.type]}"
        for condition in status.conditions
        if condition.type in _BY_CONDITION and condition.status == "True"
    ]
    return [*steps, *_stopped_programs(status.progress)]


def start_with(code: str, because: str, spec: Mapping[str, Any]) -> str:
    """Return how to start a platform of one machine that could run the gang which this one never can; empty where its
    nodes are not what the reason names."""
    of_gpus = code == "NodeTooSmall" and "gang.gpusPerNode" in because
    if not (of_gpus or code == "GangTooLarge"):
        return ""
    gang = spec.get("gang") or {}
    nodes, per_node = gang.get("nodes", 1), gang.get("gpusPerNode", 0)
    least = nodes.get("min", 1) if isinstance(nodes, dict) else nodes
    options = f"--nodes {least} --gpus-per-node {per_node}"
    return f"This platform was started with less: `muster down`, then `muster up {options}` where the machine has that."


def _stopped_programs(progress: Progress | None) -> Iterator[str]:
    """A model's programs that hung or took too much memory: their score of 0 alone does not show that."""
    for name, share in {**progress.values, **progress.evaluation_values}.items() if progress else ():
        called, _, limit = name.rpartition("/")
        if limit in _SETTINGS and share >= STOPPED_SHARE:
            yield (
                f"Verifier {called}: {share:.0%} of the programs that it last ran were stopped at {_SETTINGS[limit]}, "
                "and score 0. Raise it where good answers need more."
            )


def _by_failure(failure: Failure, spec: Mapping[str, Any]) -> list[str]:
    if failure.cause == Cause.OUT_OF_MEMORY:
        return _out_of_memory(failure, spec)
    if spec.get("program") and failure.cause in _BY_PROGRAM:
        return list(_BY_PROGRAM[failure.cause])
    return list(_BY_CAUSE[failure.cause])


def _out_of_memory(failure: Failure, spec: Mapping[str, Any]) -> list[str]:
    """Advise by the changes that the message names, where the trainer has worked out which are enough. Else by the
    limit that was hit, the container's memory or the device's, and only with what this job has left to change."""
    if "It fits with " in failure.message:
        return ["Clone the job with all that one of the reason's changes names: less than that is not enough."]
    if "Nothing that leaves the job as it is makes it fit" in failure.message:
        return ["Clone the job with what the reason names: no other setting makes this model fit there."]
    gang, training = spec.get("gang") or {}, spec.get("training") or {}
    memory = (gang.get("resources") or {}).get("memory")
    if failure.exit_code != ExitCode.OUT_OF_MEMORY:  # the kernel killed it: the container's limit, or the node's memory
        if memory:
            return [
                f"Clone the job with a larger gang.resources.memory: the worker was killed at its limit of {memory}."
            ]
        return [
            "Clone the job with gang.resources.memory set to what a worker needs, so that it goes to a node with it."
        ]
    if spec.get("program"):
        return list(_BY_PROGRAM[Cause.OUT_OF_MEMORY])
    steps = []
    if (training.get("batch") or {}).get("microBatch", 1) > 1:
        steps.append(
            "Clone the job with a smaller training.batch.microBatch; tokensPerStep and so the result stay the same."
        )
    parallel, nodes = training.get("parallel") or {}, gang.get("nodes", 1)
    least = nodes.get("min", 1) if isinstance(nodes, dict) else nodes
    ranks = int(least) * ranks_per_node(spec)
    if ranks > 1 and parallel.get("shard", "auto") in KEEP_GATHERED:
        steps.append(f"Or set training.parallel.shard: {SMALLEST}, which divides weights and optimizer over the ranks.")
    if parallel.get("activationCheckpointing", "none") != "full":
        steps.append("Or set training.parallel.activationCheckpointing: full, which trades compute for memory.")
    return steps or list(_BY_CAUSE[Cause.OUT_OF_MEMORY])


def _failed(status: JobStatus, spec: Mapping[str, Any], name: str) -> list[str]:
    if status.last_failure is None:
        return [f"Fix what the reason names, then run the job again: `muster clone {name} --set PATH=VALUE`."]
    steps = _by_failure(status.last_failure, spec)
    if status.checkpoint is not None and status.last_failure.cause != Cause.USER_ERROR:
        by = (
            "program.inputs gives it to a new job"
            if spec.get("program")
            else "training.model.from starts a new job from it"
        )
        steps.append(f"The checkpoint of step {status.checkpoint.step} is kept: {by}.")
    return steps


def _queued(status: JobStatus, ahead: int) -> list[str]:
    if status.code in ("Created", "Submitted", "AwaitingAdmission"):
        return ["Nothing yet: the operator has still to look at the job. If this stays, look at the operator's log."]
    if ahead:
        jobs = f"{ahead} jobs come" if ahead > 1 else "1 job comes"
        return [
            f"Wait until the capacity that the reason names is free: {jobs} before this one in the queue, as far as "
            "they fit (`muster queue`).",
            "Or submit with a higher priority, or a smaller gang.nodes.",
        ]
    return ["Wait until the capacity that the reason names is free, or clone the job with a smaller gang."]


def unreadable(raw: Mapping[str, Any]) -> list[str]:
    """Advise on a status that a newer operator wrote."""
    return [f"The operator is newer than this API and says {raw.get('phase')!r}; upgrade the API to read the rest."]
