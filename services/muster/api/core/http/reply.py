"""The base of every answer's shape."""

from muster.contract.replies import Reply

__all__ = ["Reply"]
