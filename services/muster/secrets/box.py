"""Secrets of one machine, encrypted at rest: encrypted by the API, decrypted by the operator where a worker starts.

The keys are lines of one file that only its user may read. The first encrypts; the others still decrypt what they
encrypted, so a key is replaced by putting a new one above it (docs/sharing.md).
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path

from cryptography.fernet import Fernet, InvalidToken, MultiFernet

from muster.secrets import kms


class SecretsLocked(Exception):
    """The key file can't be used, or lacks the key of a payload; the message says which and what to do."""


class SecretBox:
    """Encryption of secrets' entries with the keys in the file at `path`. The file is read at each use: uses are few,
    and a key that was added counts at once."""

    def __init__(self, path: Path, kms_key_id: str | None = None) -> None:
        """`kms_key_id` is the key of AWS KMS by which a key that is made here is encrypted; None for none."""
        self.path, self._kms_key_id = path, kms_key_id

    def seal(self, project: str, name: str, data: Mapping[str, str]) -> str:
        """Encrypt the entries. Creates the key file if there is none. Raises SecretsLocked."""
        if not self.path.exists():
            self._make()
        document = {"project": project, "name": name, "data": dict(data)}
        return self._keys().encrypt(json.dumps(document).encode()).decode()

    def open(self, project: str, name: str, payload: str) -> dict[str, str]:
        """Decrypt what was encrypted under that name. Raises SecretsLocked, also for a payload of another name."""
        try:
            document = json.loads(self._keys().decrypt(payload.encode()))
        except InvalidToken:
            why = f"{self.path} has not the key of secret {name!r} of project {project!r}"
            raise SecretsLocked(f"{why}: put the key back, or set the secret anew") from None
        if (document["project"], document["name"]) != (project, name):
            raise SecretsLocked(f"the payload of secret {name!r} of project {project!r} is another's: set it anew")
        return {str(key): str(value) for key, value in document["data"].items()}

    def renewed(self, payload: str) -> str | None:
        """Return the payload encrypted with the first key; None if no key decrypts it. Raises SecretsLocked."""
        try:
            return self._keys().rotate(payload.encode()).decode()
        except InvalidToken:
            return None

    def keys(self) -> int:
        """Return the number of keys; 0 before the first use. Raises SecretsLocked."""
        return len(self._lines()) if self.path.exists() else 0

    def _keys(self) -> MultiFernet:
        lines = self._lines()
        try:
            return MultiFernet([Fernet(kms.opened(line) if line.startswith(kms.PREFIX) else line) for line in lines])
        except kms.KmsRefused as refused:
            raise SecretsLocked(f"{self.path} can't be used: {refused}") from None
        except ValueError:
            words = "a key of 32 bytes in URL-safe base64, or one of KMS, on each line"
            raise SecretsLocked(f"{self.path} must have {words}") from None

    def _lines(self) -> list[str]:
        try:
            stat_result = self.path.stat()
            # A mounted Secret of Kubernetes is root's, and its pod reads it by its group.
            of_group = stat.S_IRWXG if stat_result.st_uid == os.geteuid() else stat.S_IWGRP
            if stat_result.st_mode & (of_group | stat.S_IRWXO):
                raise SecretsLocked(f"{self.path} holds the keys of secrets and others may read it: chmod 600 it")
            lines = [line.strip() for line in self.path.read_text().splitlines() if line.strip()]
        except (OSError, UnicodeDecodeError) as error:
            raise SecretsLocked(f"the keys of secrets can't be read: {error}; put the file back") from None
        if not lines:
            raise SecretsLocked(f"{self.path} is empty: put the keys of secrets back")
        return lines

    def _make(self) -> None:
        try:
            line = kms.new_line(self._kms_key_id) if self._kms_key_id else Fernet.generate_key().decode()
        except kms.KmsRefused as refused:
            raise SecretsLocked(f"the key of secrets can't be made: {refused}") from None
        try:
            descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            return  # by another process of ours, a moment ago
        except OSError as error:
            raise SecretsLocked(f"the key of secrets can't be made: {error}") from None
        with open(descriptor, "wb") as file:
            file.write(f"{line}\n".encode())
            file.flush()
            os.fsync(file.fileno())
