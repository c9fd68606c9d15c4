"""Filters for what libraries log on their import that no user can act on.

transformers imports torchao wherever it is installed, also where nothing is quantised. torchao then logs each of its
libraries that was built for another GPU or Python, and torch deprecations in torchao: four lines at the head of every
job's log, of every reason for a failure that is taken from it, and of `muster chat`, `generate` and `export`.
"""

import logging
from typing import Final

# By the logger, the beginning or a part of the lines that are left out.
_LEFT_OUT: Final = {
    "torchao": ("Failed to load ", "Skipping import of cpp extensions"),
    "torchao.kernel.intmm": ("Detected no triton",),
    "torch.utils._pytree": ("register_constant() on Enum subclasses is deprecated",),
}


def silence_torchao() -> None:
    """Leave out what torchao's import logs. Before the import, which this is not."""
    for name, parts in _LEFT_OUT.items():
        logging.getLogger(name).addFilter(lambda record, parts=parts: not _has(record, parts))  # type: ignore[misc]


def _has(record: logging.LogRecord, parts: tuple[str, ...]) -> bool:
    words = record.getMessage()
    return any(part in words for part in parts)
