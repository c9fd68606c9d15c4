"""`/v1/chat/completions` and `/v1/completions`: whole, or as a stream that OpenAI's clients read."""

from __future__ import annotations

import contextlib
import json
import time
import uuid
from collections.abc import AsyncGenerator
from typing import Any, Final

from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel

from muster.api.core.callers import Caller, Scope, needs
from muster.api.core.errors import ApiError, problem_body
from muster.api.core.http import sse
from muster.api.core.http.body import parsed, read_body
from muster.api.core.http.openapi import AT, UID, body, example_reply, problems
from muster.api.core.services import ServicesDependency
from muster.api.openai.chat import service
from muster.api.openai.chat.requests import ChatRequest, CompletionRequest
from muster.api.openai.requests import refused

router = APIRouter(tags=["openai"])
reads = Depends(needs(Scope.READ))
# Said with every answer: whoever builds on this by mistake finds it in the first reply that they look at.
NOTICE: Final = {"X-Muster-Notice": "for trying out and evaluation, not for serving; see `muster serve`"}


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class AssistantMessage(BaseModel):
    role: str
    content: str
    refusal: None


class ChatChoice(BaseModel):
    index: int
    message: AssistantMessage
    finish_reason: str
    logprobs: None


class ChatCompletion(BaseModel):
    """An answer."""

    id: str
    object: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class Logprobs(BaseModel):
    """Log probabilities of each token; there is none for the very first token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(BaseModel):
    index: int
    text: str
    finish_reason: str
    logprobs: Logprobs | None


class Completion(BaseModel):
    """Completions of the prompts, in the order of the prompts."""

    id: str
    object: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


_TUNED = f"ft:llama-3.1-8b:default:support:{UID}"
_USAGE = {"prompt_tokens": 18, "completion_tokens": 9, "total_tokens": 27}
_MESSAGE = {"role": "assistant", "content": "Workers that run together.", "refusal": None}
_CHAT: dict[str, Any] = {
    "id": "chatcmpl-8c0a4c3c9f3b4d0f",
    "object": "chat.completion",
    "created": int(AT),
    "model": _TUNED,
    "choices": [{"index": 0, "message": _MESSAGE, "finish_reason": "stop", "logprobs": None}],
    "usage": _USAGE,
}
_COMPLETION: dict[str, Any] = {
    **_CHAT,
    "id": "cmpl-8c0a4c3c9f3b4d0f",
    "object": "text_completion",
    "choices": [{"index": 0, "text": " run together.", "finish_reason": "length", "logprobs": None}],
}
_REFUSED = (
    "invalid_document",
    "invalid_request",
    "model_not_found",
    "model_busy",
    "model_unavailable",
    "storage_unavailable",
    "body_too_large",
    "unsupported_media_type",
)
_FRAME = {"type": "object", "description": "Server-sent events; the data of each is a chunk in JSON, the last [DONE]."}
_STREAM = {"text/event-stream": {"schema": _FRAME, "example": 'data: {"choices": […]}\n\ndata: [DONE]\n\n'}}


def _streamed(reply: dict[str, Any]) -> dict[str, Any]:
    notice = {"X-Muster-Notice": {"schema": {"type": "string"}, "description": "That this is not for serving."}}
    return {**reply, "content": {**reply["content"], **_STREAM}, "headers": notice}


@router.post(
    "/chat/completions",
    response_model=ChatCompletion,
    dependencies=[reads],
    summary="Ask a fine-tuned model",
    operation_id="make_chat_completion",
    responses={200: _streamed(example_reply(_CHAT, "The answer")), **problems(*_REFUSED)},
    openapi_extra=body(
        ChatRequest, {"model": _TUNED, "messages": [{"role": "user", "content": "What is a gang?"}], "seed": 1}
    ),
)
async def make_chat_completion(request: Request, services: ServicesDependency, caller: Caller) -> Response:
    """Generates a checkpoint's reply to a conversation. It runs on this server's CPU, one request at a time: use it to
    try out and evaluate a model, not to serve it. `model` is the model of a fine-tuning job or of one of its
    checkpoints, a mapped model, or `job:<id>` for any job of this server."""
    check = parsed(ChatRequest, "invalid_request", "The request is not valid")
    chat = await read_body(request, check)
    place = await service.place_of(services, caller, chat.model)
    about = _about("chatcmpl", "chat.completion", chat.model)
    if chat.stream:
        lines = await service.begun(services, place, chat.question())
        usage = bool(chat.stream_options and chat.stream_options.include_usage)
        return _stream(request, services.settings.stream_ping_seconds, _chat_chunks(lines, about, usage))
    generation = await service.whole(services, place, chat.question())
    message = {"role": "assistant", "content": generation.text, "refusal": None}
    choice = {"index": 0, "message": message, "finish_reason": generation.done["finish_reason"], "logprobs": None}
    return JSONResponse({**about, "choices": [choice], "usage": _usage(generation)}, headers=NOTICE)


@router.post(
    "/completions",
    response_model=Completion,
    dependencies=[reads],
    summary="Let a fine-tuned model continue texts",
    operation_id="make_completion",
    responses={200: _streamed(example_reply(_COMPLETION, "The texts")), **problems(*_REFUSED)},
    openapi_extra=body(CompletionRequest, {"model": _TUNED, "prompt": "Workers that", "max_tokens": 16}),
)
async def make_completion(request: Request, services: ServicesDependency, caller: Caller) -> Response:
    """Generates a continuation of a prompt, in the same way as chat completions do for a conversation. `echo` with
    `logprobs` scores a prompt, as evaluation harnesses do."""
    check = parsed(CompletionRequest, "invalid_request", "The request is not valid")
    completion = await read_body(request, check)
    questions = completion.questions()
    if completion.stream and (len(questions) > 1 or completion.logprobs is not None):
        raise refused("stream", "streams one prompt, without logprobs; leave stream out")
    place = await service.place_of(services, caller, completion.model)
    about = _about("cmpl", "text_completion", completion.model)
    if completion.stream:
        lines = await service.begun(services, place, questions[0])
        usage = bool(completion.stream_options and completion.stream_options.include_usage)
        return _stream(request, services.settings.stream_ping_seconds, _text_chunks(lines, about, usage))
    generations = [await service.whole(services, place, question) for question in questions]
    choices = [
        {
            "index": number,
            "text": each.text,
            "finish_reason": each.done["finish_reason"],
            "logprobs": each.done.get("logprobs"),
        }
        for number, each in enumerate(generations)
    ]
    return JSONResponse({**about, "choices": choices, "usage": _usage(*generations)}, headers=NOTICE)


def _about(prefix: str, kind: str, model: str) -> dict[str, Any]:
    return {"id": f"{prefix}-{uuid.uuid4().hex}", "object": kind, "created": int(time.time()), "model": model}


def _usage(*generations: service.ModelGeneration) -> dict[str, int]:
    prompt, answer = (sum(each.done[key] for each in generations) for key in ("prompt_tokens", "completion_tokens"))
    return {"prompt_tokens": prompt, "completion_tokens": answer, "total_tokens": prompt + answer}


def _stream(request: Request, ping_seconds: float, chunks: AsyncGenerator[dict[str, Any], None]) -> Response:
    reply = sse.stream(_frames(request, chunks), ping_seconds)
    reply.headers.update(NOTICE)
    return reply


async def _frames(request: Request, chunks: AsyncGenerator[dict[str, Any], None]) -> AsyncGenerator[str, None]:
    """An error in the middle is sent as OpenAI's clients read it, and ends the stream without [DONE]."""
    async with contextlib.aclosing(chunks):
        try:
            async for chunk in chunks:
                yield _frame(chunk)
        except ApiError as error:
            problem = problem_body(error, request.url.path, str(request.scope.get("request_id", "")))
            yield _frame({"error": problem["error"]})
            return
    yield "data: [DONE]\n\n"


