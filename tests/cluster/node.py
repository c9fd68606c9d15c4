"""A real node beside the control plane: kubelet on containerd and runc, all its own, gone with the tests."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
from pathlib import Path

import yaml
from tests.cluster.controlplane import ControlPlane
from tests.cluster.network import DNS, Network
from tests.polling import eventually
from tests.ports import free_port

CNI = next((f for f in (Path("/opt/cni/bin"), Path("/usr/lib/cni")) if (f / "bridge").exists()), None)
PROGRAMS = ("containerd", "ctr", "runc", "ip")
BRIDGE = "muster-test0"
PODS = "10.98.0.0/24"
PAUSE = "localhost/muster-pause:test"


def missing() -> str:
    """Why no node can be started here; empty if one can."""
    if os.geteuid() != 0:
        return "a node needs root"
    if not os.access(Path(os.environ.get("KUBEBUILDER_ASSETS", "")) / "kubelet", os.X_OK):
        return "KUBEBUILDER_ASSETS has no kubelet"
    absent = [program for program in PROGRAMS if shutil.which(program) is None]
    if absent:
        return f"{', '.join(absent)} not installed"
    return "" if CNI else "no CNI plugins in /opt/cni/bin or /usr/lib/cni"


class Node:
    """folder: short, for the path of a socket may have 107 characters. Its pods' network begins with it."""

    def __init__(self, plane: ControlPlane, folder: Path, name: str = "node-a") -> None:
        self.plane, self.folder, self.name = plane, folder, name
        self.network = Network(plane)
        self._running: list[subprocess.Popen[bytes]] = []
        self._socket = folder / "containerd.sock"

    def start(self, *archives: Path) -> None:
        """archives: images to load, the pause image among them."""
        self.network.start()
        self._start_containerd()
        for archive in archives:
            self.ctr("images", "import", str(archive))
        self._start_kubelet()
        eventually(self._is_ready, f"a ready node; its log: {self.folder / 'kubelet.log'}")

    def ctr(self, *words: str, check: bool = True) -> str:
        command = ["ctr", "--address", str(self._socket), "--namespace", "k8s.io", *words]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
        assert done.returncode == 0 or not check, f"ctr {' '.join(words)}: {done.stderr}"
        return done.stdout

    def stop(self) -> None:
        """Pods first, while there is a kubelet to take their networks down."""
        self._kubectl("cordon", self.name)
        self._kubectl("delete", "pods", "--all", "-A", "--force", "--grace-period=0", "--wait=false")
        with contextlib.suppress(AssertionError):
            eventually(lambda: not self.ctr("tasks", "list", "-q", check=False).split(), "containers to end")
        for process in reversed(self._running):
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)
            process.kill()
        self.network.stop()
        subprocess.run(["ip", "link", "del", BRIDGE], check=False, capture_output=True)
        mounts = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
        for mount in reversed([mount for mount in mounts if mount.startswith(f"{self.folder}/")]):
            subprocess.run(["umount", "--lazy", mount], check=False, capture_output=True)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _start_containerd(self) -> None:
        (self.folder / "cni").mkdir(parents=True)
        (self.folder / "cni" / "10-bridge.conflist").write_text(json.dumps(_pod_network(self.folder)))
        config = self.folder / "containerd.toml"
        config.write_text(
            f"""version = 2
root = "{self.folder}/containerd"
state = "{self.folder}/state"
[grpc]
  address = "{self._socket}"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{PAUSE}"
  restrict_oom_score_adj = true  # needed where the machine withholds CAP_SYS_RESOURCE
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "{CNI}"
    conf_dir = "{self.folder}/cni"
"""
        )
        self._run("containerd", "--config", config)
        eventually(lambda: bool(self.ctr("version", check=False)), "containerd")

    def _start_kubelet(self) -> None:
        port = free_port()
        config = self.folder / "kubelet.yaml"
        config.write_text(
            yaml.safe_dump({
                "apiVersion": "kubelet.config.k8s.io/v1beta1", "kind": "KubeletConfiguration",
                "failCgroupV1": False, "cgroupDriver": "cgroupfs", "port": port, "healthzPort": 0,
                "containerRuntimeEndpoint": f"unix://{self._socket}", "podLogsDir": f"{self.folder}/logs",
                "authentication": {
                    "anonymous": {"enabled": False}, "webhook": {"enabled": False},
                    "x509": {"clientCAFile": str(self.plane.ca)},
                },
                "authorization": {"mode": "AlwaysAllow"}, "clusterDNS": [DNS], "clusterDomain": "cluster.local",
                "resolvConf": "", "failSwapOn": False, "localStorageCapacityIsolation": False, "evictionHard": {},
                "imageGCHighThresholdPercent": 100,
            })
        )  # fmt: skip
        self._run(
            Path(os.environ["KUBEBUILDER_ASSETS"]) / "kubelet", f"--config={config}", f"--cert-dir={self.folder}/pki",
            f"--kubeconfig={self.plane.kubeconfig}", f"--hostname-override={self.name}",
            f"--root-dir={self.folder}/kubelet",
        )  # fmt: skip

    def _run(self, program: str | Path, *arguments: str | Path) -> None:
        with open(self.folder / f"{Path(program).name}.log", "ab") as log:
            self._running.append(
                subprocess.Popen([program, *arguments], stdout=log, stderr=log, stdin=subprocess.DEVNULL)
            )

    def _is_ready(self) -> bool:
        assert self._running[-1].poll() is None, (self.folder / "kubelet.log").read_text()[-2000:]
        path = "jsonpath={.status.conditions[?(@.type=='Ready')].status}"
        return self._kubectl("get", "node", self.name, "-o", path) == "True"

    def _kubectl(self, *words: str) -> str:
        command = ["kubectl", f"--kubeconfig={self.plane.kubeconfig}", *words]
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120).stdout


def _pod_network(folder: Path) -> dict[str, object]:
    ranges = [[{"subnet": PODS}]]
    ipam = {"type": "host-local", "ranges": ranges, "routes": [{"dst": "0.0.0.0/0"}], "dataDir": f"{folder}/ipam"}
    bridge = {"type": "bridge", "bridge": BRIDGE, "isGateway": True, "hairpinMode": True, "ipam": ipam}
    return {"cniVersion": "0.4.0", "name": "muster-test", "plugins": [bridge]}
