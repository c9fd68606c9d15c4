"""An API server whose certificates are not as RFC 5280 wants them, as on EKS, met by everything that speaks to one.

The fault needs Python 3.13's default context; the tests give it to every Python, and run on a later one where one is.
"""

import contextlib
import os
import shutil
import socket
import ssl
import subprocess
import sys
from pathlib import Path

import pytest
from tests.certificates import Authority
from tests.tidy.repository import ROOT
from tests.unit.kubernetes.api_server import api_server, kubeconfig, service_account

from muster.cli.cluster_connection import connect_cluster
from muster.kube.connection import connect, from_kubeconfig
from muster.kube.tls import api_server_context
from muster.words.names import Env
from muster.worker.fence import CurrentGang, FenceUnreachable, current_gang

STRICT = ssl.VERIFY_X509_PARTIAL_CHAIN | ssl.VERIFY_X509_STRICT
FORMS = {
    "well formed": (Authority(), None),
    "no key usage": (Authority(key_usage=False), "key usage"),
    "no key identifiers": (Authority(identifiers=False), "Authority Key Identifier"),
    "neither": (Authority(key_usage=False, identifiers=False), "Key Identifier"),
}
forms = pytest.mark.parametrize("form", FORMS)


@pytest.fixture
def later_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """The default context of Python 3.13 and later."""
    before = ssl.create_default_context

    def create(*arguments: object, **options: object) -> ssl.SSLContext:
        context = before(*arguments, **options)  # type: ignore[arg-type]
        context.verify_flags |= STRICT
        return context

    monkeypatch.setattr(ssl, "create_default_context", create)


def asked(context: ssl.SSLContext, port: int, name: str = "127.0.0.1") -> str:
    """The reason for which the server is refused; empty where it is not."""
    try:
        with socket.create_connection(("127.0.0.1", port)) as bare, context.wrap_socket(bare, server_hostname=name):
            return ""
    except ssl.SSLCertVerificationError as error:
        return error.verify_message


@forms
@pytest.mark.usefixtures("later_python")
def test_the_form_of_a_clusters_certificates_is_not_judged(form: str, tmp_path: Path) -> None:
    authority, complaint = FORMS[form]
    with api_server(*authority.issue(tmp_path, "server", "127.0.0.1")) as port:
        assert asked(api_server_context(authority.pem), port) == ""
        refused = asked(ssl.create_default_context(cadata=authority.pem), port)
        assert (complaint in refused) if complaint else refused == ""  # so the test can fail


@forms
@pytest.mark.usefixtures("later_python")
def test_name_chain_and_expiry_are_judged(form: str, tmp_path: Path) -> None:
    authority, _ = FORMS[form]
    trusted = api_server_context(authority.pem)
    assert (trusted.verify_mode, trusted.check_hostname) == (ssl.CERT_REQUIRED, True)
    with api_server(*authority.issue(tmp_path, "server", "127.0.0.1")) as port:
        assert "Hostname mismatch" in asked(trusted, port, "kubernetes.default.svc")
        assert asked(api_server_context(Authority().pem), port) != ""
    with api_server(*authority.issue(tmp_path, "old", "127.0.0.1", days=-1)) as port:
        assert "certificate has expired" in asked(trusted, port)


@pytest.mark.usefixtures("later_python")
def test_a_connection_by_kubeconfig_or_service_account_reaches_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority, _ = FORMS["neither"]
    with api_server(*authority.issue(tmp_path, "server", "127.0.0.1")) as port:
        assert asked(from_kubeconfig(kubeconfig(tmp_path, authority, port)).tls, port) == ""
        account = service_account(tmp_path, authority)
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
        monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(port))
        assert asked(connect(service_account=account).tls, port) == ""


