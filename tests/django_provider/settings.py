"""Django's settings of the provider. Its folder, which the environment names, has the database and the signing keys."""

import json
import os
from pathlib import Path

FOLDER = Path(os.environ["PROVIDER_FOLDER"])
_SIGNING_KEY, *_INACTIVE_KEYS = json.loads((FOLDER / "keys.json").read_text())

SECRET_KEY = "of a provider that only tests ask"
ALLOWED_HOSTS = ["127.0.0.1"]
USE_TZ = True
ROOT_URLCONF = "tests.django_provider.urls"
LOGIN_URL = "/accounts/login/"
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
DATABASES = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": FOLDER / "db.sqlite3"}}
INSTALLED_APPS = [
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "oauth2_provider",
]
MIDDLEWARE = [
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
]
# Django's view for signing in has no page of its own; those of the toolkit (consent, user code) are in the toolkit.
_LOGIN_PAGE = '<form method="post">{% csrf_token %}{{ form.as_p }}<button type="submit">Log in</button></form>'
_LOADERS = [
    ("django.template.loaders.locmem.Loader", {"registration/login.html": _LOGIN_PAGE}),
    "django.template.loaders.app_directories.Loader",
]
TEMPLATES = [{"BACKEND": "django.template.backends.django.DjangoTemplates", "OPTIONS": {"loaders": _LOADERS}}]

OAUTH2_PROVIDER = {
    "OIDC_ENABLED": True,
    "OIDC_RSA_PRIVATE_KEY": _SIGNING_KEY,
    "OIDC_RSA_PRIVATE_KEYS_INACTIVE": _INACTIVE_KEYS,
    "OAUTH2_VALIDATOR_CLASS": "tests.django_provider.validator.Validator",
    # No offline_access: the toolkit gives refresh tokens without it, and refuses a scope that is not named here.
    "SCOPES": {"openid": "Who you are", "profile": "Your name", "email": "Your address", "groups": "Your groups"},
    "OAUTH_DEVICE_VERIFICATION_URI": f"{os.environ['PROVIDER_ADDRESS']}/o/device/",
    "DEVICE_FLOW_INTERVAL": 1,  # seconds
    "COMPLIANT_BCP_RFC9700_AUTHZ_RESPONSE_ISS": True,  # the answer names its issuer (RFC 9207)
}
LOGGING = {
    "version": 1,
    "handlers": {"log": {"class": "logging.StreamHandler"}},
    "loggers": {"django.request": {"handlers": ["log"], "level": "ERROR"}},
}
