"""The two ways to sign in at an OpenID Connect provider: by a code that is shown and entered in any browser (RFC 8628),
and in this machine's browser (RFC 6749 §4.1 with PKCE, RFC 7636, on a loopback address, RFC 8252).
"""

from __future__ import annotations

import base64
import hashlib
import secrets
import time
import urllib.parse
import webbrowser
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

from muster.cli.errors import CliError
from muster.cli.output import say
from muster.client.signed_in import ask

DEVICE = "urn:ietf:params:oauth:grant-type:device_code"
BROWSER_SECONDS_MAX = 300.0
INTERVAL_SECONDS = 5.0  # RFC 8628 §3.5, where the provider names none


def by_code(about: dict[str, Any], where: dict[str, Any]) -> dict[str, Any]:
    """The provider's answer once the person has entered the code. Raises CliError when they do not, or say no."""
    endpoint = about.get("device_authorization_endpoint")
    if not endpoint:
        raise CliError(
            f"{where['issuer']} offers no sign-in by code", code="sign-in", next_step="`muster login --browser`"
        )
    asked = {"client_id": where["clientId"], "scope": " ".join(where["scopes"])}
    code = ask("POST", str(endpoint), asked)
    say(f"Open {code.get('verification_uri_complete') or code['verification_uri']}")
    say(f"and enter the code {code['user_code']}", "bold")
    wait = float(code.get("interval", INTERVAL_SECONDS))
    deadline = time.monotonic() + float(code.get("expires_in", 600))
    form = {"grant_type": DEVICE, "device_code": code["device_code"], "client_id": where["clientId"]}
    while time.monotonic() < deadline:
        time.sleep(wait)
        answer = ask("POST", str(about["token_endpoint"]), form, may_fail=True)
        match answer.get("error"):
            case None:
                return answer
            case "authorization_pending":
                continue
            case "slow_down":
                wait += 5.0  # RFC 8628 §3.5
            case error:
                raise _refused(str(answer.get("error_description") or error))
    raise _refused("the code has expired")


def by_browser(about: dict[str, Any], where: dict[str, Any]) -> dict[str, Any]:
    """The provider's answer, for which the browser comes back to a port of this machine."""
    verifier, state = secrets.token_urlsafe(64), secrets.token_urlsafe(32)
    challenge = base64.urlsafe_b64encode(hashlib.sha256(verifier.encode()).digest()).rstrip(b"=").decode()
    with HTTPServer(("127.0.0.1", 0), _LandingPage) as listener:
        back = f"http://127.0.0.1:{listener.server_address[1]}/"
        query = {
            "response_type": "code", "client_id": where["clientId"], "redirect_uri": back, "state": state,
            "scope": " ".join(where["scopes"]), "code_challenge": challenge, "code_challenge_method": "S256",
        }  # fmt: skip
        url = f"{about['authorization_endpoint']}?{urllib.parse.urlencode(query)}"
        say(f"Opening {url}")
        webbrowser.open(url)
        said = _landed(listener, state)
    if "code" not in said:
        raise _refused(said.get("error_description") or said.get("error") or "nobody came back from the browser")
    form = {
        "grant_type": "authorization_code", "code": said["code"], "redirect_uri": back,
        "client_id": where["clientId"], "code_verifier": verifier,
    }  # fmt: skip
    answer = ask("POST", str(about["token_endpoint"]), form, may_fail=True)
    if "error" in answer:
        raise _refused(str(answer.get("error_description") or answer["error"]))
    return answer


def _landed(listener: HTTPServer, state: str) -> dict[str, str]:
    """Return the browser's answer, or nothing after a while. Requests at this port without the state are ignored."""
    deadline = time.monotonic() + BROWSER_SECONDS_MAX
    while (left := deadline - time.monotonic()) > 0:
        listener.timeout = left
        listener.handle_request()
        said: dict[str, str] = getattr(listener, "said", {})
        if said and secrets.compare_digest(said.get("state", ""), state):
            return said
    return {}


class _LandingPage(BaseHTTPRequestHandler):
    """The page on which the browser lands."""

    def do_GET(self) -> None:
        query = urllib.parse.urlsplit(self.path).query
        self.server.said = dict(urllib.parse.parse_qsl(query))  # type: ignore[attr-defined]
        self.send_response(200)
        self.send_header("Content-Type", "text/plain; charset=utf-8")
        self.end_headers()
        self.wfile.write(b"Muster has heard of it: go back to the terminal.\n")

    def log_message(self, *_: object) -> None:
        """Log nothing, because the code is in the address."""


def _refused(why: str) -> CliError:
    return CliError(f"the sign-in did not come about: {why}", code="sign-in", next_step="`muster login` begins anew")
