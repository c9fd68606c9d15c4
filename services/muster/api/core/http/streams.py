"""Open event streams, counted by person: each is a connection and a look at the database every few seconds."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator

from muster.api.core.errors import ApiError

RETRY_SECONDS = 5


class OpenStreams:
    """Open streams of this process. A person has as many tokens as they like, so tokens are not counted separately."""

    def __init__(self, per_person_max: int) -> None:
        self._per_person_max = per_person_max
        self._open = Counter[str]()

    @contextlib.contextmanager
    def one_of(self, person: str) -> Iterator[None]:
        """Count a stream while it is open. Raises ApiError too_many_streams."""
        if self._open[person] >= self._per_person_max:
            detail = (
                f"{person!r} has {self._open[person]} streams open here, and may have {self._per_person_max} "
                "(MUSTER_API_STREAMS_PER_PERSON_MAX). Close some; a webhook tells of any number of jobs."
            )
            raise ApiError("too_many_streams", detail, headers={"Retry-After": str(RETRY_SECONDS)})
        self._open[person] += 1
        try:
            yield
        finally:
            self._open[person] -= 1
            if not self._open[person]:
                del self._open[person]