@pytest.mark.usefixtures("later_python")
def test_a_workers_fence_reaches_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise every commit would be refused."""
    authority, _ = FORMS["neither"]
    account = service_account(tmp_path, authority)
    monkeypatch.setenv(Env.FENCE_CA_FILE, str(account / "ca.crt"))
    monkeypatch.setenv(Env.FENCE_TOKEN_FILE, str(account / "token"))
    with api_server(*authority.issue(tmp_path, "server", "127.0.0.1")) as port:
        assert current_gang(f"https://127.0.0.1:{port}/job", "uid") == CurrentGang(3)
        (account / "ca.crt").write_text(Authority().pem)
        with pytest.raises(FenceUnreachable, match="certificate verify failed"):
            current_gang(f"https://127.0.0.1:{port}/job", "uid")


def test_the_command_line_reaches_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """urllib3 makes its own default context, as strict as Python's; the client takes ours instead."""
    authority, _ = FORMS["neither"]
    with api_server(*authority.issue(tmp_path, "server", "127.0.0.1")) as port:
        monkeypatch.setattr(
            "kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(kubeconfig(tmp_path, authority, port))
        )
        cluster = connect_cluster("it")
        try:
            url = f"{cluster.api.configuration.host}/version"
            assert cluster.api.request("GET", url, _request_timeout=120).status == 200
            used = cluster.api.rest_client.pool_manager.connection_pool_kw["ssl_context"]
            assert not used.verify_flags & ssl.VERIFY_X509_STRICT
            assert len(used.get_ca_certs()) == 1  # the cluster's alone, not the system's too
        finally:
            cluster.close()


@pytest.mark.parametrize("python", ["this", "3.13 or later"])
def test_helm_test_reaches_it(python: str, tmp_path: Path) -> None:
    """The chart's program as its pod runs it; with this Python, under a default context as 3.13 has it."""
    interpreter = sys.executable if python == "this" else later_interpreter()
    if interpreter is None:
        pytest.skip("no Python of 3.13 or later is installed")
    authority, _ = FORMS["neither"]
    account = service_account(tmp_path, authority)
    (tmp_path / "strict").mkdir()
    (tmp_path / "strict" / "sitecustomize.py").write_text(STRICT_PYTHON)
    with api_server(*authority.issue(tmp_path, "server", "127.0.0.1")) as port:
        environment = {
            "KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": str(port), "PATIENCE_SECONDS": "0",
                "JOBS_NAMESPACE": "default",
            "ACCOUNT_FOLDER": str(account), "PYTHONPATH": str(tmp_path / "strict"),
        }  # fmt: skip
        program = ROOT / "helm" / "muster" / "files" / "smoke.py"
        done = subprocess.run(
            [interpreter, program], env=os.environ | environment, capture_output=True, text=True, check=False
        )
    assert (done.stdout.split(), done.returncode) == (["ok", "definition_is_served", "ok", "operator_leads"], 0)


STRICT_PYTHON = f"""
import ssl
before = ssl.create_default_context
def create(*arguments, **options):
    context = before(*arguments, **options)
    context.verify_flags |= {int(STRICT)}
    return context
ssl.create_default_context = create
"""


def test_a_later_python_reaches_it(tmp_path: Path) -> None:
    """What the images run: its own default context refuses each of these, and ours none."""
    interpreter = later_interpreter()
    if interpreter is None:
        pytest.skip("no Python of 3.13 or later is installed")
    program = """
import socket, ssl, sys
sys.path.insert(0, sys.argv[1])
from muster.kube.tls import api_server_context
for number in range(2, len(sys.argv), 2):
    authority, port = open(sys.argv[number]).read(), int(sys.argv[number + 1])
    for context in (api_server_context(authority), ssl.create_default_context(cadata=authority)):
        try:
            with socket.create_connection(("127.0.0.1", port)) as bare:
                context.wrap_socket(bare, server_hostname="127.0.0.1").close()
            print("accepted")
        except ssl.SSLCertVerificationError:
            print("refused")
"""
    with contextlib.ExitStack() as servers:
        words = list[str]()
        for form, (authority, _) in FORMS.items():
            folder = tmp_path / form
            folder.mkdir()
            (folder / "ca.crt").write_text(authority.pem)
            port = servers.enter_context(api_server(*authority.issue(folder, "server", "127.0.0.1")))
            words += [str(folder / "ca.crt"), str(port)]
        done = subprocess.run(
            [interpreter, "-c", program, ROOT / "services", *words], capture_output=True, text=True, check=False
        )
    assert (done.stdout.split(), done.stderr) == (["accepted", "accepted", *["accepted", "refused"] * 3], "")


def later_interpreter() -> str | None:
    """A Python of 3.13 or later, by the names under which systems and version managers have one."""
    named = [shutil.which(f"python3.{minor}") for minor in range(13, 20)]
    managed = sorted((Path.home() / ".pyenv" / "versions").glob("3.*/bin/python3"))
    for path in [sys.executable, *filter(None, named), *map(str, managed)]:
        told = subprocess.run(
            [path, "-c", "import ssl, sys; print(sys.version_info >= (3, 13))"], capture_output=True, text=True
        )
        if told.stdout.strip() == "True":
            return path
    return None
