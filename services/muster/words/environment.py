"""Variables of the workers' environment, and the secrets that they are read from. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from muster.words.address import refuse_metadata_url
from muster.words.base import Spec
from muster.words.fields import Text

VARIABLE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_OURS = ("MUSTER_", "PET_")
# They decide which programs and libraries a process loads, some of them before it gives up its rights (OpenSSL's
# providers, the user's site-packages): a job's own affair in a container, not on a shared machine.
_LOADER_VARIABLES = re.compile(
    r"(LD|DYLD|GIT|SSH|OPENSSL)_\w*|(PYTHON|PERL|RUBY)\w*|BASH_ENV|ENV|BROWSER|PAGER|EDITOR|NODE_OPTIONS|PATH|SHELL|HOME|"
    r"GCONV_PATH|GLIBC_TUNABLES|LOCPATH|NLSPATH"
)


class KeyRef(Spec):
    """One entry of a Secret or ConfigMap."""

    name: Text
    """The name of the Secret or ConfigMap."""
    key: Text
    """Key of the entry."""
    optional: bool = False
    """Whether the variable is left out where there is no such entry."""


class ValueFrom(Spec):
    """Source of a variable's value when a worker starts, as in a pod's spec."""

    secret_key_ref: KeyRef | None = None
    """An entry of a secret: of the project's own (`muster secrets`), or in a cluster of one that the project lists."""
    config_map_key_ref: KeyRef | None = None
    """An entry of a ConfigMap of the job's namespace, in a cluster."""

    @model_validator(mode="after")
    def _names_one(self) -> Self:
        if (self.secret_key_ref is None) == (self.config_map_key_ref is None):
            raise ValueError("must name one of secretKeyRef and configMapKeyRef")
        return self


class EnvVar(Spec):
    """One variable of the workers' environment."""

    name: Annotated[str, Field(pattern=f"^{VARIABLE_NAME.pattern}$")]
    """The variable's name; those that begin with MUSTER_ or PET_ are Muster's own."""
    value: str = ""
    """The variable's value; the API shows it to nobody."""
    value_from: ValueFrom | None = None
    """Source of the value, in place of `value`, which is read when a worker starts."""

    @model_validator(mode="after")
    def _one_value_and_not_ours(self) -> Self:
        if self.name.startswith(_OURS):
            raise ValueError(f"{self.name} is set by Muster itself; choose another name")
        if self.value and self.value_from is not None:
            raise ValueError("must have a value or a valueFrom, not both")
        refuse_metadata_url(self.value)
        return self


@dataclass(frozen=True)
class SecretUse:
    """One place of a job's runtime that reads a secret."""

    path: str
    """Path of the reference in the job's document."""
    secret: str
    """The secret's name."""
    key: str | None
    """Key of the entry; None for all of them, each as the variable `variable` followed by its key."""
    variable: str
    optional: bool


def secret_uses(env: Sequence[EnvVar], env_from: Sequence[Mapping[str, Any]]) -> Iterator[SecretUse]:
    """Yield every reference to a secret, those of `envFrom` first: variables of `env` win over them."""
    for index, source in enumerate(env_from):
        reference = source.get("secretRef")
        if isinstance(reference, dict) and reference.get("name"):
            prefix, path = str(source.get("prefix") or ""), f"spec.runtime.envFrom[{index}].secretRef"
            yield SecretUse(path, str(reference["name"]), None, prefix, bool(reference.get("optional")))
    for index, variable in enumerate(env):
        key_ref = variable.value_from.secret_key_ref if variable.value_from else None
        if key_ref is not None:
            path = f"spec.runtime.env[{index}].valueFrom.secretKeyRef"
            yield SecretUse(path, key_ref.name, key_ref.key, variable.name, key_ref.optional)


def variables_of(use: SecretUse, keys: Sequence[str]) -> dict[str, str]:
    """The key of a secret with these keys by the variable that reads it. A key that makes no name of a variable, or one
    of Muster's own, is left out, as Kubernetes does."""
    if use.key is not None:
        return {use.variable: use.key} if use.key in keys else {}
    named = {use.variable + key: key for key in keys}
    return {name: key for name, key in named.items() if VARIABLE_NAME.fullmatch(name) and not name.startswith(_OURS)}


def steers_processes(name: str) -> bool:
    """Return whether the variable decides which programs and libraries a process loads."""
    return bool(_LOADER_VARIABLES.fullmatch(name))
