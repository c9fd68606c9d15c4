"""A model's folder as Hugging Face writes it: config.json, safetensors, tokenizer. Checked by its headers alone.

Nothing here runs code from the folder or unpickles anything, and no weight is read: only the few bytes at the head of
each safetensors file, which say where every tensor lies.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Final, Protocol

from muster.plan.model_size import is_embedding, is_token_head
from muster.storage.errors import NotFound, StoreRefusal, TruncatedObject
from muster.words.base import UserError
from muster.words.checkpoint import ITEM_BYTES

CONFIG: Final = "config.json"
SINGLE: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"
PICKLED: Final = ("pytorch_model.bin", "pytorch_model.bin.index.json", "model.pt", "consolidated.00.pth")

# What stands beside the weights and belongs to them, to be carried along byte for byte. tokenizer.json too, apart.
TOKENIZER: Final = "tokenizer.json"
COMPANIONS: Final = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "generation_config.json",
)
# Further chat templates, a file each, as transformers 5 saves them.
TEMPLATES: Final = "additional_chat_templates"
_TEMPLATE: Final = re.compile(rf"{TEMPLATES}/[\w-]{{1,64}}\.jinja", re.ASCII)
_USUAL_TEMPLATES: Final = tuple(f"{TEMPLATES}/{name}.jinja" for name in ("tool_use", "rag"))
HEADER_BYTES_MAX: Final = 100_000_000  # the safetensors library's own limit
# Types of packed, quantised weights (MLX and others), which nothing here can compute with.
NOT_TRAINED: Final = frozenset({"U16", "U32", "U64"})
COMPARED_BYTES: Final = 8 * 2**20  # read at a time of two tables that may be alike


class NamedEntry(Protocol):
    """Entry of a listing."""

    @property
    def key(self) -> str: ...


class FolderFiles(Protocol):
    """Protocol of the place that holds the folder. Keys are the names of files in it; `uri` is its address."""

    @property
    def uri(self) -> str: ...
    def read(self, key: str) -> bytes:
        """A small file whole. Raises NotFound."""

    def read_into(self, key: str, start: int, into: memoryview) -> None:
        """Bytes [start, start + len(into)) of a file. Raises NotFound, Truncated."""

    def objects(self, prefix: str) -> Iterator[NamedEntry]:
        """Files whose key starts with `prefix`. Raises Refused where nothing can be listed."""


@dataclass(frozen=True)
class StoredTensor:
    """Location of one tensor."""

    file: str
    dtype: str  # as safetensors spells it
    shape: tuple[int, ...]
    start: int  # of its first byte in the file
    end: int  # of the byte after its last one


@dataclass(frozen=True)
class ModelFolder:
    """A model in transformers' layout, as the files of its folder describe it."""

    files: FolderFiles
    config: dict[str, Any]  # config.json
    tensors: Mapping[str, StoredTensor]  # by their names in the files
    companions: Mapping[str, str]  # the text of each small file beside the weights, by its name
    tokenizer: str | None  # the text of tokenizer.json; None: there is none
    file_bytes: Mapping[str, int]  # the size of each file of weights, by its name
    revision: str | None = None  # what the address was resolved to; None: the place has no revisions

    @property
    def address(self) -> str:
        return self.files.uri

    @property
    def dtype(self) -> str:
        """The floating-point type that most of the bytes have, as safetensors spells it."""
        sizes: dict[str, int] = {}
        for tensor in self.tensors.values():
            if "F" in tensor.dtype:
                sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.end - tensor.start
        return max(sizes, key=lambda name: sizes[name], default="F32")

    def has(self, name: str) -> bool:
        """Return whether it has a file of this name."""
        return has_file(self.files, name)

    def has_another_head(self, ends_only: bool = False) -> bool:
        """Return whether the files hold an output head with other values than their table of tokens.

        Reads both, up to the first difference: transformers decides in this way what becomes of a head that config.json
        calls tied. `ends_only` reads no more than the beginning and the end of each, for a look: a trained head differs
        in its first rows, one that was only grown in its last.
        """
        heads = [tensor for name, tensor in self.tensors.items() if is_token_head(name)]
        tables = [tensor for name, tensor in self.tensors.items() if is_embedding(name)]
        if len(heads) != 1 or len(tables) != 1 or heads[0].shape != tables[0].shape:
            return False
        (head,), (table,) = heads, tables
        if head.dtype != table.dtype:
            return True
        length = head.end - head.start
        one, other = (memoryview(bytearray(min(COMPARED_BYTES, length))) for _ in range(2))
        every = range(0, length, COMPARED_BYTES)
        for at in dict.fromkeys((0, max(0, length - COMPARED_BYTES))) if ends_only else every:
            size = min(COMPARED_BYTES, length - at)
            self.files.read_into(head.file, head.start + at, one[:size])
            self.files.read_into(table.file, table.start + at, other[:size])
            if one[:size] != other[:size]:
                return True
        return False

    def untied(self) -> ModelFolder:
        """Return the same folder with a config.json that says that its head is one of its own."""
        config = {**self.config, "tie_word_embeddings": False}
        companions = {**self.companions, CONFIG: json.dumps(config, indent=2) + "\n"}
        return replace(self, config=config, companions=companions)

    def describe(self) -> dict[str, Any]:
        """Return the record of what was loaded, for every commit: address, revision, and files with their sizes."""
        return {"address": self.address, "revision": self.revision, "files": dict(self.file_bytes)}


