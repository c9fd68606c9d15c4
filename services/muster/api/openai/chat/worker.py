"""One process that holds one model and answers one request at a time: the trainer's tool, so that the API needs no
torch (trainer/convert/respond.py)."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import tempfile
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import IO, Any, Final

from muster.api.core.errors import ApiError
from muster.api.openai.requests import refused

MODULE: Final = "muster.trainer.convert.respond"
LINE_BYTES_MAX: Final = 64 << 20  # log-probabilities of a long text
# Torch takes some ten seconds to import, and a large model minutes to read.
START_SECONDS_MAX: Final = 300.0
ANSWER_SECONDS_MAX: Final = 600.0  # OpenAI's clients wait no longer for an answer
_SETTLE_SECONDS: Final = 30.0  # for a worker to stop writing what nobody reads any more
_END_SECONDS: Final = 2.0


@dataclass(frozen=True)
class ModelPlace:
    """Location of the model that a worker loads: a job's checkpoint folder and a step, or a model's folder."""

    address: str
    step: str
    of_job: bool = False  # whatever else the job may have put there


class ModelWorker:
    """A process of its own. `turn` is held by whoever asks it; `used_at` is the loop's time of the last answer."""

    def __init__(self, place: ModelPlace, process: asyncio.subprocess.Process, errors: IO[bytes], now: float) -> None:
        self.place, self.used_at = place, now
        self.turn = asyncio.Lock()
        self.waiting = 0
        self._process, self._errors = process, errors
        self._answering = False

    @property
    def alive(self) -> bool:
        return self._process.returncode is None

    @classmethod
    async def start(cls, place: ModelPlace) -> ModelWorker:
        """Raises ApiError model_unavailable with what the process said."""
        errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the worker
        # Our own settings (the database's password among them) are not the model's business.
        environment = {key: value for key, value in os.environ.items() if not key.startswith("MUSTER_")}
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", MODULE, "--checkpoint", place.address, "--step", place.step),
            *(["--of-job"] if place.of_job else []),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=errors,
            env=environment,
            limit=LINE_BYTES_MAX,
        )
        worker = cls(place, process, errors, asyncio.get_running_loop().time())
        try:
            async with asyncio.timeout(START_SECONDS_MAX):
                line = await worker._line()
        except TimeoutError:
            await worker.end()
            raise ApiError("model_unavailable", f"The model was not loaded within {START_SECONDS_MAX:g} s.") from None
        except BaseException:
            await worker.end()
            raise
        if "ready" not in line:
            await worker.end()
            raise ApiError("model_unavailable", f"The model can't be asked: {line.get('error', 'it did not start')}")
        return worker

    async def ask(self, request: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """The lines of an answer; the last has `done`. Whoever does not read to the end leaves a worker that is told
        to stop. Raises ApiError invalid_request for what the model refuses, model_unavailable when it ends."""
        await self._settle()
        self._write(request)
        self._answering = True
        deadline = asyncio.get_running_loop().time() + ANSWER_SECONDS_MAX
        try:
            while self._answering:
                try:
                    # Around each line by itself: whoever reads may do so from one task after another.
                    async with asyncio.timeout_at(deadline):
                        line = await self._line()
                except TimeoutError:
                    words = f"The answer took longer than {ANSWER_SECONDS_MAX:g} s; ask for fewer tokens."
                    raise ApiError("model_unavailable", words) from None
                self._answering = not ("done" in line or "error" in line)
                if "error" in line:
                    raise _refusal(request, line)
                yield line
        finally:
            self.used_at = asyncio.get_running_loop().time()
            if self._answering and self.alive:
                self._write({"cancel": True})

    async def end(self) -> None:
        """End the process, by force where it does not end by itself."""
        if self.alive:
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()
            try:
                async with asyncio.timeout(_END_SECONDS):
                    await self._process.wait()
            except TimeoutError:
                with contextlib.suppress(ProcessLookupError):
                    self._process.kill()
                await self._process.wait()
        self._errors.close()

    async def _settle(self) -> None:
        """Read what is left of an answer that nobody waits for. Raises ApiError model_unavailable."""
        try:
            async with asyncio.timeout(_SETTLE_SECONDS):
                while self._answering:
                    line = await self._line()
                    self._answering = not ("done" in line or "error" in line)
        except TimeoutError:
            await self.end()
            raise ApiError("model_unavailable", "The model did not leave its last answer; ask again.") from None

    def _write(self, line: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(line).encode() + b"\n")

    async def _line(self) -> dict[str, Any]:
        """Raises ApiError model_unavailable where the process has ended."""
        assert self._process.stdout is not None
        text = await self._process.stdout.readline()
        if not text:
            await self._process.wait()
            raise ApiError("model_unavailable", f"The model's process ended: {self._log_end()}")
        message: dict[str, Any] = json.loads(text)
        return message

    def _log_end(self) -> str:
        """The end of its standard error, or its exit code."""
        code = self._process.returncode
        with contextlib.suppress(OSError, ValueError):
            self._errors.seek(max(0, self._errors.seek(0, os.SEEK_END) - 2_000))
            lines = self._errors.read().decode(errors="replace").strip().splitlines()
            if lines:
                return lines[-1][:500]
        return "it was killed, as when memory runs out" if code == -9 else f"exit code {code}"


def _refusal(request: dict[str, Any], line: dict[str, Any]) -> ApiError:
    if line.get("of") == "request":
        return refused("messages" if "messages" in request else "prompt", str(line["error"]))
    return ApiError("model_unavailable", str(line["error"]))
