"""Reads the step log while it grows."""

from __future__ import annotations

from pathlib import Path

from pydantic import ValidationError

from muster.words.signals import StepRecord

READ_BYTES_MAX = 1 << 20


class StepLogReader:
    """The records of one attempt, each handed out until it is said to have been taken."""

    def __init__(self, path: Path, attempt: int) -> None:
        self._path, self._attempt = path, attempt
        self._taken = self._read = 0  # bytes

    def next(self) -> list[StepRecord]:
        """The next whole lines, up to a megabyte; none where there is no more yet, nor a file."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._taken)
                block = file.read(READ_BYTES_MAX)
        except FileNotFoundError:
            return []
        whole = block[: block.rfind(b"\n") + 1]
        self._read = self._taken + len(whole)
        records = []
        for line in whole.splitlines():
            try:
                record = StepRecord.model_validate_json(line)
            except ValidationError:  # of a disk that was full
                continue
            if record.attempt == self._attempt:
                records.append(record)
        if not records:
            self._taken = self._read
        return records

    def took(self) -> None:
        """Go on behind what `next` returned last."""
        self._taken = self._read
