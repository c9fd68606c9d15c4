"""The decoder and what belongs to its weights: initial values, the output head's loss. It never learns of ranks."""

from muster.trainer.model.decoder import Decoder, build
from muster.trainer.model.init import initialize
from muster.trainer.model.lora import attach

__all__ = ["Decoder", "attach", "build", "initialize"]
