"""Arguments of the trainer's tools: what is wrong with them is an error like any other, in words or in JSON."""

from __future__ import annotations

import argparse
from typing import NoReturn

from muster.trainer.errors import UserError


class ArgumentParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; see {self.prog} --help")
