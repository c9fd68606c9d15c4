"""Progress of training and its restoration, from the state that a commit keeps in addition to weights, optimizer and
generators."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from muster.storage.errors import StoreError
from muster.storage.listing import steps_in
from muster.storage.opening import open_store
from muster.trainer.checkpoint.quarantine import quarantine
from muster.trainer.data.loader import advanced
from muster.trainer.train.step import StepOutcome
from muster.trainer.train.trials import TrainingTrial
from muster.words.checkpoint import Commit, DataCursor
from muster.words.status import DataSkip
from muster.words.text import plural


@dataclass
class JobProgress:
    """Progress of the job."""

    steps: int  # of the whole job
    cursor: DataCursor  # where the next sample stands
    step: int = 0  # the last one that is done
    tokens: int = 0  # that were trained on so far
    # The stretches of the data's order that were left out, as {epoch, sample, samples}.
    skipped_data: list[dict[str, int]] = field(default_factory=list)
    skipped_now: bool = False  # whether this attempt left one out
    trial: TrainingTrial | None = None  # what the run is made to find out; None where it is made to learn

    @property
    def over(self) -> bool:
        """Return whether there is no further step."""
        return self.step >= self.steps or (self.trial is not None and self.trial.over)

    @property
    def passed_over(self) -> int:
        """Number of samples that were left out after attempts that ended with a numeric failure."""
        return sum(each["samples"] for each in self.skipped_data)

    def last_line(self, skipped_samples: int, early: str = "") -> str:
        """Return the log's last line. Samples of skipped steps and data that was passed over have taught nothing."""
        skipped = skipped_samples + self.passed_over
        not_learnt = f"; {plural(skipped, 'sample')} skipped, not learnt from" if skipped else ""
        return f"done after step {self.step}{early}{not_learnt}"

    def advance(self, outcome: StepOutcome) -> None:
        """Count a step that is done."""
        self.step, self.cursor = outcome.number, outcome.cursor
        self.tokens += outcome.tokens
        if self.trial is not None:
            self.trial.saw(outcome)

    def restore(self, commit: Commit) -> None:
        """Restore the progress that the commit holds."""
        self.step, self.tokens, self.cursor = commit.step, commit.tokens, commit.cursor
        self.skipped_data = list(commit.state.get("passedOver", ()))
        if self.trial is not None:
            self.trial.restore(commit.state.get("trial", {}))

    def state(self) -> dict[str, Any]:
        """Return the state that `restore` reads in addition to the commit's own fields, as JSON."""
        tried = {} if self.trial is None else {"trial": self.trial.state()}
        return {"passedOver": self.skipped_data, "steps": self.steps, **tried}

    def skip_data(self, skip: DataSkip | None, samples_per_step: int, samples_per_epoch: int) -> bool:
        """Leave out the data that the last attempt could not learn from, if we stand before it; whether we did."""
        if skip is None or skip.after_step != self.step:
            return False
        samples = skip.steps * samples_per_step
        self.skipped_data.append({"epoch": self.cursor.epoch, "sample": self.cursor.sample, "samples": samples})
        self.cursor = advanced(self.cursor, samples, samples_per_epoch)
        self.skipped_now = True
        return True


def set_aside_commit(folder: str, step: int, reason: str, say: Callable[[str], None]) -> bool:
    """Quarantine a commit though its bytes are good, if it is there and one is before it. Whether that was done."""
    try:
        store = open_store(folder)
        steps = steps_in(store)
        if step not in steps[1:]:
            return False
        quarantine(store, step, reason, damaged=False)
    except StoreError as error:
        say(f"the checkpoint of step {step} can't be set aside: {error}")
        return False
    return True
