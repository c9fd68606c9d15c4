"""The trainer that every rank runs."""

from muster.trainer.library_warnings import silence_torchao

silence_torchao()
