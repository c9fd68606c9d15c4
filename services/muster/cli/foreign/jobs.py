"""A PyTorchJob, a Kubeflow TrainJob, a SkyPilot task or a torchrun line as the document of a job. Pure.

What has no counterpart is never dropped without a word: each such thing is a sentence of `left`, with its place and,
where there is one, with what to do instead.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any, Final

from muster.cli.foreign.torchrun import ProgramCommand, read_line, read_words
from muster.words.names import GROUP, JOB_NAME, KIND, VERSION

Mapped = Mapping[str, Any]

_GPU: Final = "nvidia.com/gpu"
_SHELLS: Final = re.compile(r"(.*/)?(ba|da|z|)sh")
_NAME_LENGTH: Final = 48
_SET_BY_MUSTER: Final = ("MUSTER_", "PET_")
_RENDEZVOUS: Final = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK", "LOCAL_RANK", "NODE_RANK", "NNODES")
_CHECKPOINTS: Final = (
    "checkpoints: name the folder where the program writes them in checkpoint.folder, or let it write to "
    "$MUSTER_CHECKPOINT_DIR, and let it go on from $MUSTER_RESUME_DIR; until then each restart begins anew"
)


class NotReadable(ValueError):
    """A document that is none of those that can be read, or that lacks what a job needs."""


@dataclass
class ImportedJob:
    """A job's document, and sentences about what was not carried over."""

    name: str
    spec: dict[str, Any] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)

    @property
    def document(self) -> dict[str, Any]:
        return {
            "apiVersion": f"{GROUP}/{VERSION}",
            "kind": KIND,
            "metadata": {"name": self.name},
            "spec": {key: value for key, value in self.spec.items() if value not in ({}, [])},
        }

    def leave(self, place: str, words: str) -> None:
        self.left.append(f"{place}: {words}")


def import_document(document: object) -> ImportedJob:
    """Raises NotReadable."""
    if not isinstance(document, dict):
        raise NotReadable("is not a mapping of keys to values")
    kind, version = document.get("kind"), str(document.get("apiVersion") or "")
    if kind == "PyTorchJob":
        imported = _pytorch_job(document)
    elif kind == "TrainJob":
        imported = _train_job(document)
    elif kind is None and not version and ("run" in document or "resources" in document):
        imported = _sky_task(document)
    elif kind == KIND:
        raise NotReadable("is a job of Muster's already; `muster submit` takes it")
    else:
        words = f"kind {kind!r} of {version!r}" if kind else "neither a kind nor a `run`"
        raise NotReadable(f"has {words}; PyTorchJob, TrainJob, SkyPilot's tasks and torchrun lines can be read")
    imported.left.append(_CHECKPOINTS)
    return imported


def import_torchrun(line: str) -> ImportedJob:
    """The job of a command line, as it would be typed. Raises NotReadable."""
    command = _line(line)
    if command is None:
        raise NotReadable("is more than one command; put it into a script, and start that: bash train.sh")
    imported = ImportedJob(_job_name(_script(command)))
    imported.left += command.left
    gang: dict[str, Any] = {"nodes": _nodes(command)}
    if command.ranks:
        gang["gpusPerNode"] = command.ranks
        imported.leave("gang", f"{command.ranks} ranks are taken for GPUs; for CPUs give processesPerNode instead")
    else:
        imported.leave("gang", "the line names no number of GPUs; give gang.gpusPerNode")
    imported.spec = {"program": {**command.program, "source": "."}, "gang": gang}
    imported.leave("program.source", "the folder of the document is uploaded; name another one if the program is there")
    imported.left.append(_CHECKPOINTS)
    return imported


# -- Kubeflow -------------------------------------------------------------------------------------------------------