def open_folder(files: FolderFiles) -> ModelFolder:
    """Look into a folder. Raises UserError naming everything that is wrong with it."""
    read = _FolderReader(files)
    config = read.document(CONFIG)
    if config is None:
        raise UserError(
            f"model.source {files.uri}: holds no {CONFIG}{_other_kind(files)}; give the folder that "
            "`model.save_pretrained(folder)` wrote, with its safetensors beside it"
        )
    _must_not_be_quantised(config, files.uri)
    tensors = _tensors(read)
    beside = (*COMPANIONS, *template_files(files))
    companions = {name: text for name in beside if (text := read.text(name)) is not None}
    return ModelFolder(
        files=files,
        config=config,
        tensors=tensors,
        companions={**companions, CONFIG: read.text(CONFIG) or ""},
        tokenizer=read.text(TOKENIZER),
        file_bytes=read.sizes,
        revision=getattr(files, "revision", None),
    )


def template_files(files: FolderFiles) -> tuple[str, ...]:
    """The chat templates in addition to chat_template.jinja, by their files; where nothing can be listed, as on the
    web, those that there may be by the names that are usual."""
    try:
        keys = sorted(each.key for each in files.objects(f"{TEMPLATES}/"))
    except (NotFound, StoreRefusal):
        return _USUAL_TEMPLATES
    return tuple(name for name in keys if _TEMPLATE.fullmatch(name))


def _other_kind(files: FolderFiles) -> str:
    """Return the kind of a folder that is no model in transformers' layout, as the end of a sentence."""
    if has_file(files, "adapter_config.json"):
        return (
            ": it is an adapter (PEFT) without its base model. Merge it first: `AutoPeftModelForCausalLM"
            ".from_pretrained(folder).merge_and_unload().save_pretrained(new_folder)`"
        )
    try:
        gguf = sorted(each.key for each in files.objects("") if each.key.endswith(".gguf"))
    except (NotFound, StoreRefusal):
        gguf = []
    return f": {gguf[0]} is made for llama.cpp, and GGUF can't be trained. Take the original weights" if gguf else ""


def _must_not_be_quantised(config: Mapping[str, Any], where: str) -> None:
    """Raise UserError for a configuration of quantised weights."""
    # mlx-lm writes its settings under both names, and names no method.
    mlx, quantised = config.get("quantization"), config.get("quantization_config")
    if isinstance(mlx, dict) and "bits" in mlx:
        kind = f"it is an MLX {mlx['bits']}-bit folder: its weights are quantised"
    elif quantised:
        method = quantised.get("quant_method") if isinstance(quantised, dict) else None
        kind = f"its weights are quantised ({method or 'of an unknown kind'})"
    else:
        return
    raise UserError(
        f"model.source {where}: {kind}, which can't be trained; take the model's original weights in bf16 (or "
        "dequantise these), and adapter.kind qlora to train beside 4-bit ones"
    )


class _FolderReader:
    def __init__(self, files: FolderFiles) -> None:
        self.files = files
        self.sizes: dict[str, int] = {}
        self._texts: dict[str, str | None] = {}

    def text(self, name: str) -> str | None:
        if name not in self._texts:
            try:
                self._texts[name] = self.files.read(name).decode()
            except NotFound:
                self._texts[name] = None
            except UnicodeDecodeError:
                raise UserError(f"model.source {self.files.uri}: {name} is not UTF-8 text; copy it again") from None
        return self._texts[name]

    def document(self, name: str) -> dict[str, Any] | None:
        """A JSON object; None where there is no such file."""
        text = self.text(name)
        if text is None:
            return None
        try:
            parsed = json.loads(text)
        except ValueError as error:
            place = f"model.source {self.files.uri}: {name}"
            _must_be_the_file(text[:64].encode(), place)
            raise UserError(f"{place} is not JSON: {error}; copy it again") from None
        if not isinstance(parsed, dict):
            raise UserError(f"model.source {self.files.uri}: {name} is not a JSON object; copy it again")
        return parsed

    def header(self, name: str) -> dict[str, StoredTensor] | None:
        """The tensors of one safetensors file; None where there is no such file. Its last byte must be there."""
        place = f"model.source {self.files.uri}: {name}"
        eight = bytearray(8)
        try:
            self.files.read_into(name, 0, memoryview(eight))
            _must_be_the_file(bytes(eight), place)
            length = int.from_bytes(eight, "little")
            if length > HEADER_BYTES_MAX:
                raise UserError(f"{place} is no safetensors file: its header claims {length} bytes; copy it again")
            text = bytearray(length)
            self.files.read_into(name, 8, memoryview(text))
        except NotFound:
            return None
        except TruncatedObject:
            raise UserError(f"{place} is truncated: it ends within its header; copy it again") from None
        tensors = _parsed(bytes(text), name, place)
        end = max((tensor.end for tensor in tensors.values()), default=8 + length)
        if end > 8 + length:
            try:
                self.files.read_into(name, end - 1, memoryview(bytearray(1)))
            except TruncatedObject:
                raise UserError(
                    f"{place} is truncated: its header promises {end:,} bytes, and it has fewer; copy it again"
                ) from None
        self.sizes[name] = end
        return tensors


