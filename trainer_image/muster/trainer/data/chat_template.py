"""A model's own chat template: Jinja in a sandbox, and which stretches of what it writes are the assistant's.

The assistant's stretches are what the template marks with {% generation %}; where it has no such marks, they are found
by rendering the conversation up to each of its turns. What can't be told for certain is refused, never guessed: a
user's word in the loss, or an assistant's missing from it, would be seen by nobody.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any, Final

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from muster.storage.conversations import Conversation, Turn
from muster.trainer.errors import UserError

# Private-use characters that stand around a stretch of the assistant, and in words that spell a special token.
OPEN, CLOSE, GUARD = "\ue0f0", "\ue0f1", "\ue0f2"
# Templates that write today's date get this one, Llama 3.1's own: the same data must be the same tokens tomorrow.
DATE: Final = datetime.datetime(2024, 7, 26, tzinfo=datetime.UTC)

Span = tuple[int, int]


@dataclass(frozen=True)
class Rendered:
    """What a template wrote: the text, where GUARD keeps apart what only spells a special token, and the stretches of
    it that the loss counts."""

    text: str
    spans: tuple[Span, ...]


@dataclass(frozen=True)
class ChatTemplate:
    """A template and the special tokens that it writes by name (`bos_token`, `eos_token`, …). Where there is one
    `with_tools`, that writes the conversations that have tools, as in transformers."""

    source: str
    tokens: Mapping[str, str] = field(default_factory=dict)
    with_tools: str | None = None

    def describe(self) -> dict[str, Any]:
        """For a commit; without what there is not, so that data prepared before stays what it was."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    @cached_property
    def _plain(self) -> jinja2.Template:
        return self._compiled(self.source)

    @cached_property
    def _of_tools(self) -> jinja2.Template:
        return self._plain if self.with_tools is None else self._compiled(self.with_tools)

    def _compiled(self, source: str) -> jinja2.Template:
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals.update(raise_exception=_refuse, strftime_now=DATE.strftime)
        try:
            return environment.from_string(source)
        except jinja2.TemplateError as error:
            raise UserError(
                f"the chat template is not valid Jinja: {error}; correct it, or give data.chatTemplate"
            ) from None

    def prompt(self, given: Conversation) -> str:
        """What stands before the assistant's next turn. Raises ValueError for what the template refuses."""
        return self._render([turn.message() for turn in given.turns], given.tools, prompt=True)

    def render(self, given: Conversation, special: re.Pattern[str] | None) -> Rendered:
        """`special` finds the tokenizer's special tokens in a text. Raises ValueError for what the template refuses, or
        where its stretches can't be told apart."""
        turns = tuple(_guarded(turn, special) for turn in given.turns)
        marked = self._render([turn.message() for turn in turns], given.tools)
        text = marked.replace(OPEN, "").replace(CLOSE, "")
        if given.whole:
            return Rendered(text, ((0, len(text)),))
        found = (
            _marked_spans(marked, turns)
            if OPEN in marked
            else _Finding(self, turns, given.tools, text, special).spans()
        )
        _must_be_written(given, turns, text, found)
        return Rendered(text, tuple(span for span in found.values() if span[0] < span[1]))

    def _render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], prompt: bool = False
    ) -> str:
        try:
            return self._written(messages, tools, prompt)
        except jinja2.TemplateError as error:
            raise ValueError(f"the chat template refuses it: {error}") from None
        except TypeError:
            pass  # some templates write a call's arguments as they are, and want them as text
        except Exception as error:
            raise ValueError(f"the chat template fails on it: {type(error).__name__}: {error}") from None
        try:
            return self._written([_with_text_arguments(message) for message in messages], tools, prompt)
        except Exception as error:
            raise ValueError(f"the chat template fails on it: {type(error).__name__}: {error}") from None

    def _written(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], prompt: bool) -> str:
        given = {"messages": messages, "tools": list(tools) or None, "documents": None, "add_generation_prompt": prompt}
        return (self._of_tools if tools else self._plain).render(**self.tokens, **given)


class _Generation(jinja2.ext.Extension):
    """{% generation %} … {% endgeneration %}: what the model is to write itself."""

    tags = {"generation"}  # noqa: RUF012  Jinja declares it as a plain set

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

    def _marked(self, caller: Any) -> str:
        return f"{OPEN}{caller()}{CLOSE}"


def _to_json(value: Any, indent: int | None = None, **options: Any) -> str:
    """JSON as it is, where Jinja's own filter would escape it for HTML."""
    return json.dumps(value, ensure_ascii=False, indent=indent, **options)


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


def _with_text_arguments(message: Mapping[str, Any]) -> dict[str, Any]:
    calls = [
        {**call, "function": {**call["function"], "arguments": _to_json(call["function"]["arguments"])}}
        for call in message.get("tool_calls", ())
    ]
    return {**message, **({"tool_calls": calls} if calls else {})}


def _guarded(turn: Turn, special: re.Pattern[str] | None) -> Turn:
    """The turn with a GUARD inside each special token that its words spell, so that they stay words."""
    if special is None:
        return turn
    return turn._replace(
        content=_guard(turn.content, special), more={key: _guard(value, special) for key, value in turn.more.items()}
    )


