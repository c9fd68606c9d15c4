"""The chart rendered by a real helm, as the tests want to look at it."""

import json
import subprocess
from pathlib import Path
from typing import Any

import yaml
from tests.tidy.repository import ROOT

CHART = ROOT / "helm" / "muster"
Object = dict[str, Any]
Values = dict[str, Any]


class Refused(Exception):
    """helm said no; the message is what it said."""


class Chart:
    def __init__(self, helm: Path) -> None:
        self.helm = helm

    def text(self, values: Values, *options: str) -> str:
        done = subprocess.run(
            [self.helm, "template", "muster", CHART, "--namespace", "muster-system", "--values", "-", *options],
            input=json.dumps(values), capture_output=True, text=True, check=False, timeout=300,
        )  # fmt: skip
        if done.returncode:
            raise Refused(done.stderr)
        return done.stdout

    def objects(self, values: Values, *options: str) -> list[Object]:
        return [document for document in yaml.load_all(self.text(values, *options), yaml.CSafeLoader) if document]

    def find(self, values: Values, kind: str, name: str) -> Object:
        (found,) = [o for o in self.objects(values) if (o["kind"], o["metadata"]["name"]) == (kind, name)]
        return found


def pod_specs(objects: list[Object]) -> dict[str, Object]:
    """Of everything that becomes pods, by its name."""
    found = {}
    for item in objects:
        if item["kind"] in ("Deployment", "DaemonSet", "Job"):
            found[item["metadata"]["name"]] = item["spec"]["template"]["spec"]
        elif item["kind"] == "Pod":
            found[item["metadata"]["name"]] = item["spec"]
    return found


def environment(container: Object) -> dict[str, str]:
    return {entry["name"]: entry["value"] for entry in container["env"] if "value" in entry}


def leaves(values: Values, path: str = "") -> dict[str, Any]:
    """Dotted path → value of each switch: what is no mapping, or an empty one."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        place = f"{path}.{key}".removeprefix(".")
        found |= leaves(value, place) if isinstance(value, dict) and value else {place: value}
    return found


def placed(path: str, value: Any) -> Values:
    """{"a": {"b": value}} of "a.b"."""
    for key in reversed(path.split(".")):
        value = {key: value}
    return dict(value)


def merged(below: Values, above: Values) -> Values:
    """As helm merges value files."""
    out = dict(below)
    for key, value in above.items():
        both = isinstance(value, dict) and isinstance(out.get(key), dict)
        out[key] = merged(out[key], value) if both else value
    return out
