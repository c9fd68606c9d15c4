"""Write docs/job.md from the models: python tools/generate_job_docs.py [--check]"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from muster.recipe.document import JobSpec
from muster.recipe.foreign_names import FOREIGN_NAMES
from muster.recipe.reference import DocumentKey, example_lines, flow, job_reference
from muster.recipe.schema import rules_of
from muster.words.job import MUTABLE

TARGET = Path(__file__).parents[1] / "docs" / "job.md"
WIDTH = 120
CONTENTS_DEPTH = 3  # deeper sections are reached from those above them
HEAD = """# The job's document

Written by `tools/generate_job_docs.py` from `services/muster/{words,recipe}`; `make generated` fails when they part.

Every key of a `TrainingJob`, with type, default and meaning. The same is said by `muster explain`, without a server:
`muster explain training.batch` for a section, `muster explain warmupSteps` for a key by its name alone, and
`muster explain learning_rate` for a setting as other tools call it ([the table](#names-in-other-tools)). In a cluster
`kubectl explain trainingjobs.spec.training` reads the same texts.

```yaml
apiVersion: muster.dev/v1alpha1
kind: TrainingJob
metadata:
  name: my-assistant            # lower-case letters, digits and dashes, starting with a letter, at most 48 characters
  namespace: team-nlp           # in a cluster; left out, the project's
  labels: {team: nlp}           # at most 64
spec:
  training:
    task: sft
    model: {source: "hf://Qwen/Qwen3-8B@main"}
    adapter: {kind: lora, targets: [all-linear]}
    data:
      train: [{source: data/chats.jsonl}]
      sequenceLength: 4096
    batch: {tokensPerStep: 65536}
    length: {epochs: 3}
  gang: {nodes: 1, gpusPerNode: 8}
```

- `apiVersion` and `kind` may be left out; `metadata.name` and `spec` may not.
- Of `training` (Muster's own trainer) and `program` (a program of your own) a job has exactly one.
- A document is strict: an unknown key, a text in place of a number and a value out of its bounds are refused, all of
  them at once, each with its line and, where a near or foreign name was meant, with the right one.
- "Required" means: wherever the section around the key is given.
- Paths in error messages begin with `spec.`; here it is left out. `[]` stands for each item of a list, `*` for each
  name of a mapping.
"""


def text() -> str:
    keys = job_reference()
    sections = [key for key in keys.values() if key.keys and _first_alike(key) is key]
    lines = [
        HEAD.rstrip("\n"),
        *_fill(f"- A job that is submitted may still change {_mutable()}; all else is fixed.", 2),
    ]
    lines += ["", "## All sections", ""]
    lines += [f"- [`{key.path}`](#{_anchor(key)})" for key in sections if key.path.count(".") < CONTENTS_DEPTH]
    lines += ["", "## `spec`", ""]
    for key in (key for key in keys.values() if "." not in key.path):
        lines += _entry(key)
    lines += _rules("")
    for key in sections:
        lines += ["", f"## `{key.path}`", "", *_fill(key.meaning, 0), ""]
        lines += ["```yaml", *example_lines(key), "```", ""]
        for name in key.keys:
            lines += _entry(keys[f"{key.path}.{name}"])
        lines += _rules(key.path)
    return "\n".join([*lines, *_foreign_names()]) + "\n"


def _rules(section: str) -> Iterator[str]:
    """Yield what the keys of a section must agree on."""
    rules = [rule.text for path, rule in rules_of(JobSpec) if path == section]
    if rules:
        yield from ("", "Rules:", "")
    for text in rules:
        yield from _fill(f"- {text}", 2)


def _mutable() -> str:
    names = [field.alias or name for name, field in JobSpec.model_fields.items() if name in MUTABLE]
    return ", ".join(f"`{name}`" for name in names)


def _first_alike(section: DocumentKey) -> DocumentKey:
    """Return the first section with the same keys: verifiers and sources of data stand at several places, and their
    keys are listed once."""
    return _sections_by_keys()[_content(section)]


@functools.cache
def _sections_by_keys() -> dict[str, DocumentKey]:
    alike: dict[str, DocumentKey] = {}
    for key in job_reference().values():
        if key.keys:
            alike.setdefault(_content(key), key)
    return alike


def _content(section: DocumentKey) -> str:
    keys = job_reference()
    return repr([(name, keys[f"{section.path}.{name}"].meaning) for name in section.keys])


def _anchor(key: DocumentKey) -> str:
    """Return GitHub's anchor of the heading: letters, digits, dashes and underscores of the path in lower case."""
    return re.sub(r"[^\w-]", "", key.path.lower())


def _entry(key: DocumentKey) -> Iterator[str]:
    keys = job_reference()
    below = next(
        (keys[path] for path in (key.path, f"{key.path}[]", f"{key.path}.*") if path in keys and keys[path].keys), None
    )
    name = f"[`{key.name}`](#{_anchor(_first_alike(below))})" if below else f"`{key.name}`"
    example = "" if below else f" Example: `{key.name}: {flow(key.example)}`"
    yield from _fill(f"- **{name}** ({key.facts}): {key.meaning}{example}", 2)


def _foreign_names() -> Iterator[str]:
    yield from ("", "## Names in other tools", "")
    yield from _fill(
        "Settings of Hugging Face's Trainer, TRL, PEFT, Axolotl, the Kubeflow Trainer and SkyPilot, and the key that "
        "does the same here. Written into a job, such a name is refused with the key; names that differ from a key "
        "only by dashes or underscores (`weight_decay`) are answered as well.",
        0,
    )
    yield from ("", "| there | here | note |", "|---|---|---|")
    for each in FOREIGN_NAMES:
        names = ", ".join(f"`{name}`" for name in each.names)
        yield f"| {names} | {f'`{each.path}`' if each.path else '–'} | {each.note} |"


def _fill(line: str, indent: int) -> Iterator[str]:
    """Break a line between words, never inside of backquotes, where a break would look like a space of the value."""
    words = re.findall(r"(?:`[^`]*`|[^\s`])+", line)
    row = ""
    for word in words:
        if row and len(row) + 1 + len(word) > WIDTH:
            yield row
            row = " " * indent + word
        else:
            row = f"{row} {word}" if row else word
    yield row


def main(arguments: list[str]) -> int:
    fresh = text()
    if arguments == ["--check"]:
        if not TARGET.exists() or TARGET.read_text() != fresh:
            print(f"{TARGET.name} is not what the models say; run python tools/generate_job_docs.py")
            return 1
        return 0
    TARGET.write_text(fresh)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