def _guard(value: Any, special: re.Pattern[str]) -> Any:
    if isinstance(value, str):
        if any(mark in value for mark in (OPEN, CLOSE, GUARD)):
            raise ValueError("holds a private-use character that Muster needs (U+E0F0 to U+E0F2); leave it out")
        return special.sub(lambda found: found[0][0] + GUARD + found[0][1:], value)
    if isinstance(value, Mapping):
        return {key: _guard(inner, special) for key, inner in value.items()}
    return [_guard(inner, special) for inner in value] if isinstance(value, list) else value


def _must_be_written(given: Conversation, turns: Sequence[Turn], text: str, spans: Mapping[int, Span]) -> None:
    """Raises ValueError where the template leaves out what the assistant is to learn. Thoughts are the template's own
    affair: many leave out old ones."""
    advice = "give a template that writes it as data.chatTemplate"
    for tool in given.tools:
        name = str((tool.get("function") or tool).get("name", ""))
        if name and name not in text:
            raise ValueError(f"has the tool {name!r}, which the chat template does not write; {advice}")
    for number, turn in enumerate(turns):
        # Of what is only read, too: a tool's answer that follows would come from nowhere.
        start, end = spans.get(number, (0, len(text)))
        for call in turn.more.get("tool_calls", ()):
            if call["function"]["name"] not in text[start:end]:
                raise ValueError(f"messages[{number}] calls a tool, which the chat template does not write; {advice}")
    for number, (start, end) in spans.items():
        turn, written = turns[number], text[start:end]
        if turn.content.rpartition("</think>")[2].strip() not in written:
            raise ValueError(f"messages[{number}]: the chat template leaves out words of the assistant; {advice}")


def _marked_spans(marked: str, turns: Sequence[Turn]) -> dict[int, Span]:
    spans, at, begun = list[Span](), 0, 0
    for piece in re.split(f"([{OPEN}{CLOSE}])", marked):
        if piece == OPEN:
            begun = at
        elif piece == CLOSE:
            spans.append((begun, at))
        else:
            at += len(piece)
    spoken = [number for number, turn in enumerate(turns) if turn.role == "assistant"]
    if len(spans) != len(spoken):
        raise ValueError(
            f"has {len(spoken)} assistant turns, but the chat template marks {len(spans)} with {{% generation %}}; "
            "correct the template, or give data.chatTemplate"
        )
    return {number: span for number, span in zip(spoken, spans, strict=True) if turns[number].loss_mask}


def _common(one: str, other: str) -> str:
    """What both begin with."""
    places = (at for at, (left, right) in enumerate(zip(one, other, strict=False)) if left != right)
    return one[: next(places, min(len(one), len(other)))]


@dataclass(frozen=True)
class _Finding:
    """The search for the assistant's stretches in what a template without marks wrote."""

    template: ChatTemplate
    turns: Sequence[Turn]
    tools: Sequence[Mapping[str, Any]]
    text: str
    special: re.Pattern[str] | None

    def spans(self) -> dict[int, Span]:
        """By the number of the turn."""
        found, before = dict[int, Span](), 0
        for number, turn in enumerate(self.turns):
            if turn.loss_mask:
                start = self._start(number)
                if start < before:
                    raise self._ambiguous(number)
                before = self._end(number, start)
                found[number] = (start, before)
        return found

    def _upto(self, number: int, prompt: bool = False, also: Sequence[Turn] = ()) -> str:
        messages = [turn.message() for turn in (*self.turns[:number], *also)]
        try:
            return self.template._render(messages, self.tools, prompt)
        except ValueError as error:
            raise ValueError(f"{self._ambiguous(number)}: {error}") from None

    def _start(self, number: int) -> int:
        """Where the prompt for this turn ends. A prompt may begin the turn itself (`<think>`), which what was said need
        not go on with: of that, only what stands before any answer counts."""
        prompt = self._upto(number, prompt=True)
        if self.text.startswith(prompt):
            return len(prompt)
        before = self._upto(number)
        for later in (self.turns[number + 1 :], ()):
            other = self._upto(number, also=(Turn("assistant", GUARD, True), *later))
            common = _common(prompt, other)
            if len(common) >= len(before) and self.text.startswith(common):
                return len(common)
        raise self._ambiguous(number)

    def _end(self, number: int, start: int) -> int:
        """Behind the special token that ends the turn; what templates write behind it (a line end, the end of the text)
        is not learnt."""
        upto = self._upto(number + 1)
        closings = list(self.special.finditer(upto, start)) if self.special else []
        trailing = [found for found in closings if not self._has_text(upto[found.end() :])]
        for end in (*(found.end() for found in reversed(trailing)), *([] if trailing else [len(upto)])):
            if self.text.startswith(upto[:end]):
                return end
        # The template writes a turn otherwise when others follow it (Qwen 3 leaves out old thoughts).
        if len(closings) != 1 or not trailing or (at := self.text.find(closings[0][0], start)) < 0:
            raise self._ambiguous(number)
        return at + len(closings[0][0])

    def _has_text(self, text: str) -> bool:
        """Whether there is anything but special tokens and space."""
        return bool((self.special.sub("", text) if self.special else text).strip())

    def _ambiguous(self, number: int) -> ValueError:
        return ValueError(
            f"messages[{number}] can't be found for certain in what the chat template writes; mark the assistant's "
            "words in it with {% generation %} and give it as data.chatTemplate, or set trainOn: last"
        )