def _pytorch_job(document: Mapped) -> ImportedJob:
    imported, spec = ImportedJob(_job_name(_map(document.get("metadata")).get("name"))), _map(document.get("spec"))
    _metadata(imported, document)
    roles = _map(spec.get("pytorchReplicaSpecs"))
    roles_given = {str(role): _map(roles[role]) for role in ("Master", "Worker") if role in roles}
    if not roles_given:
        raise NotReadable("has no Master and no Worker in spec.pytorchReplicaSpecs")
    role = "Worker" if "Worker" in roles_given else "Master"
    nodes = sum(_number(each.get("replicas"), 1) for each in roles_given.values())
    at = f"spec.pytorchReplicaSpecs.{role}"
    pod = _map(_map(roles_given[role].get("template")).get("spec"))
    if len(roles_given) == 2:
        other = _map(_map(roles_given["Master"].get("template")).get("spec"))
        if _container(other, "pytorch") != _container(pod, "pytorch"):
            imported.leave("spec.pytorchReplicaSpecs.Master", "differs from Worker, whose pod all workers have")
    for each in roles_given.values():
        if each.get("restartPolicy") not in (None, "OnFailure", "ExitCode"):
            imported.leave(at, f"restartPolicy {each['restartPolicy']}: restarts have budgets by cause")
            break
    container = _container(pod, "pytorch")
    command = _command(imported, container, at)
    elastic = _map(spec.get("elasticPolicy"))
    ranks = _ranks(imported, elastic.get("nProcPerNode", spec.get("nprocPerNode")), "spec.nprocPerNode")
    _gang(imported, command, container, f"{at}.template.spec", nodes, ranks)
    if elastic.get("minReplicas") or elastic.get("maxReplicas"):
        least, most = _number(elastic.get("minReplicas"), 1), _number(elastic.get("maxReplicas"), nodes)
        imported.spec["gang"]["nodes"] = {"min": least, "max": most} if least != most else least
    for key in elastic.keys() - {"minReplicas", "maxReplicas", "nProcPerNode"}:
        if not key.startswith("rdzv") and key != "standalone":
            imported.leave(f"spec.elasticPolicy.{key}", "restarts have budgets by cause (recovery.budgets)")
    _pod(imported, pod, container, f"{at}.template.spec")
    policy = _map(spec.get("runPolicy"))
    for theirs, ours in (
        ("activeDeadlineSeconds", "activeDeadlineSeconds"),
        ("ttlSecondsAfterFinished", "ttlSecondsAfterFinished"),
        ("suspend", "suspend"),
    ):
        if policy.get(theirs):
            imported.spec[ours] = policy[theirs]
    scheduling = _map(policy.get("schedulingPolicy"))
    if scheduling.get("priorityClass"):
        imported.spec["priorityClassName"] = scheduling["priorityClass"]
    if scheduling.get("queue"):
        imported.leave("spec.runPolicy.schedulingPolicy.queue", "choose gang.scheduler.kind and .queue, or a project")
    if policy.get("backoffLimit") is not None:
        imported.leave("spec.runPolicy.backoffLimit", "restarts have budgets by cause (recovery.budgets)")
    if policy.get("managedBy"):
        imported.leave("spec.runPolicy.managedBy", "Muster's operator manages its own jobs")
    return imported


def _train_job(document: Mapped) -> ImportedJob:
    imported, spec = ImportedJob(_job_name(_map(document.get("metadata")).get("name"))), _map(document.get("spec"))
    _metadata(imported, document)
    trainer, at = _map(spec.get("trainer")), "spec.trainer"
    runtime = str(_map(spec.get("runtimeRef")).get("name") or "")
    if not trainer.get("command") and not trainer.get("args"):
        raise NotReadable(f"has no spec.trainer.command: it is in the runtime {runtime!r}; write it into the job first")
    container = {**trainer, "resources": _map(trainer.get("resourcesPerNode"))}
    command = _command(imported, container, at)
    ranks = _ranks(imported, trainer.get("numProcPerNode"), f"{at}.numProcPerNode")
    _gang(imported, command, container, f"{at}.resourcesPerNode", _number(trainer.get("numNodes"), 1), ranks)
    _runtime(imported, container, at)
    if runtime:
        missing = "" if trainer.get("image") else ", and its image: give runtime.image"
        imported.leave("spec.runtimeRef", f"what the runtime {runtime!r} adds is not in this document{missing}")
    initializer = _map(spec.get("initializer"))
    model = _map(initializer.get("model"))
    if uri := model.get("storageUri"):
        imported.spec["program"]["inputs"] = {"model": {"source": uri}}
        imported.leave("spec.initializer.model", "the model is in $MUSTER_INPUTS_DIR/model, not in /workspace/model")
    if initializer.get("dataset"):
        imported.leave("spec.initializer.dataset", "let the program read its data itself, from a store or a volume")
    for key in ("podTemplateOverrides", "podSpecOverrides", "runtimePatches"):
        if spec.get(key):
            imported.leave(f"spec.{key}", "say it in runtime and gang")
    if spec.get("suspend"):
        imported.spec["suspend"] = True
    return imported


