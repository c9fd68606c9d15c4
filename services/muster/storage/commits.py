"""The one reading of a COMMIT: from bytes that may be anything to a Commit that holds together, or the reason why not.

Resuming, `model.from`, export, the commands, the operator and the API all read by this. What it returns can be loaded
without a surprise: sizes are possible, slices cover their tensors and lie inside their files, the optimizer is whole,
and step and folder are those that it was made for. What only the files themselves can tell (checksums, headers) is
verified when their bytes are read.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable
from typing import Any, Final

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic.alias_generators import to_camel

from muster.storage.commit_rules import InvalidCommit, check
from muster.words.base import UserError, problems
from muster.words.checkpoint import FORMAT_VERSION, Commit, seal_of

__all__ = ["COMMIT_BYTES_MAX", "InvalidCommit", "NewerCommit", "parse_commit", "refuse_folder", "refuse_program"]

# A commit of a million slices (1,000 tensors on 1,000 ranks) takes 100 MB. What is larger is not read into memory.
COMMIT_BYTES_MAX: Final = 256 << 20
# The deepest part that Muster writes is six deep. Code that walks a document may recurse this far anywhere.
DEPTH_MAX: Final = 64


class NewerCommit(InvalidCommit):
    """The format is a newer Muster's: this one can't read it, and leaves it where it is.

    `attempt` and `committed_at` are the document's, and 0 where it has none.
    """

    def __init__(self, version: int, attempt: int, committed_at: float) -> None:
        super().__init__(
            f"its format version is {version}, and this Muster reads up to {FORMAT_VERSION}; upgrade Muster to use it"
        )
        self.attempt, self.committed_at = attempt, committed_at


class _Envelope(BaseModel):
    """Fields of every version."""

    model_config = ConfigDict(alias_generator=to_camel)

    version: Any = None
    seal: Any = None
    attempt: Any = None
    committed_at: Any = None


def parse_commit(data: bytes, *, step: int | None, folder: str | None) -> Commit:
    """Read and check a COMMIT. `step` is what its name says and `folder` the last part of its folder's address; None
    where that is not known.

    Raises NewerCommit, or InvalidCommit with the reason, and nothing else, in time proportional to its size.
    """
    if len(data) > COMMIT_BYTES_MAX:
        raise InvalidCommit(f"it has {len(data)} bytes; a COMMIT has at most {COMMIT_BYTES_MAX}")
    envelope = _envelope(data)
    if not _is_sealed(data, envelope.seal):
        raise InvalidCommit("its seal does not match: it was changed after it was written")
    try:
        commit = Commit.model_validate_json(data)
    except ValidationError as error:
        raise InvalidCommit(_first(error)) from None
    _check_free_form(commit)
    if step is not None and commit.step != step:
        raise InvalidCommit(f"it is of step {commit.step}, but its name says step {step}")
    if folder is not None and commit.folder not in (None, folder):
        raise InvalidCommit(
            f"it was made in the folder {commit.folder!r} of job {commit.job!r}, and lies in {folder!r}"
        )
    check(commit)
    return commit


def refuse_program(commit: Commit, where: str) -> None:
    """Raises UserError for a checkpoint of a program's, of which nobody but the program can make a model. `where` names
    its checkpoint folder."""
    refuse_folder(commit, where)
    if commit.trainer == "program":
        raise UserError(
            f"the checkpoint of step {commit.step} in {where} holds the tensors of a program, and Muster does not know "
            "the model that they are of; load them in the program: run.load(model, optimizer, folder=...)"
        )


def refuse_folder(commit: Commit, where: str) -> None:
    """Raises UserError for a checkpoint that is a folder of a program's files, not tensors. `where` names its
    checkpoint folder."""
    if commit.kind == "folder":
        raise UserError(
            f"the checkpoint of step {commit.step} in {where} is a folder that a program wrote, not a model that "
            f"Muster can read; fetch it as it is: muster export {where} --step {commit.step} --to FOLDER"
        )


def _envelope(data: bytes) -> _Envelope:
    """Raises NewerCommit or InvalidCommit."""
    try:
        envelope = _Envelope.model_validate_json(data)
    except ValidationError as error:
        reason = "it is nested too deeply" if "recursion" in str(error) else _first(error)
        raise InvalidCommit(reason) from None
    version = envelope.version
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise InvalidCommit("it is no COMMIT")
    if version > FORMAT_VERSION:
        raise NewerCommit(version, int(_number(envelope.attempt)), _number(envelope.committed_at))
    return envelope


def _number(value: Any) -> float:
    return value if isinstance(value, int | float) and 0 <= value < 1e11 else 0


def _is_sealed(data: bytes, seal: Any) -> bool:
    if not isinstance(seal, str) or len(seal) != 64 or not seal.isascii():
        return False
    # Muster's own are written as they are sealed, so that nothing need be written again to compare.
    without = data.replace(f'"seal":"{seal}",'.encode(), b"", 1)
    if len(without) < len(data) and hashlib.sha256(without).hexdigest() == seal:
        return True
    try:
        document = json.loads(data)
        del document["seal"]
        return seal_of(document) == seal
    except (ValueError, RecursionError, KeyError, TypeError):
        return False


def _first(error: ValidationError) -> str:
    problem = problems(Commit, error)[0]
    return f"{problem}"[:300] if problem.path else f"it is no JSON: {problem.message}"[:300]


def _check_free_form(commit: Commit) -> None:
    """Check that free-form values are JSON that everybody can write again: finite, and not too deep."""
    level: list[Any] = [
        commit.mesh, commit.state, commit.rng, commit.config, commit.architecture, commit.tokenizer,
        commit.model_extra, commit.cursor.model_extra,
    ]  # fmt: skip
    level += [group.settings for group in commit.optimizer_groups]
    level += [file.model_extra for file in commit.files] + [tensor.model_extra for tensor in commit.tensors.values()]
    for _ in range(DEPTH_MAX):
        level = [inner for value in level if value for inner in _inner(value)]
        if any(isinstance(value, float) and not math.isfinite(value) for value in level):
            raise InvalidCommit("it holds a number that is not finite, which JSON does not know")
        if not level:
            return
    raise InvalidCommit("it is nested too deeply")


def _inner(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list | tuple) else ()
