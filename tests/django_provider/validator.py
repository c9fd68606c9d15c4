"""What the toolkit asks its deployment for: the claims of an ID token, and the grants of a client."""

from typing import Any

from oauth2_provider.oauth2_validators import OAuth2Validator

DEVICE = "urn:ietf:params:oauth:grant-type:device_code"


class Validator(OAuth2Validator):
    oidc_claim_scope = OAuth2Validator.oidc_claim_scope | {"groups": "groups"}

    def get_additional_claims(self, request: Any) -> dict[str, Any]:
        """The subject stays the toolkit's: the number of the account."""
        groups = sorted(request.user.groups.values_list("name", flat=True))
        return {"preferred_username": request.user.username, "email": request.user.email, "groups": groups}

    def validate_grant_type(self, client_id: str, grant_type: str, client: Any, request: Any, *rest: Any) -> bool:
        """A client of the toolkit has one grant; `muster login` and the pages are one client with two."""
        return grant_type == DEVICE or super().validate_grant_type(client_id, grant_type, client, request, *rest)
