"""Profiles as they lie in a job's checkpoint folder. What its processes wrote there is read with suspicion."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import ValidationError

from muster.storage.errors import NotFound, UnfitObject
from muster.storage.store import Store, StoredObject
from muster.words.base import M
from muster.words.profiles import (
    PROFILES,
    RANKS_MAX,
    REQUEST_KEY,
    Profile,
    ProfileRequest,
    ProfileView,
    RankProfile,
    is_artefact,
    place_of_profile,
    profile_key,
    rank_document,
)

NEWEST = 20
DOCUMENT_BYTES_MAX = 100_000
# That a request may wait before another takes its place: its trainer is too old to know of profiles, or stands still.
WAITS_SECONDS_MAX = 600.0


def read_request(store: Store) -> ProfileRequest | None:
    return _read(store, REQUEST_KEY, ProfileRequest)


def read_profiles(store: Store) -> Iterator[ProfileView]:
    """The newest profiles, the oldest of them first."""
    names = {entry.key.removeprefix(PROFILES).partition("/")[0] for entry in store.objects(PROFILES)}
    placed = sorted((place, name) for name in names if (place := place_of_profile(name)) is not None)
    for _, name in placed[-NEWEST:]:
        if (begun := _read(store, profile_key(name, "profile.json"), Profile)) is not None:
            yield _view(store, name, begun)


def still_asked(store: Store, before: ProfileRequest, now: ProfileRequest) -> bool:
    """Return whether the profile that was requested `before` may still be written, so that another request would
    replace it."""
    if before.attempt != now.attempt or now.at - before.at > WAITS_SECONDS_MAX:
        return False
    return not any(profile.id == before.id and profile.complete for profile in read_profiles(store))


def find_artefact(store: Store, profile: str, file: str) -> StoredObject | None:
    """A file that people fetch; None for what is not there, or is none."""
    if place_of_profile(profile) is None or not is_artefact(file):
        return None
    try:
        return store.about(profile_key(profile, file))
    except (NotFound, UnfitObject):
        return None


def _view(store: Store, name: str, begun: Profile) -> ProfileView:
    ranks = sorted(set(begun.ranks))[:RANKS_MAX]
    documents = (_read(store, profile_key(name, rank_document(rank)), RankProfile) for rank in ranks)
    done = tuple(each for each in documents if each is not None)
    seen = tuple(
        each.model_copy(update={"files": tuple(file for file in each.files if is_artefact(file.name))}) for each in done
    )
    document = begun.model_dump() | {"name": name, "done": seen, "complete": len(done) == len(ranks)}
    return ProfileView.model_validate(document)


def _read(store: Store, key: str, model: type[M]) -> M | None:
    try:
        return model.model_validate_json(store.read(key, DOCUMENT_BYTES_MAX))
    except (NotFound, UnfitObject, ValidationError):
        return None