def _frame(chunk: dict[str, Any]) -> str:
    return f"data: {json.dumps(chunk, separators=(',', ':'), ensure_ascii=False)}\n\n"


async def _chat_chunks(
    lines: AsyncGenerator[dict[str, Any], None], about: dict[str, Any], usage: bool
) -> AsyncGenerator[dict[str, Any], None]:
    about = {**about, "object": "chat.completion.chunk"}

    def chunk(delta: dict[str, Any], reason: str | None) -> dict[str, Any]:
        return {**about, "choices": [{"index": 0, "delta": delta, "finish_reason": reason, "logprobs": None}]}

    async with contextlib.aclosing(lines):
        yield chunk({"role": "assistant", "content": ""}, None)
        async for line in lines:
            if "text" in line:
                yield chunk({"content": line["text"]}, None)
            else:
                yield chunk({}, line["done"]["finish_reason"])
                if usage:
                    yield {**about, "choices": [], "usage": _usage(service.ModelGeneration(done=line["done"]))}


async def _text_chunks(
    lines: AsyncGenerator[dict[str, Any], None], about: dict[str, Any], usage: bool
) -> AsyncGenerator[dict[str, Any], None]:
    async with contextlib.aclosing(lines):
        async for line in lines:
            done = line.get("done", {})
            choice = {
                "index": 0,
                "text": line.get("text", ""),
                "finish_reason": done.get("finish_reason"),
                "logprobs": None,
            }
            yield {**about, "choices": [choice]}
            if done and usage:
                yield {**about, "choices": [], "usage": _usage(service.ModelGeneration(done=done))}
