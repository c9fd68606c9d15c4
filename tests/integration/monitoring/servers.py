"""Prometheus and Alertmanager as they are, each a process over a folder of its own."""

from __future__ import annotations

import json
import shutil
import subprocess
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.polling import eventually
from tests.ports import free_port

PROMETHEUS = shutil.which("prometheus")
ALERTMANAGER = shutil.which("alertmanager") or shutil.which("prometheus-alertmanager")

needs_prometheus = pytest.mark.skipif(
    PROMETHEUS is None, reason="no `prometheus` here (Debian: apt install prometheus)"
)
needs_both = pytest.mark.skipif(
    PROMETHEUS is None or ALERTMANAGER is None,
    reason="no `prometheus` and `alertmanager` here (Debian: apt install prometheus prometheus-alertmanager)",
)


class Server:
    """One of them. command: without the address to listen on."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name, self.port = folder / name, name, free_port()
        self.folder.mkdir()
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def configure(self, document: dict[str, Any], name: str = "config.yaml") -> Path:
        path = self.folder / name
        path.write_text(yaml.safe_dump(document))
        return path

    def start(self, *command: str | None) -> None:
        words = [word for word in command if word]
        with open(self.folder / "log", "ab") as log:
            self.process = subprocess.Popen(words, stdout=log, stderr=log, cwd=self.folder)
        eventually(self.ready, f"{self.name} to be ready; its log is in {self.folder}")

    def ready(self) -> bool:
        assert self.process is not None
        if self.process.poll() is not None:
            raise RuntimeError((self.folder / "log").read_text()[-3000:])
        try:
            with urllib.request.urlopen(f"{self.url}/-/ready", timeout=20) as reply:
                return bool(reply.status == 200)
        except OSError:
            return False

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None


class Alertmanager(Server):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder, "alertmanager")

    def run(self, webhook: str, token: Path) -> None:
        """Send every alert to the webhook, at once."""
        receiver = {
            "name": "muster",
            "webhook_configs": [
                {
                    "url": webhook,
                    "send_resolved": True,
                    "http_config": {"authorization": {"type": "Bearer", "credentials_file": str(token)}},
                }
            ],
        }
        route = {"receiver": "muster", "group_by": ["..."], "group_wait": "0s", "group_interval": "1s"}
        config = self.configure({"route": route | {"repeat_interval": "3s"}, "receivers": [receiver]})
        self.start(
            ALERTMANAGER, f"--config.file={config}", f"--storage.path={self.folder / 'data'}",
            f"--web.listen-address=127.0.0.1:{self.port}", "--cluster.listen-address=",
        )  # fmt: skip


class Prometheus(Server):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder, "prometheus")

    def run(
        self,
        targets: dict[str, str],
        rules: dict[str, Any] | Path | None = None,
        alertmanager: Alertmanager | None = None,
        api: str = "",
    ) -> None:
        """targets: path → host:port, scraped each second. rules: a rule file, or its content. api: its host:port."""
        files = (
            [] if rules is None else [str(rules if isinstance(rules, Path) else self.configure(rules, "rules.yaml"))]
        )
        alerting = [{"static_configs": [{"targets": [f"127.0.0.1:{alertmanager.port}"]}]}] if alertmanager else []
        config = self.configure(
            {
                "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
                "rule_files": files,
                "alerting": {"alertmanagers": alerting},
                "scrape_configs": [
                    {
                        "job_name": path.strip("/").replace("/", "-") + f"-{number}",
                        "metrics_path": path,
                        "honor_labels": True,
                        "static_configs": [{"targets": [target]}],
                    }
                    for number, (path, target) in enumerate([*targets.items(), *([("/metrics", api)] if api else [])])
                ],
            }
        )
        self.start(
            PROMETHEUS, f"--config.file={config}", f"--storage.tsdb.path={self.folder / 'data'}",
            f"--web.listen-address=127.0.0.1:{self.port}",
        )  # fmt: skip

    def query(self, expression: str) -> list[dict[str, Any]]:
        address = f"{self.url}/api/v1/query?{urllib.parse.urlencode({'query': expression})}"
        with urllib.request.urlopen(address) as reply:
            found: list[dict[str, Any]] = json.load(reply)["data"]["result"]
        return found
