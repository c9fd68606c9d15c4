"""Samples that the model writes at each evaluation, for people to read. They are kept in the job's checkpoint
folder."""

from __future__ import annotations

import threading
import time

import torch
from torch import Tensor, nn

from muster.storage.opening import open_store
from muster.trainer.config import RankPosition, WorkerRun
from muster.trainer.data import Tokenizer, chat_prompt
from muster.trainer.data.answers import ends_of_turn
from muster.trainer.errors import StorageError, UserError
from muster.trainer.models.definition import ModelDefinition
from muster.trainer.parallel.groups import groups
from muster.trainer.train.records import say
from muster.trainer.train.writing import TokenWriter
from muster.words.samples import Sample, Samples, samples_key

WRITE_SECONDS_MAX = 30.0  # that the end of a job waits for its last samples


class SampleMaker:
    """Lets the model answer the prompts of evaluation.generate, always by its likeliest tokens: nothing is drawn, so
    training goes on as if nobody had asked.

    Every rank makes every pass, for a sharded model needs all of them, and takes the tokens that the first rank chose,
    so that all make equally many. `module` is the model without DDP's wrapper.
    """

    def __init__(
        self,
        run: WorkerRun,
        ranks: RankPosition,
        definition: ModelDefinition,
        module: nn.Module,
        tokenizer: Tokenizer,
        device: torch.device,
    ) -> None:
        assert run.training.evaluation is not None
        assert run.training.evaluation.generate is not None, "there is something to be asked"
        self._run, self._ranks = run, ranks
        self._module, self._tokenizer = module, tokenizer
        self._config = run.training.evaluation.generate
        answers = run.training.task != "pretrain" and bool(tokenizer.template or tokenizer.chat)
        ends = ends_of_turn(tokenizer) if answers else frozenset({tokenizer.eos})
        self._writer = TokenWriter(module, definition, tokenizer, ends, device)
        self._prompts = [_ids(prompt, tokenizer, answers) for prompt in self._config.prompts]
        self._writing: threading.Thread | None = None

    def make(self, step: int) -> tuple[Sample, ...]:
        """Let the model write, and keep it as the samples of `step`. Collective."""
        self._module.eval()
        answers = self._writer.write(self._prompts, self._config.max_tokens, self._agreed)
        self._module.train()
        samples = tuple(
            Sample(prompt=prompt, text=self._tokenizer.decode(row.tokens), finished=row.finished)
            for prompt, row in zip(self._config.prompts, answers, strict=True)
        )
        if self._ranks.speaks:
            self._keep(Samples(step=step, attempt=self._run.attempt, at=time.time(), samples=samples))
        return samples

    def close(self) -> None:
        """Wait for what is not written yet, for a while."""
        if self._writing is not None:
            self._writing.join(WRITE_SECONDS_MAX)

    def _agreed(self, logits: Tensor, first: int, turn: int) -> list[int]:
        chosen = groups().all.broadcast(logits.argmax(dim=-1))
        return [int(token) for token in chosen.tolist()]

    def _keep(self, samples: Samples) -> None:
        """Write them from a thread of its own: a slow store does not hold up the training."""
        self.close()
        self._writing = threading.Thread(target=_write, args=(self._run.folder, samples), name="samples", daemon=True)
        self._writing.start()


def _ids(prompt: str, tokenizer: Tokenizer, answers: bool) -> list[int]:
    if not answers:
        return [*tokenizer.bos, *tokenizer.encode(prompt)]
    try:
        return chat_prompt(tokenizer, [{"role": "user", "content": prompt}])
    except UserError as error:
        raise UserError(f"evaluation.generate.prompts: {prompt[:60]!r}: {error}") from None


def _write(folder: str, samples: Samples) -> None:
    document = samples.model_dump_json(by_alias=True, indent=1)
    try:
        open_store(folder).replace(samples_key(samples.step), document.encode())
    except StorageError as error:
        say(f"evaluation: warning: the samples of step {samples.step} could not be kept: {error}")
