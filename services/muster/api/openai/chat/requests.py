"""Request bodies of completions: the part of OpenAI's bodies that a checkpoint can answer. Any other field is refused
by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from muster.api.openai.requests import OpenAIRequest

TOKENS_MAX = 4_096
PROMPTS_MAX = 64
TEXT_MAX = 1_000_000  # characters
TOKEN_IDS = 2**31
CHAT_TOKENS, COMPLETION_TOKENS = 512, 16  # the latter is OpenAI's


def _texts(value: Any) -> Any:
    """OpenAI's content in parts, as one text; what is no text is left for the check that follows."""
    if isinstance(value, list) and all(isinstance(part, Mapping) and part.get("type") == "text" for part in value):
        return "".join(str(part.get("text", "")) for part in value)
    if isinstance(value, list):
        raise ValueError("has parts that are no text (images, audio, files); only text is understood")
    return value


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


Stops = Annotated[list[Annotated[str, Field(min_length=1, max_length=1_000)]], Field(max_length=16)]


class Message(OpenAIRequest):
    """A turn of a conversation. A `developer` is the system."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[
        str, BeforeValidator(_texts, json_schema_input_type=str | list[dict[str, Any]]), Field(max_length=TEXT_MAX)
    ]
    name: Annotated[str, Field(max_length=64, description="Not told to the model.")] | None = None
    refusal: None = None


class StreamOptions(OpenAIRequest):
    include_usage: bool = False
    include_obfuscation: bool = False


class _GenerationRequest(OpenAIRequest):
    """Fields that both kinds of request share. Fields with a single permitted value exist because clients send them."""

    model: Annotated[str, Field(min_length=1, max_length=500)]
    max_tokens: Annotated[int, Field(ge=1, le=TOKENS_MAX)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: Annotated[Stops | None, BeforeValidator(_listed, json_schema_input_type=str | list[str] | None)] = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Literal[1] | None = None
    presence_penalty: Literal[0] | None = None
    frequency_penalty: Literal[0] | None = None
    user: Annotated[str, Field(max_length=512)] | None = None

    def sampling(self, tokens: int) -> dict[str, Any]:
        """Return the sampling options for the worker. OpenAI's defaults draw from all tokens at temperature 1. The same
        seed gives the same text; without one, the seed is 0."""
        return {
            "max_tokens": tokens,
            "temperature": 1.0 if self.temperature is None else float(self.temperature),
            "top_p": 1.0 if self.top_p is None else float(self.top_p),
            "seed": 0 if self.seed is None else self.seed % 2**63,
            "stop": self.stop or [],
        }


class ChatRequest(_GenerationRequest):
    """A conversation to answer."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=1_000)]
    max_completion_tokens: Annotated[int, Field(ge=1, le=TOKENS_MAX)] | None = None
    logprobs: Literal[False] | None = None
    store: Literal[False] | None = None

    def question(self) -> dict[str, Any]:
        messages = [
            {"role": "system" if each.role == "developer" else each.role, "content": each.content}
            for each in self.messages
        ]
        return {"messages": messages, **self.sampling(self.max_completion_tokens or self.max_tokens or CHAT_TOKENS)}


def _is_prompt(value: Any) -> bool:
    if isinstance(value, str):
        return len(value) <= TEXT_MAX
    return isinstance(value, list) and 0 < len(value) <= TEXT_MAX and all(map(_is_token, value))


def _is_token(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < TOKEN_IDS


def _prompts(value: Any) -> Any:
    """Check the prompts here, because an error of the union below would also name one of its types alongside the
    field."""
    many = isinstance(value, list) and 0 < len(value) <= PROMPTS_MAX and all(map(_is_prompt, value))
    if many or _is_prompt(value):
        return value
    ids = f"a list of ids of tokens (0 to {TOKEN_IDS - 1})"
    raise ValueError(
        f"must be text of at most {TEXT_MAX:,} characters, {ids}, or a list of 1 to {PROMPTS_MAX} of these"
    )


Text = Annotated[str, Field(max_length=TEXT_MAX)]
Ids = Annotated[list[Annotated[int, Field(ge=0, lt=TOKEN_IDS)]], Field(min_length=1, max_length=TEXT_MAX)]


class CompletionRequest(_GenerationRequest):
    """Texts to continue, as text or as ids of tokens."""

    prompt: Annotated[
        Text | Ids | Annotated[list[Text | Ids], Field(min_length=1, max_length=PROMPTS_MAX)], BeforeValidator(_prompts)
    ] = ""
    max_tokens: Annotated[int, Field(ge=0, le=TOKENS_MAX)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool | None = None
    best_of: Literal[1] | None = None

    def questions(self) -> list[dict[str, Any]]:
        """Return one question per prompt."""
        prompts = [self.prompt] if isinstance(self.prompt, str) or _is_ids(self.prompt) else self.prompt
        tokens = COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens
        more = {**self.sampling(tokens), "echo": bool(self.echo), "logprobs": self.logprobs}
        return [{"prompt": prompt, **more} for prompt in prompts]


def _is_ids(prompt: Any) -> bool:
    return bool(prompt) and isinstance(prompt[0], int)
