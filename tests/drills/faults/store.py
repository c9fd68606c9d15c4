"""An S3 server that can be taken away and brought back: its objects are files of a folder, its address stays."""

from __future__ import annotations

import socket
import subprocess
from pathlib import Path

import psutil
from tests.polling import eventually
from tests.ports import free_port
from tests.s3_servers import BUCKET, KEYS, rclone


class Store:
    def __init__(self, folder: Path) -> None:
        self._folder, self._port = folder, free_port()
        (folder / BUCKET).mkdir(parents=True)
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def environment(self) -> dict[str, str]:
        return {**KEYS, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self._port}", "AWS_EC2_METADATA_DISABLED": "true"}

    @property
    def uri(self) -> str:
        return f"s3://{BUCKET}/drill"

    def start(self) -> None:
        """Raises tests.s3_servers.Missing."""
        command = [str(rclone()), "serve", "s3", str(self._folder), "--addr", f"127.0.0.1:{self._port}"]
        self.process = subprocess.Popen(
            [*command, "--config", "/dev/null"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        eventually(self._answers, "the S3 server to listen")

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def processes(self) -> list[psutil.Process]:
        assert self.process is not None
        return [psutil.Process(self.process.pid)]

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self._port), timeout=1):
                return True
        except OSError:
            return False