def _metadata(imported: ImportedJob, document: Mapped) -> None:
    metadata = _map(document.get("metadata"))
    if metadata.get("namespace"):
        imported.leave("metadata.namespace", f"{metadata['namespace']!r}: the project decides it, or give it again")
    for key in ("labels", "annotations"):
        if metadata.get(key):
            imported.leave(f"metadata.{key}", f"{', '.join(sorted(metadata[key]))}: give those that are still meant")
    if metadata.get("name") and metadata["name"] != imported.name:
        imported.leave("metadata.name", f"{metadata['name']!r} is no name of a job; it is {imported.name} now")


def _container(pod: Mapped, name: str) -> dict[str, Any]:
    containers = [_map(each) for each in _list(pod.get("containers"))]
    ours = [each for each in containers if each.get("name") == name]
    if not containers:
        raise NotReadable("has a pod without a container")
    return (ours or containers)[0]


def _pod(imported: ImportedJob, pod: Mapped, container: Mapped, at: str) -> None:
    """Carry over what a job may say of its pods, and name the rest."""
    _runtime(imported, container, f"{at}.containers[{container.get('name')}]")
    runtime = imported.spec.setdefault("runtime", {})
    for key in ("nodeSelector", "tolerations", "serviceAccountName"):
        if pod.get(key):
            runtime[key] = pod[key]
    if pod.get("imagePullSecrets"):
        runtime["imagePullSecrets"] = [_map(each).get("name") for each in _list(pod["imagePullSecrets"])]
    affinity = _map(pod.get("affinity"))
    if affinity.get("nodeAffinity"):
        runtime["affinity"] = {"nodeAffinity": affinity["nodeAffinity"]}
    for key in affinity.keys() - {"nodeAffinity"}:
        imported.leave(f"{at}.affinity.{key}", "workers are placed by gang.topology and gang.shareNodes")
    if pod.get("priorityClassName"):
        imported.spec["priorityClassName"] = pod["priorityClassName"]
    _volumes(imported, pod, container, at)
    for each in _list(pod.get("containers")):
        if _map(each).get("name") != container.get("name"):
            imported.leave(f"{at}.containers[{_map(each).get('name')}]", "a worker has the program's container alone")
    if pod.get("initContainers"):
        imported.leave(f"{at}.initContainers", "do it in the image, or at the program's start")
    carried = {
        "containers", "initContainers", "volumes", "nodeSelector", "tolerations", "serviceAccountName", "affinity",
        "imagePullSecrets", "priorityClassName", "restartPolicy", "terminationGracePeriodSeconds",
    }  # fmt: skip
    for key in pod.keys() - carried:
        imported.leave(f"{at}.{key}", "has no counterpart")


