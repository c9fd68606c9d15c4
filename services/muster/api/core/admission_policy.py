"""The limits of projects in words of the chart's admission policy: whoever goes round the API meets the same limits.

CEL reads no JSON, so a ConfigMap has an entry per namespace and limit (`nlp.gangSizes`), with a line for each value.
The entry is there where the limit is. What CEL can't work out is said in docs/sharing.md.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from muster.api.core.limits import ProjectLimits
from muster.words.names import DEFAULT_PROJECT

LIMITS = "muster-project-limits"
"""The ConfigMap in the release's namespace, written by the API."""
ELSEWHERE = "_default"
"""Stands for every namespace that is no project's: they are the project `default`'s. No namespace begins so."""


@dataclass(frozen=True)
class LimitedProject:
    """A project, and its namespace; None for all that are no other project's. `files` is where its uploaded files are,
    which its jobs may read whatever else they may, and `secrets` the names of its secrets (`muster secrets`)."""

    name: str
    namespace: str | None
    limits: ProjectLimits
    files: str | None = None
    secrets: tuple[str, ...] = ()


def limit_entries(projects: Iterable[LimitedProject]) -> dict[str, str]:
    """The ConfigMap's data."""
    entries: dict[str, str] = {}
    for project in projects:
        here = project.namespace or ELSEWHERE
        entries |= {
            f"{here}.{key}": "\n".join(values) for key, values in _entries(project.limits, project.files).items()
        }
        entries[f"{here}.project"] = project.name
        if project.secrets:  # they are in one namespace, also where the project has several
            entries[f"{project.namespace or DEFAULT_PROJECT}.ownSecrets"] = "\n".join(project.secrets)
    return entries


def _entries(limits: ProjectLimits, files: str | None) -> dict[str, list[str]]:
    own = [limits.checkpoint_prefix] if limits.checkpoint_prefix else []
    read = limits.data_prefixes
    ours = [files] if files else []
    accounts: Iterable[object] | None = limits.service_accounts
    if limits.service_account:
        accounts = (limits.service_account, *(limits.service_accounts or ()))
    by_key: dict[str, Iterable[object] | None] = {
        "gangSizes": limits.gang_sizes,
        "instanceTypes": limits.instance_types,
        "images": limits.images,
        "endpoints": limits.endpoints,
        "serviceAccounts": accounts,
        "secrets": limits.secrets,
        "claims": limits.claims,
        "namespaces": limits.namespaces,
        "kmsKeyId": [limits.kms_key_id] if limits.kms_key_id else None,
        "checkpointPrefix": [each.rstrip("/") for each in own] or None,
        "dataPrefixes": None if read is None else [each.rstrip("/") for each in (*read, *own, *ours)],
    }
    return {key: [str(value) for value in values] for key, values in by_key.items() if values is not None}
