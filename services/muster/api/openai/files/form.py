"""A body of multipart/form-data with one file in it, whose bytes are passed on as they come, and a few short fields."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Final

from fastapi import Request
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from muster.api.core.errors import ApiError
from muster.api.openai.requests import refused

FIELDS_MAX: Final = 20
FIELD_BYTES_MAX: Final = 10_000  # OpenAI's fields are words and numbers


class FileForm:
    """The form that a request brings, whose file is the field `file_field`; the fields before it and behind it are in
    `fields` when all of its bytes were read."""

    def __init__(self, request: Request, file_field: str) -> None:
        self.fields: dict[str, str] = {}
        self.file_field = file_field
        self.filename = ""  # without folders
        self._request = request
        self._has_file = False

    async def chunks(self) -> AsyncIterator[bytes]:
        """The file's bytes. Raises ApiError invalid_request for what is no such form."""
        reader = _FormReader(self, self._request.headers.get("content-type", ""))
        async for data in self._request.stream():
            if not data:
                continue
            for chunk in reader.read(data):
                yield chunk
        reader.must_have_ended()
        if not self._has_file:
            raise refused(self.file_field, "is required: the file itself, as a part of the form")

    def begin_file(self, filename: str) -> None:
        if self._has_file:
            raise refused(self.file_field, "is there twice; send one file in a request")
        self._has_file, self.filename = True, filename.replace("\\", "/").rpartition("/")[2]


class _FormReader:
    """Bytes of the body in, bytes of the file out; the fields are noted in the form."""

    def __init__(self, form: FileForm, content_type: str) -> None:
        self._form = form
        self._field = self._header = b""
        self._headers: dict[bytes, bytes] = {}
        self._name: str | None = None  # of the part that is read
        self._in_file = self._ended = False
        self._value = bytearray()
        self._out: list[bytes] = []
        self._parser = self._parser_for(content_type)

    def _parser_for(self, content_type: str) -> MultipartParser:
        kind, options = parse_options_header(content_type)
        if kind != b"multipart/form-data" or not options.get(b"boundary"):
            words = f"not {content_type[:100]!r}" if content_type else "and the request names no type"
            raise ApiError("unsupported_media_type", f"The body must be multipart/form-data with a boundary, {words}.")
        try:
            return MultipartParser(
                options[b"boundary"],
                {
                    "on_part_begin": self._begin,
                    "on_header_field": self._on_header_field,
                    "on_header_value": self._on_header_value,
                    "on_header_end": self._on_header_end,
                    "on_headers_finished": self._on_headers,
                    "on_part_data": self._on_data,
                    "on_part_end": self._on_end,
                    "on_end": self._on_form_end,
                },
            )
        except FormParserError as error:
            raise self._broken(error) from None

    def read(self, data: bytes) -> list[bytes]:
        self._out = []
        try:
            self._parser.write(data)
        except FormParserError as error:
            raise self._broken(error) from None
        return self._out

    def must_have_ended(self) -> None:
        if not self._ended:
            raise self._broken("it ends before its last boundary")

    def _broken(self, why: object) -> ApiError:
        return ApiError("invalid_document", f"The form can't be read: {why}.")

    def _begin(self) -> None:
        self._headers, self._field, self._header = {}, b"", b""

    def _on_header_field(self, data: bytes, start: int, end: int) -> None:
        self._field += data[start:end]

    def _on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def _on_header_end(self) -> None:
        self._headers[self._field.lower()] = self._header
        self._field, self._header = b"", b""

    def _on_headers(self) -> None:
        disposition = self._headers.get(b"content-disposition", b"").decode("latin-1")
        _, options = parse_options_header(disposition)
        self._name = options.get(b"name", b"").decode(errors="replace")
        self._in_file = self._name == self._form.file_field and b"filename" in options
        if self._in_file:
            self._form.begin_file(options[b"filename"].decode(errors="replace"))
        elif self._name in self._form.fields or len(self._form.fields) >= FIELDS_MAX:
            raise refused(self._name[:80], "is there twice, or the form has too many fields")
        self._value = bytearray()

    def _on_data(self, data: bytes, start: int, end: int) -> None:
        if self._in_file:
            self._out.append(data[start:end])
            return
        self._value += data[start:end]
        if len(self._value) > FIELD_BYTES_MAX:
            raise refused(str(self._name)[:80], f"is longer than {FIELD_BYTES_MAX:,} bytes")

    def _on_end(self) -> None:
        if not self._in_file:
            self._form.fields[str(self._name)] = self._value.decode(errors="replace")

    def _on_form_end(self) -> None:
        self._ended = True
