"""Says that programs of a model were stopped at their limit of time or memory: else all one sees are scores of 0."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final

from muster.recipe.verifiers import OUT_OF_MEMORY, OUT_OF_TIME, UnitTests

SHOWN_CHARACTERS: Final = 120  # of the program that is the example


class LimitWarnings:
    """Warnings of one verifier on one rank about programs that reach a limit. Each limit is reported at the first
    program, and again whenever their number has doubled: a model that always writes such programs would otherwise fill
    the log."""

    def __init__(self, called: str, config: UnitTests, say: Callable[[str], None] | None) -> None:
        self._called, self._say = called, say
        self._run, self._stopped = 0, Counter[str]()
        self._limits = {
            OUT_OF_TIME: (f"timeoutSeconds {config.timeout_seconds:g}", "timeoutSeconds"),
            OUT_OF_MEMORY: (f"memoryMegabytes {config.memory_megabytes}", "memoryMegabytes"),
        }

    def note(self, ended: Sequence[tuple[str, str | None]]) -> None:
        """Note each program that was run, by its text, and the limit that stopped it."""
        self._run += len(ended)
        for limit, (words, setting) in self._limits.items():
            stopped = [text for text, reached in ended if reached == limit]
            before = self._stopped[limit]
            self._stopped[limit] += len(stopped)
            if stopped and self._say and self._stopped[limit].bit_length() > before.bit_length():
                self._say(
                    f"verifier {self._called}: warning: {self._stopped[limit]} of the {self._run} programs that this "
                    f"rank ran were stopped at {words} ({len(stopped)} of the last {len(ended)}), and score 0; one of "
                    f"them: {_excerpt(stopped[0])}. That is right for a program that never ends or takes all memory; "
                    f"where good answers need more, raise {setting}. Metric {self._called}/{limit} has the share"
                )


def _excerpt(program: str) -> str:
    return repr(program if len(program) <= SHOWN_CHARACTERS else program[:SHOWN_CHARACTERS] + "…")
