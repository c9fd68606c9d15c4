"""The provider's addresses: the toolkit's at /o/, as its documentation has them, and Django's page for signing in."""

import json
from typing import Any

from django.contrib.auth.views import LoginView
from django.http import HttpRequest, JsonResponse
from django.urls import include, path
from oauth2_provider.views import ConnectDiscoveryInfoView


class Discovery(ConnectDiscoveryInfoView):
    """The toolkit (3.4) grants device codes and publishes nowhere where to ask for one (RFC 8628 §4)."""

    def get(self, request: HttpRequest, *rest: Any, **more: Any) -> JsonResponse:
        about = json.loads(super().get(request, *rest, **more).content)
        endpoint = self._get_endpoint_url(request, "device-authorization", required=True)
        return JsonResponse(about | {"device_authorization_endpoint": endpoint})


urlpatterns = [
    path("o/.well-known/openid-configuration", Discovery.as_view()),
    path("o/", include("oauth2_provider.urls", namespace="oauth2_provider")),
    path("accounts/login/", LoginView.as_view()),
]