def _volumes(imported: ImportedJob, pod: Mapped, container: Mapped, at: str) -> None:
    mounts = {_map(each).get("name"): _map(each) for each in _list(container.get("volumeMounts"))}
    carried = []
    for each in map(_map, _list(pod.get("volumes"))):
        mount = mounts.get(each.get("name"))
        if mount is None:
            continue
        if "hostPath" in each:
            words = "a job may not mount a node's own folder; use a volume of a claim, or a store"
            imported.leave(f"{at}.volumes[{each['name']}]", words)
        elif mount.get("mountPath") == "/dev/shm":  # noqa: S108 - where torch looks for it
            continue  # each worker has one, of half its memory
        else:
            keys = ("mountPath", "subPath", "readOnly")
            carried.append({**each, **{key: mount[key] for key in keys if key in mount}})
            for key in mount.keys() - {"name", *keys}:
                imported.leave(f"{at}.volumes[{each['name']}]", f"{key} has no counterpart")
    if carried:
        imported.spec["runtime"]["volumes"] = carried


def _runtime(imported: ImportedJob, container: Mapped, at: str) -> None:
    """Carry over image and variables of a container."""
    runtime: dict[str, Any] = {}
    if container.get("image"):
        runtime["image"] = container["image"]
    variables = []
    for each in map(_map, _list(container.get("env"))):
        name, source = str(each.get("name")), _map(each.get("valueFrom"))
        if name.startswith(_SET_BY_MUSTER) or name in _RENDEZVOUS:
            imported.leave(f"{at}.env[{name}]", "is set by Muster itself")
        elif source and not (set(source) & {"secretKeyRef", "configMapKeyRef"}):
            imported.leave(f"{at}.env[{name}]", f"comes from {', '.join(source)}, which a job can't say")
        else:
            variables.append(each)
    if variables:
        runtime["env"] = variables
    if container.get("envFrom"):
        runtime["envFrom"] = container["envFrom"]
    if runtime:
        imported.spec["runtime"] = runtime
    if container.get("workingDir"):
        words = f"{container['workingDir']}: a program starts in its own folder; name its script by the whole path"
        imported.leave(f"{at}.workingDir", words)
    carried = {
        "name", "image", "command", "args", "env", "envFrom", "resources", "resourcesPerNode", "volumeMounts",
        "workingDir", "numNodes", "numProcPerNode", "imagePullPolicy",
    }  # fmt: skip
    for key in container.keys() - carried:
        imported.leave(f"{at}.{key}", "has no counterpart")


def _gang(
    imported: ImportedJob, command: ProgramCommand, container: Mapped, at: str, nodes: int, ranks: int | str | None
) -> None:
    resources = _map(container.get("resources"))
    asked = {**_map(resources.get("requests")), **_map(resources.get("limits"))}
    if not resources.keys() & {"requests", "limits"}:
        asked = dict(resources)  # of a TrainJob
    gpus = _number(asked.get(_GPU), 0)
    gang: dict[str, Any] = {"nodes": nodes, "gpusPerNode": gpus}
    ranks = ranks if isinstance(ranks, int) else command.ranks
    if not gpus and ranks:
        gang["processesPerNode"] = ranks
    elif gpus and ranks not in (None, gpus):
        words = f"{ranks} ranks of a worker with {gpus} GPUs: a worker has a rank for each GPU"
        imported.leave(at, words)
    if isinstance(command.nodes, int) and command.nodes != nodes:
        imported.leave(at, f"torchrun --nnodes {command.nodes} contradicts {nodes} workers, which hold")
    amounts = {key: str(asked[key]) for key in ("cpu", "memory") if asked.get(key)}
    if amounts:
        gang["resources"] = amounts
    for key in asked.keys() - {"cpu", "memory", _GPU}:
        why = (
            "adapters are taken as the instance type has them (gang.network.efa)"
            if "efa" in key
            else "has no counterpart"
        )
        imported.leave(f"{at}.resources.{key}", why)
    imported.spec["gang"] = gang
    program = command.program
    if command.launcher == "torchrun" and not command.has_ranks and gpus > 1 and not ranks:
        program["launcher"] = "none"
        imported.leave("program.launcher", f"the command is started once for the {gpus} GPUs of a worker, as it was")
    imported.spec["program"] = program


