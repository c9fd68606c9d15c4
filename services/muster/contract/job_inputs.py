"""The commits that a job reads, whatever kind of work it does, by the paths of the fields that name them."""

from __future__ import annotations

from muster.contract.commits_read import commits_read, with_folder
from muster.contract.model_config import FromCommit
from muster.contract.spec import JobSpec

_TRAINING, _INPUTS = "training.", "program.inputs."


def input_commits(spec: JobSpec) -> dict[str, FromCommit]:
    """Return the commits that the job reads, by the path below `spec` of the field that names each."""
    if spec.training is not None:
        return {f"{_TRAINING}{path}": origin for path, origin in commits_read(spec.training).items()}
    inputs = spec.program.inputs if spec.program is not None else {}
    named = {f"{_INPUTS}{name}": each.commit for name, each in inputs.items()}
    return {path: origin for path, origin in named.items() if origin is not None}


def with_input_folder(spec: JobSpec, path: str, uri: str) -> JobSpec:
    """The same job where the commit that the field `path` names lies in the folder `uri`."""
    if spec.training is not None:
        return spec.model_copy(update={"training": with_folder(spec.training, path.removeprefix(_TRAINING), uri)})
    assert spec.program is not None, "a job is a training or a program"
    name = path.removeprefix(_INPUTS)
    inputs = {**spec.program.inputs, name: spec.program.inputs[name].model_copy(update={"uri": uri})}
    return spec.model_copy(update={"program": spec.program.model_copy(update={"inputs": inputs})})
