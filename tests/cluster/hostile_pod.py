"""What the code of a job tries from within its pod, with all that it has there; prints what came of each by its name.

Run there by `python -c`, with the address of the platform's API: standard library only.
"""

import json
import os
import ssl
import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

FENCE = os.environ["MUSTER_FENCE"]  # its own TrainingJob at the API server
SERVER = "{0.scheme}://{0.netloc}".format(urlsplit(FENCE))
TEAM = f"{SERVER}/api/v1/namespaces/team"
API = f"http://{sys.argv[1]}/api/v1"
POD = {"metadata": {"name": "mine"}, "spec": {"containers": [{"name": "it", "image": "x"}]}}


def ask(url: str, body: object = None, signed: bool = True) -> int:
    """The status of the answer. `signed`: with the token that lies in the pod."""
    trusted = ssl.create_default_context(cafile=os.environ["MUSTER_FENCE_CA_FILE"])
    trusted.verify_flags &= ~ssl.VERIFY_X509_STRICT  # as Muster's own clients do it
    request = urllib.request.Request(url, json.dumps(body).encode() if body else None)
    request.add_header("Content-Type", "application/json")
    if signed:
        token = Path(os.environ["MUSTER_FENCE_TOKEN_FILE"]).read_text().strip()
        request.add_header("Authorization", f"Bearer {token}")
    try:
        return int(urllib.request.urlopen(request, timeout=20, context=trusted).status)
    except urllib.error.HTTPError as error:
        return error.code


def tried(attempt: Callable[[], object]) -> str:
    try:
        attempt()
    except OSError as error:
        return type(error).__name__
    return "done"


found = {
    "its own job": ask(FENCE),
    "another job in its place": ask(FENCE.rpartition("/")[0], {"metadata": {"name": "planted"}}),
    "secrets": ask(f"{TEAM}/secrets"),
    "secrets of the platform": ask(f"{SERVER}/api/v1/namespaces/muster-system/secrets"),
    "pods": ask(f"{TEAM}/pods"),
    "a pod": ask(f"{TEAM}/pods", POD),
    "jobs of another namespace": ask(f"{SERVER}/apis/muster.dev/v1alpha1/namespaces/muster-system/trainingjobs"),
    "nodes": ask(f"{SERVER}/api/v1/nodes"),
    "the platform's jobs": ask(f"{API}/jobs", signed=False),
    "the platform's jobs by its own token": ask(f"{API}/jobs"),
    "its root": tried(lambda: Path("/opt/planted").write_text("x")),
    "its user's folder of the image": tried(lambda: Path("/muster/planted").write_text("x")),
    "temporary files": tried(lambda: Path("/tmp/own").write_text("x")),  # its one folder outside of /muster
    "its interpreter": tried(lambda: Path(os.__file__).write_text("x")),
    "pods of its node": tried(lambda: os.listdir("/var/lib/kubelet/pods")),
    "containers of its node": tried(lambda: os.listdir("/run/containerd")),
    "root's rights": tried(lambda: os.setuid(0)),
    "what the platform is told": [name for name in os.environ if name.startswith(("MUSTER_API_", "MUSTER_OPERATOR_"))],
}
print(json.dumps(found))
