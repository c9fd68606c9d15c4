"""Serve the provider on a port of this machine; at the first start with two clients, public ones, and two people."""

import sys
from wsgiref.simple_server import WSGIRequestHandler, make_server

import django
from django.core.management import call_command
from django.core.wsgi import get_wsgi_application

PEOPLE = {"ann": "ml", "bob": "guests"}
PASSWORD = "correct horse battery staple"


class Quiet(WSGIRequestHandler):
    def log_message(self, *_: object) -> None:
        """Nothing: codes are in the addresses."""


def prepare_database() -> None:
    from django.contrib.auth.models import Group, User
    from oauth2_provider.models import Application

    call_command("migrate", verbosity=0)
    if User.objects.exists():
        return
    for name, group in PEOPLE.items():
        person = User.objects.create_user(name, f"{name}@example.com", PASSWORD)
        person.groups.add(Group.objects.create(name=group))
    public = {"client_type": Application.CLIENT_PUBLIC, "algorithm": Application.RS256_ALGORITHM}
    Application.objects.create(
        client_id="muster",
        authorization_grant_type=Application.GRANT_AUTHORIZATION_CODE,
        redirect_uris="http://127.0.0.1/ http://127.0.0.1/sign-in/callback",  # of any port (RFC 8252 §7.3)
        **public,
    )
    Application.objects.create(
        client_id="muster-login", authorization_grant_type=Application.GRANT_DEVICE_CODE, **public
    )


if __name__ == "__main__":
    django.setup()
    prepare_database()
    make_server("127.0.0.1", int(sys.argv[1]), get_wsgi_application(), handler_class=Quiet).serve_forever()
