"""Where a job's tokenizer comes from: `data.tokenizer`, a model's folder, or a commit."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import tokenizers

from muster.contract.address import Address, data_address
from muster.storage.errors import NotFound, Refused
from muster.storage.model_folder import has_file
from muster.storage.store import open_source
from muster.trainer.data.chat_template import ChatTemplate
from muster.trainer.data.hugging_face_tokenizer import HUGGING_FACE, HuggingFaceTokenizer
from muster.trainer.data.slow_tokenizers import SLOW_FILES, why_not_fast
from muster.trainer.data.tokenizer import BYTES, ByteTokenizer, Tokenizer
from muster.trainer.errors import StorageError, UserError


def load_tokenizer(spec: str) -> Tokenizer:
    """The tokenizer that `data.tokenizer` names: `bytes`, or a tokenizer.json (or its folder) at a path, file:// or s3://.

    Raises UserError when there is none or it can't be read.
    """
    if spec == BYTES:
        return ByteTokenizer()
    place = data_address(spec)
    if place.scheme == "builtin":
        raise UserError(f"data.tokenizer: {spec} is none; use `bytes`, a path, or a file:// or s3:// address")
    if place.scheme == "file" and place.local.is_dir():
        place = place.child("tokenizer.json")
    above, _, name = place.path.rpartition("/")
    folder = replace(place, path=above or ("/" if place.path.startswith("/") else ""))
    configuration = _read(folder, "tokenizer_config.json")
    text = None if name in SLOW_FILES else _read(folder, name)
    if text is None and any(has_file(open_source(folder), slow) for slow in SLOW_FILES):
        reason = why_not_fast(configuration, partial(has_file, open_source(folder)))
        raise UserError(f"data.tokenizer: the folder of {spec} {reason}")
    if text is None:
        raise UserError(f"data.tokenizer: {spec} does not exist; use `bytes` or the address of a tokenizer.json")
    return tokenizer_of_folder(text, configuration, spec, _read(folder, "chat_template.jinja"))


def tokenizer_of_folder(
    text: str, configuration: str | None, where: str, template: str | None = None
) -> HuggingFaceTokenizer:
    """The tokenizer of a model's folder, made of the texts of its tokenizer.json and, as `configuration`, of its
    tokenizer_config.json (None where there is none). `where` names the folder in messages. `template` is the text of
    its chat_template.jinja; an older folder has that in its configuration.
    """
    tokens = _configured_tokens(configuration)
    source = template or _configured_template(configuration)
    made = ChatTemplate(source, tokens) if source else None
    return HuggingFaceTokenizer(text, where, tokens.get("eos_token"), made)


def templated(tokenizer: Tokenizer, address: str | None) -> Tokenizer:
    """The tokenizer with the chat template in a file; the tokenizer itself where `address` is None. Raises UserError
    where there is no such file, or the tokenizer has marks of its own."""
    if address is None:
        return tokenizer
    if not isinstance(tokenizer, HuggingFaceTokenizer):
        raise UserError("data.chatTemplate: the tokenizer `bytes` writes marks of its own; name a tokenizer.json")
    place = data_address(address)
    above, _, name = place.path.rpartition("/")
    text = _read(replace(place, path=above or ("/" if place.path.startswith("/") else "")), name)
    if text is None:
        raise UserError(f"data.chatTemplate: {address} does not exist; give the address of a Jinja file")
    return tokenizer.with_template(text)


def add_tokens(text: str, tokens: Sequence[str], where: str) -> tuple[str, tuple[int, ...]]:
    """The text of a tokenizer.json with further tokens, and their ids. They are no special ones: a document that spells
    one has it. `where` names the tokenizer in messages. Raises UserError for tokens that are there already.
    """
    tokenizer = tokenizers.Tokenizer.from_str(text)
    ids = set(tokenizer.get_vocab(with_added_tokens=True).values())
    there = {token: tokenizer.token_to_id(token) for token in tokens if tokenizer.token_to_id(token) is not None}
    if there:
        known = ", ".join(f"{token!r} ({number})" for token, number in there.items())
        raise UserError(f"data.addTokens: the tokenizer of {where} has {known} already; leave out what is there")
    tokenizer.add_tokens([tokenizers.AddedToken(token, normalized=False) for token in tokens])
    vocabulary: dict[str, int] = tokenizer.get_vocab(with_added_tokens=True)
    new = tuple(vocabulary[token] for token in tokens)
    if ids & {*new} or len({*new}) < len(new):
        raise UserError(
            f"data.addTokens: the ids of the tokenizer of {where} have gaps, and new tokens would get those of others; "
            "add them with `tokenizer.add_tokens` and save the folder anew"
        )
    return tokenizer.to_str(), new


def tokenizer_from_commit(described: dict[str, Any]) -> Tokenizer:
    """The tokenizer that `describe()` described. Raises StorageError when the description is damaged."""
    kind = described.get("kind")
    if kind == BYTES:
        return ByteTokenizer()
    if kind != HUGGING_FACE or not isinstance(described.get("json"), str):
        raise StorageError(f"the commit describes no tokenizer that this version knows (kind {kind!r})")
    return HuggingFaceTokenizer.from_description(described)


def _read(folder: Address, name: str) -> str | None:
    """The file's text; None when it is not there."""
    try:
        return open_source(folder).read(name).decode()
    except NotFound:
        return None
    except (Refused, UnicodeDecodeError) as error:
        raise UserError(f"data.tokenizer: can't read {folder.child(name)}: {error}") from None


def _configured_tokens(configuration: str | None) -> dict[str, str]:
    """`bos_token`, `eos_token` and their like of a tokenizer_config.json, which writes each as text or as
    {"content": text}."""
    tokens = {}
    for name, value in _parsed(configuration).items():
        token = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(token, str):
            tokens[name] = token
    return tokens


def _configured_template(configuration: str | None) -> str | None:
    """The chat template of a tokenizer_config.json: the one, or of several the one named `tool_use`, or `default`."""
    found = _parsed(configuration).get("chat_template")
    if isinstance(found, list):
        named = {each.get("name"): each.get("template") for each in found if isinstance(each, dict)}
        found = named.get("tool_use") or named.get("default")
    return found if isinstance(found, str) else None


def _parsed(configuration: str | None) -> dict[str, Any]:
    try:
        found = json.loads(configuration) if configuration else {}
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
