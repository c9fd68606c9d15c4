"""The base of every answer's shape."""

from muster.replies.jobs import Reply

__all__ = ["Reply"]
