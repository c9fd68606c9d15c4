"""`muster login` and `muster logout`: the sign-in of a person by the server's OpenID Connect provider.

What they import is imported as they run: it is heavy, and `--help` loads every command.
"""

from __future__ import annotations

from typing import Annotated

import typer

from muster.cli.errors import CliError
from muster.cli.options import Json, Server
from muster.cli.output import print_json, say


def login(
    browser: Annotated[
        bool, typer.Option("--browser", help="Use this machine's browser instead of a code for another device.")
    ] = False,
    server: Server = None,
    json: Json = False,
) -> None:
    """Sign in through your identity provider (OpenID Connect). The session is renewed automatically."""
    from muster.cli.signing_in import by_browser, by_code
    from muster.client.address import find_server
    from muster.client.connection import Connection
    from muster.client.signed_in import ask, keep, kept_from

    here = find_server(server, signing_in=True)
    with Connection(here) as client:
        where = client.get("sign-in")
    about = ask("GET", f"{where['issuer'].rstrip('/')}/.well-known/openid-configuration")
    if about.get("issuer") != where["issuer"]:
        raise CliError(
            f"the provider calls itself {about.get('issuer')!r}, not {where['issuer']!r}",
            code="sign-in",
            next_step="whoever runs Muster sets MUSTER_API_OIDC_ISSUER to exactly what the provider calls itself",
        )
    answer = by_browser(about, where) if browser else by_code(about, where)
    kept = kept_from(here.url, where["clientId"], str(about["token_endpoint"]), answer)
    keep(kept)
    with Connection(find_server(server)) as client:
        me = client.get("me")
    if json:
        print_json(me)
    roles = ", ".join(f"{role} of {project}" for project, role in sorted(me["roles"].items()))
    may = "admin" if me["admin"] else roles or "no project yet"
    say(f"signed in to {here.url} as {me['person']}: {may}", "bold green")


def logout(server: Server = None, json: Json = False) -> None:
    """Sign out on this machine. You stay signed in at your identity provider."""
    from muster.client.address import find_server
    from muster.client.signed_in import forget

    url = find_server(server, signing_in=True).url
    gone = forget(url)
    if json:
        print_json({"server": url, "signedOut": gone})
    say(f"signed out of {url}" if gone else f"nobody is signed in to {url} here")
