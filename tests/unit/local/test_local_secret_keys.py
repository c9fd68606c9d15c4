"""Keys of secrets that AWS KMS keeps: the file alone opens nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from moto import mock_aws
from moto.core.models import DEFAULT_ACCOUNT_ID as ACCOUNT_ID
from moto.kms.models import kms_backends
from tests.s3_servers import KEYS

from muster.secrets import kms
from muster.secrets.box import SecretBox, SecretsLocked

DATA = {"value": "s3cr3t"}


@pytest.fixture
def keys(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A client of KMS."""
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)
    kms.opened.cache_clear()
    with mock_aws():
        yield boto3.client("kms", region_name=KEYS["AWS_DEFAULT_REGION"])
    kms.opened.cache_clear()


def test_the_file_holds_a_key_that_kms_alone_opens(keys: Any, tmp_path: Path) -> None:
    key_id = keys.create_key()["KeyMetadata"]["Arn"]
    path = tmp_path / "secret-key"
    sealed = SecretBox(path, key_id).seal("nlp", "hf-token", DATA)
    assert path.read_text().startswith("kms:")
    assert path.stat().st_mode & 0o777 == 0o600
    kms.opened.cache_clear()
    assert SecretBox(path).open("nlp", "hf-token", sealed) == DATA, "who opens needs no setting"
    kms_backends[ACCOUNT_ID][KEYS["AWS_DEFAULT_REGION"]].keys.clear()
    assert SecretBox(path).open("nlp", "hf-token", sealed) == DATA, "it was opened in this process"
    kms.opened.cache_clear()
    with pytest.raises(SecretsLocked, match=r"secret-key can't be used: AWS KMS says \w+"):
        SecretBox(path).open("nlp", "hf-token", sealed)
    assert kms.opened.cache_info().currsize == 0, "a refusal is not kept"


def test_a_key_of_a_file_is_replaced_by_one_of_kms(keys: Any, tmp_path: Path) -> None:
    path = tmp_path / "secret-key"
    sealed = SecretBox(path).seal("nlp", "hf-token", DATA)
    line = kms.new_line(keys.create_key()["KeyMetadata"]["KeyId"])
    path.write_text(f"{line}\n{path.read_text()}")
    renewed = SecretBox(path).renewed(sealed)
    assert renewed is not None
    path.write_text(f"{line}\n")
    assert SecretBox(path).open("nlp", "hf-token", renewed) == DATA


@pytest.mark.parametrize("line", ["kms:", "kms:%%%", f"kms:{'A' * 43}=", "no key at all"])
def test_a_damaged_line_is_named(keys: Any, tmp_path: Path, line: str) -> None:
    path = tmp_path / "secret-key"
    path.write_text(f"{line}\n")
    path.chmod(0o600)
    with pytest.raises(SecretsLocked, match="secret-key"):
        SecretBox(path).seal("nlp", "x", DATA)


def test_a_key_that_kms_does_not_know_makes_no_file(keys: Any, tmp_path: Path) -> None:
    path = tmp_path / "secret-key"
    with pytest.raises(SecretsLocked, match="the key of secrets can't be made: AWS KMS says NotFound"):
        SecretBox(path, "alias/none").seal("nlp", "x", DATA)
    assert not path.exists()
