"""The places where a pod can name a Secret or a claim are those of Kubernetes' own schema, here and in the policy."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import yaml
from tests.tidy.repository import ROOT

from muster.api.core.cluster_objects import CLAIM_PATHS, SECRET_PATHS

SCHEMAS = Path(kubernetes_validate.__file__).parent / "kubernetes-json-schema" / "v1.37.0-local"
OURS = {("csi", "volumeAttributes", "secretProviderClass")}
"""A key of a free map, so that no schema has it."""


def test_every_place_of_a_volume_that_names_a_secret_or_a_claim_is_judged() -> None:
    definitions = json.loads((SCHEMAS / "_definitions.json").read_text())["$defs"]
    named = set(naming(definitions, definitions["io.k8s.api.core.v1.Volume"], ()))
    assert named == {*SECRET_PATHS, *CLAIM_PATHS, ("projected", "sources", "secret", "name")} - OURS


def naming(definitions: Any, schema: Any, at: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Paths of fields that name a Secret or a claim: by their own names, or as references by the names above them."""
    schema = schema.get("items", schema)
    if "$ref" in schema:
        schema = definitions[schema["$ref"].rpartition("/")[2]]
    for key, inner in (schema.get("properties") or {}).items():
        path = (*at, key)
        refers = key == "name" and at and any(word in at[-1].lower() for word in ("secret", "datasource"))
        if key in ("secretName", "claimName") or refers:
            yield path
        yield from naming(definitions, inner, path)


def test_the_policy_looks_at_the_same_places_of_a_volume() -> None:
    helpers = (ROOT / "helm" / "muster" / "templates" / "_helpers.tpl").read_text()
    listed = helpers.partition('define "muster.volumeSecrets" -}}')[2].partition("{{- end }}")[0]
    assert [tuple(path.split(".")) for path in yaml.safe_load(listed)] == list(SECRET_PATHS)
    policy = (ROOT / "helm" / "muster" / "templates" / "policy.yaml").read_text()
    for path in CLAIM_PATHS:
        assert ".".join(path) in policy