def _command(imported: ImportedJob, container: Mapped, at: str) -> ProgramCommand:
    words = [str(each) for key in ("command", "args") for each in _list(container.get(key))]
    if not words:
        raise NotReadable(f"has no command in {at}: it is the image's own, which a job must name")
    given = {str(each.get("name")): str(each.get("value")) for each in map(_map, _list(container.get("env")))}
    words = [re.sub(r"\$\(([A-Za-z_]\w*)\)", lambda use: given.get(use[1], use[0]), word) for word in words]
    if any("$(" in word for word in words) and not _SHELLS.fullmatch(words[0]):
        imported.leave(f"{at}.command", "$(NAME) is filled in by Kubernetes alone; write the value, or use a shell")
    try:
        if len(words) == 3 and _SHELLS.fullmatch(words[0]) and re.fullmatch(r"-[a-z]*c", words[1]):
            command = read_line(words[2]) or _script_of_shell(imported, tuple(words), at)
        else:
            command = read_words(words)
    except ValueError as error:
        raise NotReadable(f"has in {at} a command without a program: {error}") from None
    imported.left += command.left
    return command


def _script_of_shell(imported: ImportedJob, words: tuple[str, ...], at: str) -> ProgramCommand:
    """A script of a shell as it is, started once per worker; a torchrun in it reads the gang from PET_… by itself."""
    if "torchrun" in words[2] or "torch.distributed" in words[2]:
        imported.leave(
            at,
            "the script starts torchrun itself: leave out its --nnodes, --node-rank and --master-…, which PET_… say, "
            "or give the one command as program.command, with launcher torchrun",
        )
    return ProgramCommand(words, launcher="none")


def _ranks(imported: ImportedJob, value: Any, at: str) -> int | str | None:
    if value is None or isinstance(value, int):
        return value
    text = str(value)
    if text.isdigit():
        return int(text)
    if text not in ("auto", "gpu"):
        imported.leave(at, f"{text}: give gang.processesPerNode")
    return None


# -- SkyPilot -------------------------------------------------------------------------------------------------------


def _sky_task(document: Mapped) -> ImportedJob:
    imported = ImportedJob(_job_name(document.get("name") or "sky-task"))
    if not isinstance(document.get("run"), str) or not document["run"].strip():
        raise NotReadable("has no `run`, which is the program's command")
    resources = _map(document.get("resources"))
    gang: dict[str, Any] = {"nodes": _number(document.get("num_nodes"), 1), "gpusPerNode": 0}
    imported.spec = {"program": {}, "gang": gang, "runtime": {}}
    _sky_resources(imported, resources, gang)
    command = _line(document["run"]) or _sky_script(imported, document["run"])
    imported.left += command.left
    imported.spec["program"] = command.program
    if command.ranks and not gang["gpusPerNode"]:
        gang["processesPerNode"] = command.ranks
    if workdir := document.get("workdir"):
        if isinstance(workdir, str):
            imported.spec["program"]["source"] = workdir
        else:
            imported.leave("workdir", "a repository is not cloned; name a folder with a copy of it as program.source")
    variables = _map(document.get("envs"))
    env = [{"name": name, "value": str(value)} for name, value in variables.items() if value is not None]
    if env:
        imported.spec["runtime"]["env"] = env
    for name in (name for name, value in variables.items() if value is None):
        imported.leave(f"envs.{name}", "has no value; give it in runtime.env")
    for name in _map(document.get("secrets")):
        words = f"keep it by `muster secrets set`, and name it in runtime.env ({name}, valueFrom.secretKeyRef)"
        imported.leave(f"secrets.{name}", words)
    if document.get("setup"):
        imported.leave(
            "setup", "packages belong into the image; what is left of it can be a script that ends in the command"
        )
    for target, origin in _map(document.get("file_mounts")).items():
        where = origin if isinstance(origin, str) else _map(origin).get("source") or _map(origin).get("name")
        imported.leave(f"file_mounts.{target}", f"{where} is not mounted; read it from the store, or use a volume")
    carried = {"name", "run", "resources", "num_nodes", "workdir", "envs", "secrets", "setup", "file_mounts"}
    for key in document.keys() - carried:
        imported.leave(key, "has no counterpart")
    return imported


