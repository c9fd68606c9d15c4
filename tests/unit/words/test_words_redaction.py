"""Secrets in logs, errors and replies."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.api.core.log import without_secrets
from muster.words.redaction import HIDDEN, looks_secret, masked_paths, redact, redact_spec, redact_values, secrets_in


@pytest.mark.parametrize(
    "name",
    [
        "HF_TOKEN",
        "AWS_SECRET_ACCESS_KEY",
        "DB_PASSWORD",
        "password",
        "WANDB_API_KEY",
        "apikey",
        "SSH_PRIVATE_KEY",
        "PG_DSN",
    ],
)
def test_secret_names(name: str) -> None:
    assert looks_secret(name)


@pytest.mark.parametrize("name", ["PATH", "TOKENIZERS_PARALLELISM", "MONKEY", "OMP_NUM_THREADS", "AUTHOR", "DEBUG"])
def test_ordinary_names(name: str) -> None:
    assert not looks_secret(name)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("postgresql://me:hunter2@db/x", "postgresql://***@db/x"),
        ("see https://token@host/a and s3://b/c", "see https://***@host/a and s3://b/c"),
        (
            "https://b.s3.amazonaws.com/k?X-Amz-Signature=abc&x=1",
            "https://b.s3.amazonaws.com/k?X-Amz-Signature=***&x=1",
        ),
        ("Authorization: Bearer abc.def", "Authorization: Bearer ***"),
        ("used muster_0123456789abcdefghij today", "used *** today"),
        ("mail me@host.org", "mail me@host.org"),
    ],
)
def test_credentials_inside_a_text(text: str, shown: str) -> None:
    assert redact(text) == shown


def test_a_spec_for_a_reader() -> None:
    spec = {
        "runtime": {"env": [{"name": "HF_TOKEN", "value": "hunter2"}, {"name": "LEVEL", "value": "3"}]},
        "gang": {"network": {"nccl": {"NCCL_DEBUG": "INFO", "NCCL_SECRET_KEY": "hunter3"}}},
        "training": {"data": {"train": [{"source": "https://me:hunter4@host/x", "weight": 1.0}]}},
        "priority": 3,
    }
    shown = redact_spec(spec)
    assert "hunter" not in str(shown)
    assert shown["runtime"]["env"][1] == {"name": "LEVEL", "value": "3"}
    assert shown["gang"]["network"]["nccl"]["NCCL_DEBUG"] == "INFO"
    assert shown["priority"] == 3
    assert spec["runtime"]["env"][0]["value"] == "hunter2", "what is stored stays as it is"  # type: ignore[index, call-overload]


def test_values_of_a_wrong_document_are_found_wherever_they_stand() -> None:
    document = {"spec": {"runtime": {"env": [{"name": "A", "value": 12345}, {"naem": "B", "value": ["deep"]}, "bare"]}}}
    assert secrets_in(document) == {"12345", "B", "deep", "bare"}
    assert secrets_in({"spec": 3}) == secrets_in(None) == frozenset()
    assert redact_values("not 12345 but deep", secrets_in(document)) == f"not {HIDDEN} but {HIDDEN}"


@given(st.text(alphabet=st.characters(exclude_characters="/@'\" \n\t\r\f\v", categories=("L", "N", "P")), min_size=1))
def test_no_password_in_an_address_survives(password: str) -> None:
    assert redact(f"x postgresql://user:{password}@host/db y") == "x postgresql://***@host/db y"


def test_log_entries() -> None:
    entry = {"event": "opened https://a:b@c", "password": "x", "error": ValueError("postgresql://a:b@c"), "n": 1}
    assert without_secrets(None, "info", entry) == {
        "event": "opened https://***@c",
        "password": HIDDEN,
        "error": "ValueError: postgresql://***@c",
        "n": 1,
    }


def test_what_was_hidden_is_found_again() -> None:
    spec = {
        "runtime": {
            "env": [
                {"name": "HF_TOKEN", "value": "hf_abc"},
                {"name": "PROXY", "value": "http://me:secret@proxy:80"},
                {"name": "MODE", "value": "a ** b"},
            ]
        },
        "training": {"data": {"train": [{"source": "https://x/y?X-Amz-Signature=abc&z=1"}, {"source": "/a/**/*.txt"}]}},
    }
    assert list(masked_paths({"spec": spec})) == []
    assert list(masked_paths({"spec": redact_spec(spec)})) == [
        "spec.runtime.env[0].value",
        "spec.runtime.env[1].value",
        "spec.training.data.train[0].source",
    ]
