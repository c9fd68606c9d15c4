"""The secrets of webhooks, encrypted in the database by the keys of this installation's secrets."""

from __future__ import annotations

import secrets

from sqlalchemy import select

from muster.api.core.database.db import Database
from muster.api.core.database.tables import WebhookRow
from muster.api.core.settings import ApiSettings
from muster.secrets.box import SecretBox, SecretsLocked
from muster.words.webhooks import secret_of

_BYTES = 32  # the standard asks for 24 to 64
_KEY = "secret"


class SecretEncryption:
    """Encryption of webhooks' secrets. `box` is None if there is no key that all of the API's processes have."""

    def __init__(self, box: SecretBox | None) -> None:
        self._box = box

    def new(self, project: str, webhook_id: str) -> tuple[str, str]:
        """A secret, and what is stored of it. Raises SecretsLocked."""
        secret = secret_of(secrets.token_bytes(_BYTES))
        return secret, self._opened_box().seal(project, _name(webhook_id), {_KEY: secret})

    def secrets_of(self, row: WebhookRow, now: float) -> list[str]:
        """Return the secrets with which a message is signed now: the current one, and the previous one while it is
        still accepted.

        Raises SecretsLocked.
        """
        sealed = [row.secret]
        if row.old_secret is not None and now < (row.old_secret_until or 0.0):
            sealed.append(row.old_secret)
        box = self._opened_box()
        return [box.open(row.project, _name(row.id), payload)[_KEY] for payload in sealed]

    async def renew(self, database: Database) -> tuple[str, ...]:
        """Seal all secrets by the first key, where there are several. Returns the webhooks, as `project/name`, whose
        secrets no key opens. Raises SecretsLocked."""
        if self._box is None or not self._box.path.exists() or self._box.keys() < 2:
            return ()
        lost = []
        async with database.write() as session:
            for row in (await session.scalars(select(WebhookRow))).all():
                renewed = self._box.renewed(row.secret)
                if renewed is None:
                    lost.append(f"{row.project}/{row.name}")
                    continue
                row.secret = renewed
                row.old_secret = self._box.renewed(row.old_secret) if row.old_secret is not None else None
        return tuple(lost)

    def _opened_box(self) -> SecretBox:
        if self._box is None:
            raise SecretsLocked(
                "webhooks need a key for their secrets that every process of the API has: "
                "set api.secretKey.existingSecret in the chart (MUSTER_API_SECRET_KEY_FILE)"
            )
        return self._box


def sealing_of(settings: ApiSettings) -> SecretEncryption:
    """Return the encryption of webhook secrets. If several processes share one database, it needs a configured key: one
    process could not read what another encrypted with a key of its own folder."""
    shared = settings.cluster == "local" or settings.database.startswith("sqlite")
    if settings.secret_key_file is None and not shared:
        return SecretEncryption(None)
    path = settings.secret_key_file or settings.layout.secret_key
    return SecretEncryption(SecretBox(path, settings.secret_kms_key_id))


def _name(webhook_id: str) -> str:
    return f"webhook/{webhook_id}"
