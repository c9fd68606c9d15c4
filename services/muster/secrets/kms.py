"""Keys of secrets that AWS KMS keeps: the key file holds a data key that only KMS can open (envelope encryption).

Who has the file and no right to `kms:Decrypt` of that key has nothing; KMS's own log says who opened it, and when. The
data key is opened once per process. https://docs.aws.amazon.com/kms/latest/developerguide/kms-cryptography.html
"""

from __future__ import annotations

import base64
import functools
from typing import Any

PREFIX = "kms:"
SECONDS_MAX = 10.0


class KmsRefused(Exception):
    """KMS did not make or open a key; the message says why."""


def new_line(key_id: str) -> str:
    """A line of the key file: a new data key, encrypted by that key of KMS. Raises KmsRefused."""
    made = _call_kms("generate_data_key", KeyId=key_id, KeySpec="AES_256")
    return PREFIX + base64.urlsafe_b64encode(made["CiphertextBlob"]).decode()


@functools.cache
def opened(line: str) -> str:
    """The data key of a line, as Fernet takes one: 32 bytes in URL-safe base64. Raises KmsRefused."""
    try:
        sealed = base64.urlsafe_b64decode(line.removeprefix(PREFIX))
    except ValueError:
        raise KmsRefused("a line that begins with kms: is no key of KMS: put it back as it was") from None
    return base64.urlsafe_b64encode(_call_kms("decrypt", CiphertextBlob=sealed)["Plaintext"]).decode()


def _call_kms(call: str, **given: Any) -> dict[str, Any]:
    from botocore.config import Config
    from botocore.exceptions import BotoCoreError, ClientError
    from botocore.session import get_session

    limits = Config(connect_timeout=SECONDS_MAX, read_timeout=SECONDS_MAX, retries={"total_max_attempts": 3})
    try:
        session = get_session()
        region = session.get_config_variable("region") or _region_of(str(given.get("KeyId", "")))
        answer: dict[str, Any] = getattr(session.create_client("kms", region_name=region, config=limits), call)(**given)
    except ClientError as error:
        problem = error.response.get("Error", {})
        raise KmsRefused(f"AWS KMS says {problem.get('Code')}: {problem.get('Message')}"[:400]) from None
    except BotoCoreError as error:
        raise KmsRefused(f"AWS KMS can't be asked: {error}"[:400]) from None
    return answer


def _region_of(key_id: str) -> str | None:
    """An ARN names it: arn:aws:kms:eu-central-1:…"""
    parts = key_id.split(":")
    return parts[3] if len(parts) > 3 and parts[0] == "arn" else None
