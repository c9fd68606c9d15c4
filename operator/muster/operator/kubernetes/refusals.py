"""A kubelet's words about a container that it can't start: whether the job itself is the reason, or it may pass. Pure.

A kubelet tries for ever and never says that a try is the last, so the words are all there is to tell a mistyped image
from a registry that does not answer. Whatever is not named here counts as passing: a false "may pass" costs a wait,
a false "never passes" would fail a job whose registry was down for a minute.
"""

from __future__ import annotations

import re

BACK_OFF = "ImagePullBackOff"
# Reasons that say it by themselves: the image's name is no name, or the job forbids to pull an image that is not there.
_FINAL = frozenset({"InvalidImageName", "ErrImageNeverPull"})
# A registry says of an image that it is not there, or not for this caller (containerd's and CRI-O's words).
_NO_SUCH_IMAGE = re.compile(
    r"not found|manifest unknown|does not exist|unauthorized|access denied|access to the resource is denied"
    r"|authentication required|no basic auth credentials|insufficient_scope|403 Forbidden",
    re.IGNORECASE,
)
# A name server's answer that there is no host of that name (Go's words for it). One that fails or does not answer is
# called otherwise: server misbehaving, i/o timeout, connection refused.
_NO_SUCH_HOST = re.compile(r"lookup (\S+?)(?: on \S+)?: no such host")
# The same words about the node's own tools and names, not about the image.
_OF_THE_NODE = re.compile(r"executable file not found|host not found|too ?many ?requests", re.IGNORECASE)
# A Secret or ConfigMap, or a key of one, that the job names; a user that the image or the job gets wrong.
_NO_SUCH_CONFIG = re.compile(
    r"not found|couldn't find key|non-existent|runAsNonRoot|non-numeric user|runAsUser", re.IGNORECASE
)
# The same of a volume. "not found" alone is not enough: a kubelet says it of a driver that still starts.
_NO_SUCH_SOURCE = re.compile(r'(secret|configmap) "[^"]*" not found|non-existent (secret|config) key', re.IGNORECASE)
_SAYS_NO_CAUSE = re.compile(r'Back-off pulling image "[^"]*"')  # kubelets before 1.31


def is_refusal(reason: str, message: str) -> bool:
    """Return whether a container with this reason waits until its user changes the job or what it names."""
    if reason in _FINAL:
        return True
    if reason in ("ErrImagePull", BACK_OFF):
        answered = _NO_SUCH_IMAGE.search(message) or _NO_SUCH_HOST.search(message)
        return bool(answered) and not _OF_THE_NODE.search(message)
    if reason == "FailedMount":
        return bool(_NO_SUCH_SOURCE.search(message))
    return reason == "CreateContainerConfigError" and bool(_NO_SUCH_CONFIG.search(message))


def says_no_cause(trouble: str) -> bool:
    """Return whether the kubelet only says that it waits before the next pull, and not why the last one failed."""
    reason, _, message = trouble.partition(": ")
    return reason == BACK_OFF and (not message or bool(_SAYS_NO_CAUSE.fullmatch(message)))


def remedy(trouble: str, image: str | None) -> str:
    """The next step of the job's user. `image` is the one that the job names, if any."""
    if trouble.startswith(("CreateContainerConfigError", "FailedMount")):
        return "create what is missing in the job's namespace, or correct spec.runtime, and submit the job again"
    if image and (host := _NO_SUCH_HOST.search(trouble)):
        return f"the nodes know no registry {host[1]}: correct runtime.image, and submit the job again"
    if image:
        return "correct runtime.image (or the pull secret of its service account), and submit the job again"
    return "the job names no image, so this one is the platform's: ask its administrator (workers.image of the chart)"
