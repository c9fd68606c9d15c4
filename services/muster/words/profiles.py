"""Profiles of a running job: what is asked of the trainer, and what it leaves in the job's checkpoint folder.

profile-request.json                              the last request, by whoever asks (an API)
profiles/attempt-2-step-00000120/profile.json     what is traced, by rank 0 when it begins
profiles/attempt-2-step-00000120/rank-0.*         the trace, and what is known of the memory
profiles/attempt-2-step-00000120/rank-0.json      which files there are, by each traced rank when it is done
"""

from __future__ import annotations

import re
from typing import Annotated, Final

from pydantic import Field, field_validator

from muster.words.base import Many, Record, Spec, Time

REQUEST_KEY: Final = "profile-request.json"
PROFILES: Final = "profiles/"
# A trace takes tens of megabytes a step of a large model, in memory until it is written while all ranks wait; at 50
# steps that is a gigabyte and about a minute. What a step does is seen in a few.
STEPS_MAX: Final = 50
RANKS_MAX: Final = 8
_NAME: Final = re.compile(r"attempt-(\d{1,9})-step-(\d{8,18})")
_FILE: Final = re.compile(r"rank-\d{1,9}\.(trace\.json\.gz|memory\.pickle|memory\.txt)")


class ProfileOrder(Spec):
    """Request for a profile."""

    steps: Annotated[int, Field(ge=1, le=STEPS_MAX)] = 5
    """Number of the next steps to trace."""
    ranks: Annotated[Many[Annotated[int, Field(ge=0)]], Field(min_length=1, max_length=RANKS_MAX)] = (0,)
    """Ranks to trace."""

    @field_validator("ranks")
    @classmethod
    def _once_each(cls, ranks: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(sorted(set(ranks)))


class ProfileRequest(Record):
    """The order as the trainer reads it. It is for one attempt: a later one does not serve it."""

    id: str
    attempt: int
    steps: int
    ranks: tuple[int, ...]
    at: Time


class Profile(Record):
    """Result of a request. `id` is the request's, and `step` the first that is traced."""

    id: str
    attempt: int
    step: int
    steps: int
    ranks: tuple[int, ...]
    at: Time

    @property
    def folder(self) -> str:
        return f"attempt-{self.attempt}-step-{self.step:08}"

    def key(self, file: str) -> str:
        """Return the key of a file of this profile in the job's checkpoint folder."""
        return profile_key(self.folder, file)


class ProfileFile(Record):
    name: str
    bytes: int


class RankProfile(Record):
    """Result of one traced rank. `steps` were traced; `fault` says why the trace is missing or incomplete."""

    rank: int
    steps: int = 0
    files: tuple[ProfileFile, ...] = ()
    fault: str = ""


class ProfileView(Profile):
    """A profile as it is shown, by the name of its folder. `done` lists the ranks that have written what they have, and
    `complete` that all of them did."""

    name: str
    done: tuple[RankProfile, ...]
    complete: bool


class ProfilesReply(Record):
    """`uri` is where they lie; `asked` is the last request."""

    uri: str | None
    items: tuple[ProfileView, ...]
    asked: ProfileRequest | None


def profile_key(name: str, file: str) -> str:
    """Return the key, in the job's checkpoint folder, of a file of the profile of that name."""
    return f"{PROFILES}{name}/{file}"


def rank_document(rank: int) -> str:
    """The name of the file with which a rank says that it is done."""
    return f"rank-{rank}.json"


def place_of_profile(name: str) -> tuple[int, int] | None:
    """Attempt and step of a profile by its name, which is also their order; None for any other name."""
    match = _NAME.fullmatch(name)
    return (int(match[1]), int(match[2])) if match else None


def is_artefact(name: str) -> bool:
    """Return whether a file of a profile is one that people download."""
    return _FILE.fullmatch(name) is not None
