"""Service accounts, Secrets and claims that a job names, and namespaces that are never a job's. Pure.

The API may hand a job to every namespace of the cluster, and Kubernetes lets a pod use any service account, Secret and
claim of its namespace. So each caller of the API could use all of them, if the API did not ask what the project lists.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from muster.api.core.limits import ProjectLimits, matches
from muster.recipe.document import JobSpec
from muster.words.base import DocumentProblem
from muster.words.job import Runtime
from muster.words.names import DEFAULT_PROJECT

_SYSTEM = re.compile(r"(kube|openshift)-.*")
# Where a volume names a Secret, by the path of keys; tests/unit/api/test_api_cluster_objects.py holds this
# against Kubernetes' own schema of a pod. A SecretProviderClass stands for secrets of another store.
SECRET_PATHS: tuple[tuple[str, ...], ...] = (
    ("secret", "secretName"),
    ("csi", "nodePublishSecretRef", "name"),
    ("csi", "volumeAttributes", "secretProviderClass"),
    ("azureFile", "secretName"),
    ("cephfs", "secretRef", "name"),
    ("cinder", "secretRef", "name"),
    ("flexVolume", "secretRef", "name"),
    ("iscsi", "secretRef", "name"),
    ("rbd", "secretRef", "name"),
    ("scaleIO", "secretRef", "name"),
    ("storageos", "secretRef", "name"),
)
CLAIM_PATHS: tuple[tuple[str, ...], ...] = (
    ("persistentVolumeClaim", "claimName"),
    ("ephemeral", "volumeClaimTemplate", "spec", "dataSource", "name"),
    ("ephemeral", "volumeClaimTemplate", "spec", "dataSourceRef", "name"),
)


@dataclass(frozen=True)
class ObjectUse:
    """One place of a job that names an object of its namespace: `kind` is the project's limit that lists it."""

    kind: str
    path: str
    name: str


_WORDS = {"serviceAccounts": "service account", "secrets": "Secret", "claims": "claim"}


def is_system_namespace(namespace: str, release: str) -> bool:
    """Return whether the namespace is Kubernetes' own or that of Muster's release (empty: there is none)."""
    return bool(_SYSTEM.fullmatch(namespace)) or (bool(release) and namespace == release)


def objects_named(runtime: Runtime) -> Iterator[ObjectUse]:
    """Yield every service account, Secret and claim that the pods of a job would use because the job says so."""
    if runtime.service_account_name is not None:
        yield ObjectUse("serviceAccounts", "spec.runtime.serviceAccountName", runtime.service_account_name)
    for index, name in enumerate(runtime.image_pull_secrets):
        yield ObjectUse("secrets", f"spec.runtime.imagePullSecrets[{index}]", name)
    for index, source in enumerate(runtime.env_from):
        yield from _at(source, "secrets", f"spec.runtime.envFrom[{index}]", ("secretRef", "name"))
    for index, variable in enumerate(runtime.env):
        reference = variable.value_from.secret_key_ref if variable.value_from else None
        if reference is not None:
            yield ObjectUse("secrets", f"spec.runtime.env[{index}].valueFrom.secretKeyRef.name", reference.name)
    for index, volume in enumerate(runtime.volumes):
        yield from _of_volume(volume, f"spec.runtime.volumes[{index}]")


def _of_volume(volume: Mapping[str, Any], path: str) -> Iterator[ObjectUse]:
    for keys in SECRET_PATHS:
        yield from _at(volume, "secrets", path, keys)
    for keys in CLAIM_PATHS:
        yield from _at(volume, "claims", path, keys)
    projected = volume.get("projected")
    sources = projected.get("sources") if isinstance(projected, Mapping) else None
    for index, source in enumerate(sources if isinstance(sources, list | tuple) else ()):
        yield from _at(source, "secrets", f"{path}.projected.sources[{index}]", ("secret", "name"))


def _at(value: Any, kind: str, path: str, keys: Sequence[str]) -> Iterator[ObjectUse]:
    for key in keys:
        if not isinstance(value, Mapping) or value.get(key) is None:
            return
        value = value[key]
    yield ObjectUse(kind, ".".join((path, *keys)), str(value))


def object_problems(
    spec: JobSpec, limits: ProjectLimits, project: str, own_secrets: Sequence[str], strict: bool = True
) -> tuple[DocumentProblem, ...]:
    """Return a problem for each object that the job names and its project does not list. `own_secrets` are the
    project's secrets (`muster secrets`) in the job's namespace, which need no listing. Unless `strict`, a project that
    lists nothing of a kind lets its jobs name all of it."""
    account = (limits.service_account,) if limits.service_account else ()
    accounts = (*account, *(limits.service_accounts or ())) if account else limits.service_accounts
    limited = {"serviceAccounts": accounts, "secrets": limits.secrets, "claims": limits.claims}
    listed = {kind: names or () for kind, names in limited.items()}
    problems = []
    for use in objects_named(spec.runtime):
        if limited[use.kind] is None and not strict:
            continue
        own = use.kind == "secrets" and use.name in own_secrets
        if own or any(matches(use.name, each) for each in listed[use.kind]):
            continue
        listed_names = ", ".join((*listed[use.kind], *(own_secrets if use.kind == "secrets" else ()))[:20])
        words = f"project {project!r} lists no {_WORDS[use.kind]} {use.name!r} (it has {listed_names or 'none'})"
        advice = "leave it out"
        if use.kind == "secrets" and not use.path.startswith("spec.runtime.volumes"):
            advice = f"set it by `muster secrets set {use.name}`"
        if use.kind != "serviceAccounts" or not account:
            names = ",".join((*listed[use.kind], use.name))
            advice += f", or an admin lists it: `muster projects set {project} --set '{use.kind}=[{names}]'`"
        problems.append(DocumentProblem(use.path, f"{words}; {advice}"))
    return tuple(problems)


def node_volume_problems(runtime: Runtime) -> tuple[DocumentProblem, ...]:
    """Return a problem for each volume that is a folder of the node itself. The chart's policy for the operator's pods
    (`operator.policy`) refuses a worker with one, so a job with one could be queued and would never start."""
    words = "a worker mounts nothing of its node; name a persistentVolumeClaim in the place of hostPath"
    advice = "or ask whoever runs the cluster to set operator.policy=false in the chart"
    return tuple(
        DocumentProblem(f"spec.runtime.volumes[{index}].hostPath", f"{words}, {advice}")
        for index, volume in enumerate(runtime.volumes)
        if volume.get("hostPath") is not None
    )


def namespace_problem(namespace: str, limits: ProjectLimits, holder: str | None) -> DocumentProblem | None:
    """Return why a job of the project `default` may not use the namespace, which is the project `holder`'s if that is
    not None."""
    listed = limits.namespaces if limits.namespaces is not None else (DEFAULT_PROJECT,)
    if holder is None and any(matches(namespace, each) for each in listed):
        return None
    words = f"project {DEFAULT_PROJECT!r} has the namespaces {', '.join(listed) or '(none)'}, and not {namespace!r}"
    advice = "leave it out"
    if holder is None:
        names = ",".join((*listed, namespace))
        advice += f", or an admin adds it: `muster projects set {DEFAULT_PROJECT} --set 'namespaces=[{names}]'`"
    return DocumentProblem("metadata.namespace", f"{words}; {advice}")
