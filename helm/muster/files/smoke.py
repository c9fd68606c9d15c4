"""`helm test`: the definition is served and judges, an operator leads, the API is ready. Standard library only."""

import json
import os
import ssl
import sys
import time
import urllib.error
import urllib.request
from datetime import UTC, datetime

ACCOUNT = os.environ.get("ACCOUNT_FOLDER", "/var/run/secrets/kubernetes.io/serviceaccount")
SERVER = f"https://{os.environ['KUBERNETES_SERVICE_HOST']}:{os.environ['KUBERNETES_SERVICE_PORT']}"
PATIENCE_SECONDS = 120
LEASE_SECONDS = 60  # several times what a leader may be silent


def read(name):
    with open(f"{ACCOUNT}/{name}") as file:
        return file.read().strip()


def ask(path, body=None):
    """(status, document) of the API server's answer."""
    headers = {"Authorization": f"Bearer {read('token')}", "Content-Type": "application/json"}
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(SERVER + path, data, headers)  # noqa: S310 - https, from our own environment
    try:
        with urllib.request.urlopen(request, timeout=10, context=TLS) as reply:  # noqa: S310
            return reply.status, json.load(reply)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def job(length):
    return {
        "apiVersion": "muster.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": "smoke"},
        "spec": {
            "training": {
                "model": {"preset": "muster-1m"},
                "data": {"train": [{"source": "builtin://python-stdlib"}]},
                "batch": {"tokensPerStep": 1024},
                "length": length,
            },
            "gang": {"nodes": 1},
        },
    }


def definition_is_served():
    path = f"/apis/muster.dev/v1alpha1/namespaces/{os.environ['JOBS_NAMESPACE']}/trainingjobs?dryRun=All"
    status, document = ask(path, job({"steps": 1}))
    # A namespace that its project's limits close was judged all the same.
    assert status == 201 or "'project-limits.muster.dev'" in str(document.get("message")), (
        f"a good job was refused with {status}: {document.get('message')}"
    )
    status, document = ask(path, job({"steps": 1, "epochs": 1}))
    assert status == 422, f"a job with two lengths got {status}, and should have been refused with 422"


def operator_leads():
    path = f"/apis/coordination.k8s.io/v1/namespaces/{read('namespace')}/leases/muster-operator"
    status, lease = ask(path)
    assert status == 200, f"the operator's lease got {status}: {lease.get('message')}"
    spec = lease["spec"]
    assert spec.get("holderIdentity"), "no operator holds the lease"
    silence = (datetime.now(UTC) - datetime.fromisoformat(spec["renewTime"])).total_seconds()
    assert silence < LEASE_SECONDS, f"{spec['holderIdentity']} has not renewed its lease for {silence:.0f} s"


def api_is_ready():
    with urllib.request.urlopen(f"{os.environ['API_URL']}/readyz", timeout=10) as reply:  # noqa: S310
        assert reply.status == 200


def patiently(check):
    deadline = time.monotonic() + float(os.environ.get("PATIENCE_SECONDS", PATIENCE_SECONDS))
    while True:
        try:
            check()
            print(f"ok      {check.__name__}")
            return True
        except (AssertionError, OSError, KeyError, ValueError) as error:
            if time.monotonic() > deadline:
                print(f"FAILED  {check.__name__}: {error}")
                return False
        time.sleep(1)


TLS = ssl.create_default_context(cafile=f"{ACCOUNT}/ca.crt")
# Python 3.13 would refuse a CA without a key usage or key identifiers, such as that of EKS (muster/kube/tls.py).
TLS.verify_flags &= ~ssl.VERIFY_X509_STRICT
CHECKS = [definition_is_served, operator_leads] + ([api_is_ready] if os.environ.get("API_URL") else [])
results = [patiently(check) for check in CHECKS]  # every one is told, whatever the first says
sys.exit(0 if all(results) else 1)
