"""Loading of a job's tokenizer: from `data.tokenizer`, a model's folder, or a commit."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import PurePath
from typing import Any, Final

import tokenizers

from muster.recipe.data_config import DataConfig
from muster.storage.errors import NotFound, StoreRefusal
from muster.storage.model_folder import TEMPLATES, has_file, template_files
from muster.storage.opening import open_source
from muster.trainer.data.chat_template import ChatTemplate
from muster.trainer.data.hugging_face_tokenizer import HUGGING_FACE, HuggingFaceTokenizer
from muster.trainer.data.slow_tokenizers import SLOW_FILES, why_not_fast
from muster.trainer.data.tokenizer import BYTES, ByteTokenizer, Tokenizer
from muster.trainer.errors import StorageError, UserError
from muster.words.address import StorageAddress, data_address

TEMPLATE: Final = "chat_template.jinja"


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
    beside = {"tokenizer_config.json": configuration}
    beside |= {each: _read(folder, each) for each in (TEMPLATE, *template_files(open_source(folder)))}
    return tokenizer_of_folder(text, {each: content for each, content in beside.items() if content is not None}, spec)


def tokenizer_of_folder(text: str, beside: Mapping[str, str], where: str) -> HuggingFaceTokenizer:
    """The tokenizer of a model's folder, made of the text of its tokenizer.json and of those `beside` it, by their
    names. `where` names the folder in messages. Of several chat templates the one named `tool_use` writes conversations
    with tools, as in transformers.
    """
    tokens, sources = _configured_tokens(beside.get("tokenizer_config.json")), template_sources(beside)
    with_tools = sources.get("tool_use")
    default = sources.get("default") or with_tools
    made = ChatTemplate(default, tokens, with_tools if with_tools != default else None) if default else None
    tokenizer = HuggingFaceTokenizer(text, where, tokens.get("eos_token"), made)
    tokenizer.templates, tokenizer.tokens = sources, tokens
    return tokenizer


def template_sources(beside: Mapping[str, str]) -> dict[str, str]:
    """The chat templates of a model's folder by their names: those in files of their own, or, where there are none, in
    its tokenizer_config.json. `beside` are the texts of its files by their names."""
    sources = {PurePath(name).stem: text for name, text in beside.items() if name.startswith(f"{TEMPLATES}/")}
    if TEMPLATE in beside:
        sources["default"] = beside[TEMPLATE]
    return sources or _configured_templates(beside.get("tokenizer_config.json"))


def templated(tokenizer: Tokenizer, data: DataConfig) -> Tokenizer:
    """The tokenizer with the chat template that is asked for: in a file, or by name one of its own. Raises UserError
    where there is no such template, or the tokenizer has marks of its own."""
    if not isinstance(tokenizer, HuggingFaceTokenizer):
        if data.chat_template is None and data.chat_template_name is None:
            return tokenizer
        setting = "chatTemplate" if data.chat_template else "chatTemplateName"
        raise UserError(f"data.{setting}: the tokenizer `bytes` writes marks of its own; name a tokenizer.json")
    if data.chat_template is not None:
        return tokenizer.with_template(_template_at(data.chat_template))
    return _of_name(tokenizer, data.chat_template_name)


def _of_name(tokenizer: HuggingFaceTokenizer, name: str | None) -> HuggingFaceTokenizer:
    names = ", ".join(sorted(tokenizer.templates)) or "none"
    if name is None:
        if tokenizer.template is None and tokenizer.templates:
            raise UserError(
                f"the tokenizer has chat templates by name, and none is `default` ({names}); name one in "
                "data.chatTemplateName"
            )
        return tokenizer
    if name not in tokenizer.templates:
        raise UserError(
            f"data.chatTemplateName: the tokenizer has no chat template {name!r}; there are: {names}. Name one of "
            "them, or give a Jinja file as data.chatTemplate"
        )
    return tokenizer.with_template(tokenizer.templates[name])


def _template_at(address: str) -> str:
    place = data_address(address)
    above, _, name = place.path.rpartition("/")
    text = _read(replace(place, path=above or ("/" if place.path.startswith("/") else "")), name)
    if text is None:
        raise UserError(f"data.chatTemplate: {address} does not exist; give the address of a Jinja file")
    return text


def add_tokens(text: str, tokens: Sequence[str], where: str) -> tuple[str, tuple[int, ...]]:
    """The text of a tokenizer.json with further tokens, and their ids. They are no special ones: a document that spells
    one has it. `where` names the tokenizer in messages. Raises UserError for tokens that are there already.
    """
    tokenizer = tokenizers.Tokenizer.from_str(text)
    ids = set(tokenizer.get_vocab(with_added_tokens=True).values())
    there = {token: tokenizer.token_to_id(token) for token in tokens if tokenizer.token_to_id(token) is not None}
    if there:
        existing = ", ".join(f"{token!r} ({number})" for token, number in there.items())
        raise UserError(f"data.addTokens: the tokenizer of {where} has {existing} already; leave out what is there")
    tokenizer.add_tokens([tokenizers.AddedToken(token, normalized=False) for token in tokens])
    vocabulary: dict[str, int] = tokenizer.get_vocab(with_added_tokens=True)
    new = tuple(vocabulary[token] for token in tokens)
    if ids & {*new} or len({*new}) < len(new):
        raise UserError(
            f"data.addTokens: the ids of the tokenizer of {where} have gaps, and new tokens would get those of others; "
            "add them with `tokenizer.add_tokens` and save the folder anew"
        )
    return tokenizer.to_str(), new


def tokenizer_from_commit(described: dict[str, Any], beside: Mapping[str, str] | None = None) -> Tokenizer:
    """The tokenizer that `describe()` described. `beside` are the files of the model's folder that the commit holds, by
    their names: chat templates may be chosen of them. Raises StorageError when the description is damaged."""
    kind = described.get("kind")
    if kind == BYTES:
        return ByteTokenizer()
    if kind != HUGGING_FACE or not isinstance(described.get("json"), str):
        raise StorageError(f"the checkpoint describes no tokenizer that this version knows (kind {kind!r})")
    tokenizer = HuggingFaceTokenizer.from_description(described)
    tokenizer.templates = template_sources(beside or {})
    tokenizer.tokens = tokenizer.tokens or _configured_tokens((beside or {}).get("tokenizer_config.json"))
    return tokenizer


def _read(folder: StorageAddress, name: str) -> str | None:
    """The file's text; None when it is not there."""
    try:
        return open_source(folder).read(name).decode()
    except NotFound:
        return None
    except (StoreRefusal, UnicodeDecodeError) as error:
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


def _configured_templates(configuration: str | None) -> dict[str, str]:
    """The chat templates of a tokenizer_config.json: the one, which is the default, or a list of them by name."""
    configured = _parsed(configuration).get("chat_template")
    listed = configured if isinstance(configured, list) else [{"name": "default", "template": configured}]
    named = {each.get("name"): each.get("template") for each in listed if isinstance(each, dict)}
    return {str(name): template for name, template in named.items() if isinstance(template, str)}


def _parsed(configuration: str | None) -> dict[str, Any]:
    try:
        parsed = json.loads(configuration) if configuration else {}
    except ValueError:
        return {}
    return parsed if isinstance(parsed, dict) else {}
