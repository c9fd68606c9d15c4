"""The cluster's official client, as the tests' own: what they see of the product rests on no part of it."""

import json
import ssl
from pathlib import Path
from typing import Any

from kubernetes.client.exceptions import ApiException
from kubernetes.config import new_client_from_config

MERGE = "application/merge-patch+json"
TIMEOUT_SECONDS = 60.0
Object = dict[str, Any]


class Refused(Exception):
    """The API server's answer to what it did not do. reason: one of Kubernetes' own words (NotFound, Invalid)."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(f"{status} {reason}: {message}")
        self.status, self.reason, self.message = status, reason, message


class OfficialClient:
    """Objects as plain documents, by their path. Every call raises Refused where the server says no."""

    def __init__(self, kubeconfig: Path) -> None:
        self._api = new_client_from_config(str(kubeconfig))
        tls = ssl.create_default_context(cafile=self._api.configuration.ssl_ca_cert)
        tls.verify_flags &= ~ssl.VERIFY_X509_STRICT  # the control plane's CA is one as EKS makes it
        self._api.rest_client.pool_manager.connection_pool_kw["ssl_context"] = tls

    def get(self, path: str) -> Object:
        return self._call("GET", path)

    def create(self, path: str, body: Object) -> Object:
        return self._call("POST", path, body)

    def patch(self, path: str, body: object, kind: str = MERGE) -> Object:
        return self._call("PATCH", path, body, kind)

    def delete(self, path: str, body: Object | None = None) -> Object:
        return self._call("DELETE", path, body)

    def close(self) -> None:
        self._api.close()

    def _call(self, method: str, path: str, body: object = None, content: str = "application/json") -> Object:
        headers = {"Accept": "application/json", "Content-Type": content}
        url, limit = self._api.configuration.host + path, TIMEOUT_SECONDS
        try:
            answer = self._api.request(method, url, headers=headers, body=body, _request_timeout=limit)
        except ApiException as error:
            text = error.body.decode() if isinstance(error.body, bytes) else error.body or ""
            told = json.loads(text) if text.startswith("{") else {}
            raise Refused(error.status, told.get("reason", ""), told.get("message", text)) from error
        document: Object = json.loads(answer.data)
        return document
