"""What watches beside the platform: a node's agent, and Prometheus. Real processes, with stand-ins for the hardware."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

from tests.polling import eventually
from tests.ports import free_port

PROMETHEUS = shutil.which("prometheus")
_CONFIG = """
global: {{scrape_interval: 1s}}
scrape_configs: [{{job_name: muster-operator, static_configs: [{{targets: ["127.0.0.1:{port}"]}}]}}]
"""


class Prometheus:
    """operator_port: whose /metrics it scrapes. Only where the program is installed; else it is always gone."""

    def __init__(self, folder: Path, operator_port: int) -> None:
        self._folder, self._port = folder, free_port()
        folder.mkdir()
        (folder / "prometheus.yml").write_text(_CONFIG.format(port=operator_port))
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def start(self) -> None:
        """Does nothing where it runs already."""
        if PROMETHEUS is None or self._process is not None:
            return
        files = [f"--config.file={self._folder}/prometheus.yml", f"--storage.tsdb.path={self._folder}/data"]
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [PROMETHEUS, *files, f"--web.listen-address=127.0.0.1:{self._port}"], stdout=log, stderr=log
            )
        eventually(self._answers, "Prometheus to be ready")

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/-/ready", timeout=1) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False


class Agent:
    """The agent of one virtual node, with a file as its kernel log."""

    def __init__(self, notices: Path, node: str) -> None:
        self._notices = notices / f"{node}.json"
        notices.mkdir(exist_ok=True)
        self._kernel_log = notices / f"{node}.kmsg"
        self._kernel_log.touch()
        log = notices / f"{node}.log"
        words = ["--node", node, "--folder", str(notices), "--kernel-log", str(self._kernel_log), "--imds", ""]
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "muster.agent", *words, "--host", "127.0.0.1", "--port", "0"],
                stdout=output,
                stderr=output,
            )
        try:
            eventually(lambda: "watching:" in log.read_text(), f"the agent of {node}")
        except BaseException:
            self.kill()
            raise

    def kernel_says(self, text: str) -> float:
        at = time.time()
        with self._kernel_log.open("a") as log:
            log.write(f"4,1,{int(time.monotonic() * 1e6)},-;{text}\n")
        return at

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def forget(self) -> None:
        """The node is well again."""
        self.kill()
        for path in (self._notices, self._kernel_log):
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