def _must_be_the_file(beginning: bytes, place: str) -> None:
    """Raise UserError for what often lies where a file should: a pointer of Git LFS, or a page of a web server."""
    if beginning.startswith(b"version "):
        raise UserError(
            f"{place} is a pointer of Git LFS, not the file itself; run `git lfs pull` in the clone, and copy it again"
        )
    if beginning.lstrip().startswith(b"<"):
        raise UserError(f"{place} is a web page, not the file itself; download it again by its own address")


def has_file(files: FolderFiles, name: str) -> bool:
    """Return whether the file exists."""
    try:
        files.read_into(name, 0, memoryview(bytearray(1)))
    except NotFound:
        return False
    except TruncatedObject:
        return True
    return True


def _tensors(read: _FolderReader) -> dict[str, StoredTensor]:
    index = read.document(INDEX)
    if index is not None:
        indexed = _indexed(read, index)
        # transformers would take the single file, and nobody knows which of the two is meant.
        if SINGLE not in read.sizes and has_file(read.files, SINGLE):
            raise UserError(
                f"model.source {read.files.uri}: has both {SINGLE} and {INDEX} with its files, two copies of the "
                "weights that may differ; remove the one that is not meant"
            )
        return indexed
    single = read.header(SINGLE)
    if single is not None:
        return single
    pickled = [name for name in PICKLED if has_file(read.files, name)]
    if pickled:
        raise UserError(
            f"model.source {read.files.uri}: has its weights in {pickled[0]}, a pickle, and to open a pickle is to run "
            "whatever program it holds. Convert it where you trust it: "
            "`AutoModelForCausalLM.from_pretrained(folder).save_pretrained(new_folder)` writes safetensors"
        )
    raise UserError(
        f"model.source {read.files.uri}: holds neither {SINGLE} nor {INDEX}{_other_kind(read.files)}; "
        "`model.save_pretrained(folder)` writes them"
    )


def _indexed(read: _FolderReader, index: dict[str, Any]) -> dict[str, StoredTensor]:
    place = f"model.source {read.files.uri}: {INDEX}"
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise UserError(f"{place} has no weight_map of names to files; copy it again")
    if outside := sorted({name for name in weight_map.values() if "/" in name or name.startswith(".")}):
        raise UserError(f"{place} names files outside the folder: {', '.join(outside[:5])}; put all beside it")
    files = sorted(set(weight_map.values()))
    headers = {name: read.header(name) for name in files}
    if missing := [name for name, header in headers.items() if header is None]:
        raise UserError(f"{place} names files that are not there: {', '.join(missing)}; copy them, or all again")
    slots = {tensor: (headers[file] or {}).get(tensor) for tensor, file in weight_map.items()}
    if absent := [f"{name} (in {weight_map[name]})" for name, slot in slots.items() if slot is None]:
        raise UserError(f"{place} names tensors that its files do not hold: {', '.join(absent[:20])}; copy all again")
    return {name: slot for name, slot in slots.items() if slot is not None}


def _parsed(text: bytes, file: str, place: str) -> dict[str, StoredTensor]:
    base = 8 + len(text)
    try:
        described = json.loads(text)
        tensors = {
            name: StoredTensor(
                file,
                str(entry["dtype"]),
                tuple(int(size) for size in entry["shape"]),
                base + int(entry["data_offsets"][0]),
                base + int(entry["data_offsets"][1]),
            )
            for name, entry in described.items()
            if name != "__metadata__"
        }
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise UserError(f"{place}: its safetensors header is damaged: {error!r}; copy it again") from None
    for name, tensor in tensors.items():
        size = ITEM_BYTES.get(tensor.dtype)
        if size is None or tensor.dtype in NOT_TRAINED:
            raise UserError(
                f"{place}: {name} has dtype {tensor.dtype}, as quantised weights have, which can't be trained; take "
                "the model's original weights in bf16"
            )
        if not base <= tensor.start <= tensor.end or tensor.end - tensor.start != prod(tensor.shape) * size:
            raise UserError(f"{place}: its header puts {name} where it can't be; copy it again")
    return tensors