def _sky_resources(imported: ImportedJob, resources: Mapped, gang: dict[str, Any]) -> None:
    accelerators = resources.get("accelerators")
    if isinstance(accelerators, list) or (isinstance(accelerators, dict) and len(accelerators) > 1):
        imported.leave("resources.accelerators", "names several kinds, of which the first is taken")
    if isinstance(accelerators, list):
        accelerators = accelerators[0] if accelerators else None
    if isinstance(accelerators, dict):
        accelerators = ":".join(map(str, next(iter(accelerators.items())))) if accelerators else None
    if accelerators:
        kind, _, count = str(accelerators).partition(":")
        gang["gpusPerNode"] = _number(count, 1)
        imported.leave("resources.accelerators", f"{kind}: choose it by gang.instanceTypes or runtime.nodeSelector")
    if resources.get("instance_type"):
        gang["instanceTypes"] = [resources["instance_type"]]
    if resources.get("use_spot"):
        gang["capacity"] = {"prefer": "spot"}
    amounts = {}
    if cpus := re.match(r"[0-9]+", str(resources.get("cpus") or "")):
        amounts["cpu"] = cpus[0]
    if memory := re.match(r"[0-9]+", str(resources.get("memory") or "")):
        amounts["memory"] = f"{memory[0]}Gi"
    if amounts:
        gang["resources"] = amounts
    image = str(resources.get("image_id") or "")
    if image.startswith("docker:"):
        imported.spec["runtime"]["image"] = image.removeprefix("docker:")
    elif image:
        imported.leave("resources.image_id", f"{image} is a machine's image; give runtime.image")
    carried = {"accelerators", "instance_type", "use_spot", "cpus", "memory", "image_id"}
    for key in resources.keys() - carried:
        imported.leave(f"resources.{key}", "has no counterpart; the cluster's nodes are what they are")


_SKY_VARIABLES: Final = {
    "SKYPILOT_NUM_NODES": "PET_NNODES",
    "SKYPILOT_NODE_RANK": "PET_NODE_RANK",
    "SKYPILOT_NUM_GPUS_PER_NODE": "PET_NPROC_PER_NODE",
}


def _sky_script(imported: ImportedJob, script: str) -> ProgramCommand:
    """A script as it is, started once per worker, with SkyPilot's variables where Muster has the same."""
    used = [name for name in _SKY_VARIABLES if name in script]
    if "SKYPILOT_NODE_IPS" in script:
        words = "$SKYPILOT_NODE_IPS is not set: the first worker's address is $MASTER_ADDR"
        imported.leave("run", words)
    exports = "".join(f"export {name}=${_SKY_VARIABLES[name]}\n" for name in used)
    return _script_of_shell(imported, ("bash", "-c", exports + script), "run")


# -- shared ---------------------------------------------------------------------------------------------------------


def _line(line: str) -> ProgramCommand | None:
    try:
        return read_line(line)
    except ValueError as error:
        raise NotReadable(str(error)) from None


def _nodes(command: ProgramCommand) -> Any:
    if isinstance(command.nodes, tuple):
        return {"min": command.nodes[0], "max": command.nodes[1]}
    return command.nodes or 1


def _script(command: ProgramCommand) -> str:
    words = command.words
    if words[0] == "-m":
        return words[1]
    script = next((word for text in words for word in text.split() if word.endswith(".py")), words[0])
    return PurePosixPath(script).stem


def _job_name(name: object) -> str:
    text = re.sub(r"[^a-z0-9]+", "-", str(name or "job").lower()).strip("-")
    text = text if text[:1].isalpha() else f"job-{text}"
    text = text[:_NAME_LENGTH].strip("-")
    assert JOB_NAME.fullmatch(text), f"{text} is a job's name"
    return text


def _number(value: Any, default: int) -> int:
    try:
        return int(value)
    except (TypeError, ValueError):
        return default


def _map(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _list(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list) else ()
