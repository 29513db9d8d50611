"""The Kubernetes manifests are valid, agree with themselves, and ask of drafthouse only what it offers."""

import json
import re
from functools import cache
from pathlib import Path

import jsonschema
import kubernetes_validate
import pytest
import yaml
from yamllint import linter
from yamllint.config import YamlLintConfig

from deploy.serve import FRONTEND_STOP_MARGIN_S
from engine.alive_file import INTERVAL_S
from engine.config import EngineConfig
from engine.wire import CLOSE_TIMEOUT_S
from frontend.config import FrontendConfig
from frontend.families import FAMILIES
from frontend.otlp_environment import asks_for_traces, collector_from, refuse_unsupported
from protocol.endpoints import MAX_FRONTENDS
from protocol.options import OptionsError, parse
from tests.deploy.kustomized import (
    CASES,
    COMPONENTS,
    KUBERNETES,
    POD_NAME,
    ROOT,
    Manifest,
    Rendering,
    render,
    seconds_of_find,
    selects,
)

VERSIONS = ("1.30", "1.37")  # the oldest that docs/kubernetes.md promises, and the newest whose schema there is
# Schemas of the custom resources: what the models of cloudcoil-models-prometheus-operator 0.80.1.0 and
# cloudcoil-models-keda 2.16.1.0 (made from the projects' CRDs) say, strict, without the SDConfigs of ScrapeConfig.
CUSTOM = json.loads((Path(__file__).parent / "kubernetes_crds.json").read_text())
YAMLLINT = YamlLintConfig(
    "extends: default\n"
    "rules: {line-length: {max: 130}, document-start: disable, braces: {max-spaces-inside: 1},"
    " comments: {min-spaces-from-content: 1}, octal-values: disable}"
)
CONFIGS = {"engine": EngineConfig, "frontend": FrontendConfig}
ROLES = tuple(CONFIGS)


@pytest.fixture(params=CASES)
def rendered(request: pytest.FixtureRequest) -> Rendering:
    return render(request.param)


@pytest.fixture
def production() -> Rendering:
    return render("overlays/production")


# ---- form


def test_yamllint_finds_nothing():
    written = [path for path in KUBERNETES.rglob("*.yaml") if path.name != "prometheus-rule.yaml"]  # that one is made
    problems = [f"{path}: {problem}" for path in written for problem in linter.run(path.read_text(), YAMLLINT)]
    assert len(written) > 20 and problems == []


@cache  # most manifests are in every rendering
def check_schema(manifest: str) -> None:
    content = json.loads(manifest)
    if content["kind"] in CUSTOM:
        jsonschema.validate(content, CUSTOM[content["kind"]])
    else:
        for version in VERSIONS:
            kubernetes_validate.validate(content, version, strict=True)


def test_everything_satisfies_the_schemas(rendered: Rendering):
    for manifest in rendered.manifests:
        check_schema(json.dumps(manifest))


def test_the_schemas_find_a_field_that_does_not_exist(production: Rendering):
    for kind in ("PodMonitor", "ScrapeConfig", "PrometheusRule", "ScaledObject"):
        manifest = production.all(kind)[0]
        with pytest.raises(jsonschema.ValidationError, match="noSuchField"):
            jsonschema.validate(manifest | {"spec": manifest["spec"] | {"noSuchField": 1}}, CUSTOM[kind])


def test_every_component_is_in_the_production_overlay_but_the_one_for_cpus():
    overlay = yaml.safe_load((KUBERNETES / "overlays" / "production" / "kustomization.yaml").read_text())
    named = {Path(path).name for path in overlay["components"]}
    assert named == set(COMPONENTS) - {"cpu"}


# ---- options


@pytest.mark.parametrize("role", ROLES)
def test_every_option_is_one_that_the_process_takes(rendered: Rendering, role: str):
    container = rendered.container(role)
    assert container["command"] == ["drafthouse", role]
    environment = rendered.environment(role)
    options = parse(CONFIGS[role], container.get("args", []), environment, program=role)
    assert options.log_format == "json"


def test_an_engine_is_called_like_its_pod(rendered: Rendering):
    options = parse(EngineConfig, [], rendered.environment("engine"), program="engine")
    assert options.engine_id == POD_NAME


def test_torch_gets_a_thread_for_each_core_that_the_pod_asked_for(rendered: Rendering):
    assert int(rendered.environment("engine")["OMP_NUM_THREADS"]) >= 2


def test_both_roles_are_told_the_same_model(rendered: Rendering):
    engine = parse(EngineConfig, [], rendered.environment("engine"), program="engine")
    frontend = parse(FrontendConfig, [], rendered.environment("frontend"), program="frontend")
    assert (engine.model, engine.served_model_name) == (frontend.model, frontend.served_model_name)


def service_links(rendered: Rendering) -> dict[str, str]:
    """What Kubernetes puts into every container of a namespace unless it is told not to."""
    links = {}
    for service in rendered.all("Service"):
        if service["spec"].get("clusterIP") == "None":
            continue
        prefix = service["metadata"]["name"].upper().replace("-", "_")
        port = service["spec"]["ports"][0]["port"]
        links |= {f"{prefix}_SERVICE_HOST": "10.0.0.1", f"{prefix}_PORT": f"tcp://10.0.0.1:{port}"}
    return links


@pytest.mark.parametrize("role", ROLES)
def test_no_service_announces_itself_as_an_option(rendered: Rendering, role: str):
    assert rendered.pod(role)["enableServiceLinks"] is False
    environment = rendered.environment(role) | service_links(rendered)
    with pytest.raises(OptionsError, match="DRAFTHOUSE_FRONTEND_"):  # which is what the line above prevents
        parse(CONFIGS[role], [], environment, program=role)


def test_files_that_options_name_lie_on_a_volume_of_the_pod(rendered: Rendering):
    for role in ROLES:
        mounts = [mount["mountPath"] for mount in rendered.container(role)["volumeMounts"]]
        for name, value in rendered.environment(role).items():
            if value.startswith("/"):
                assert any(value.startswith(f"{mount}/") for mount in mounts), f"{role} {name}={value}"


def test_without_the_curve_component_the_wire_is_plain_because_it_is_said_and_with_it_encrypted():
    plain = parse(EngineConfig, [], render("base").environment("engine"), program="engine")
    rendered = render("components/curve")
    engine = parse(EngineConfig, [], rendered.environment("engine"), program="engine")
    frontend = parse(FrontendConfig, [], rendered.environment("frontend"), program="frontend")
    plain_frontend = parse(FrontendConfig, [], render("base").environment("frontend"), program="frontend")
    assert (plain.allow_plaintext_tcp, plain.curve_key_file) == (True, None)
    assert (plain_frontend.allow_plaintext_tcp, plain_frontend.curve_key_file) == (True, None)
    assert not engine.allow_plaintext_tcp and not frontend.allow_plaintext_tcp
    # The names of the files are those that `drafthouse keys` makes.
    assert Path(engine.curve_key_file or "").name == "engine.key"
    assert Path(engine.curve_client_keys or "").name == "frontend.pub"
    assert Path(frontend.curve_key_file or "").name == "frontend.key"
    assert Path(frontend.curve_server_key_file or "").name == "engine.pub"


def test_a_pod_with_the_gpu_component_has_one_and_fails_without():
    rendered = render("components/gpu")
    assert rendered.container("engine")["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert parse(EngineConfig, [], rendered.environment("engine"), program="engine").device == "cuda"


def test_traces_go_to_a_collector_that_the_policy_lets_the_frontends_reach():
    rendered = render("components/tracing")
    environment = rendered.environment("frontend")
    assert asks_for_traces(None, environment)
    refuse_unsupported(environment)
    collector = collector_from(None, environment)
    host, _, port = collector.address.rpartition(":")
    (rule,) = rendered.one("NetworkPolicy", "drafthouse-tracing")["spec"]["egress"]
    assert rule["ports"] == [{"protocol": "TCP", "port": int(port)}]
    assert namespaces(rule["to"]) == [host.split(".")[1]]


# ---- addresses


def test_ports_are_the_same_everywhere(rendered: Rendering):
    engine = parse(EngineConfig, [], rendered.environment("engine"), program="engine")
    frontend = parse(FrontendConfig, [], rendered.environment("frontend"), program="frontend")
    ports = {"engine": int(engine.listen.rpartition(":")[2]), "frontend": frontend.port}
    assert engine.listen == f"tcp://0.0.0.0:{ports['engine']}" and frontend.host == "0.0.0.0"
    for role, name in (("engine", "engine"), ("frontend", "http")):
        assert rendered.container(role)["ports"] == [{"name": name, "containerPort": ports[role]}]
        for service in rendered.all("Service"):
            if selects(service["spec"]["selector"], rendered.deployment(role)):
                assert service["spec"]["ports"] == [{"name": name, "port": ports[role], "targetPort": name}]
    for policy in rendered.all("NetworkPolicy"):
        for rule in policy["spec"].get("ingress", []):
            role = "engine" if policy["metadata"]["name"] == "drafthouse-engine" else "frontend"
            assert rule["ports"] == [{"protocol": "TCP", "port": ports[role]}]


def test_frontends_name_the_headless_service_of_the_engines(rendered: Rendering):
    address = parse(FrontendConfig, [], rendered.environment("frontend"), program="frontend").engine
    service = rendered.one("Service", "drafthouse-engine-headless")
    assert address == f"tcp://{service['metadata']['name']}:{service['spec']['ports'][0]['port']}"
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"] is True


def test_every_selector_takes_the_pods_of_its_own_component_only(rendered: Rendering):
    for manifest in rendered.manifests:
        spec = manifest.get("spec", {})
        selector = spec.get("podSelector") or spec.get("selector")
        if manifest["kind"] == "PersistentVolumeClaim" or not selector:
            continue
        component = manifest["metadata"]["labels"]["app.kubernetes.io/component"]
        taken = [role for role in ROLES if selects(selector, rendered.deployment(role))]
        assert taken == [component], f"{manifest['kind']} {manifest['metadata']['name']}"


def test_the_gateway_finds_frontends_and_no_engine(rendered: Rendering):
    label = "inference.networking.k8s.io/engine-type"
    labels = {role: rendered.deployment(role)["spec"]["template"]["metadata"]["labels"] for role in ROLES}
    assert labels["frontend"][label] == "vllm" and label not in labels["engine"]


def namespaces(peers: list[Manifest]) -> list[str]:
    return [peer["namespaceSelector"]["matchLabels"]["kubernetes.io/metadata.name"] for peer in peers]


def test_only_frontends_reach_an_engine_and_it_reaches_nobody(rendered: Rendering):
    spec = rendered.one("NetworkPolicy", "drafthouse-engine")["spec"]
    assert spec["policyTypes"] == ["Ingress", "Egress"] and spec["egress"] == []
    (rule,) = spec["ingress"]
    (peer,) = rule["from"]
    assert peer.keys() == {"podSelector"}  # of this namespace
    assert [role for role in ROLES if selects(peer["podSelector"], rendered.deployment(role))] == ["frontend"]


def test_only_the_ingress_and_prometheus_reach_a_frontend(production: Rendering):
    policies = [
        policy["spec"]
        for policy in production.all("NetworkPolicy")
        if selects(policy["spec"]["podSelector"], production.deployment("frontend"))
    ]
    assert any({"Ingress", "Egress"} <= set(spec["policyTypes"]) for spec in policies)
    reached_by = [name for spec in policies for rule in spec.get("ingress", []) for name in namespaces(rule["from"])]
    assert sorted(reached_by) == ["monitoring", "traefik"]


# ---- life and death


def test_a_frontend_has_the_time_to_drain(rendered: Rendering):
    frontend = parse(FrontendConfig, [], rendered.environment("frontend"), program="frontend")
    grace_s = rendered.pod("frontend")["terminationGracePeriodSeconds"]
    assert grace_s >= frontend.drain_timeout_s + FRONTEND_STOP_MARGIN_S


def test_new_requests_are_served_until_every_balancer_knows_that_a_frontend_goes(rendered: Rendering):
    """Those that follow the endpoints are told by Kubernetes, the others find out by asking as the probe does."""
    frontend = parse(FrontendConfig, [], rendered.environment("frontend"), program="frontend")
    assert "lifecycle" not in rendered.container("frontend"), "a hook before SIGTERM would delay the 503 of /ready"
    assert frontend.drain_grace_s >= 10
    assert frontend.drain_timeout_s - frontend.drain_grace_s >= 60, "what begins at the end of the grace can finish"


def test_an_engine_has_the_time_to_drain(rendered: Rendering):
    drain_s = parse(EngineConfig, [], rendered.environment("engine"), program="engine").drain_timeout_s
    assert rendered.pod("engine")["terminationGracePeriodSeconds"] >= drain_s + 2 * CLOSE_TIMEOUT_S


def test_waiting_for_an_engine_restarts_no_frontend(rendered: Rendering):
    container = rendered.container("frontend")
    paths = {name: container[name]["httpGet"]["path"] for name in container if name.endswith("Probe")}
    assert paths == {"startupProbe": "/health", "readinessProbe": "/ready", "livenessProbe": "/health"}
    assert all(container[name]["httpGet"]["port"] == "http" for name in paths)


def test_an_engine_is_probed_by_the_file_it_touches_and_never_by_its_port(rendered: Rendering):
    container = rendered.container("engine")
    probes = [container[name] for name in ("startupProbe", "readinessProbe", "livenessProbe")]
    alive_file = parse(EngineConfig, [], rendered.environment("engine"), program="engine").alive_file
    assert alive_file is not None
    for probe in probes:
        assert "tcpSocket" not in probe and alive_file in probe["exec"]["command"][2]
        assert seconds_of_find(probe["exec"]["command"]) >= 6 * INTERVAL_S
    loading_s = probes[0]["periodSeconds"] * probes[0]["failureThreshold"]
    assert rendered.deployment("engine")["spec"]["progressDeadlineSeconds"] > loading_s >= 1800


def test_no_disruption_budget_forbids_the_drain_of_a_node(rendered: Rendering):
    budgets = rendered.all("PodDisruptionBudget")
    assert len(budgets) == 2 and all(budget["spec"]["maxUnavailable"] == 1 for budget in budgets)


# ---- safety


@pytest.mark.parametrize("role", ROLES)
def test_pods_are_confined(rendered: Rendering, role: str):
    pod, container = rendered.pod(role), rendered.container(role)
    security = pod["securityContext"]
    assert security["runAsNonRoot"] is True and security["seccompProfile"] == {"type": "RuntimeDefault"}
    assert f"--uid {security['runAsUser']} " in (ROOT / "deploy" / "compose" / "Dockerfile").read_text()
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert pod["automountServiceAccountToken"] is False
    assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys()
    assert all(volume.keys() & {"emptyDir", "secret", "persistentVolumeClaim"} for volume in pod["volumes"])
    assert {"cpu", "memory"} <= container["resources"]["requests"].keys()
    assert "memory" in container["resources"]["limits"]


def test_no_secret_is_shipped(rendered: Rendering):
    assert rendered.all("Secret") == []


@pytest.mark.parametrize("overlay", ["overlays/cpu", "overlays/production"])
def test_an_overlay_pins_its_images_and_lives_in_one_namespace(overlay: str):
    rendered = render(overlay)
    for role in ROLES:
        image, _, tag = rendered.container(role)["image"].rpartition(":")
        assert image.endswith(f"drafthouse-{role}") and re.match(r"\d+\.\d+\.\d+", tag)
    (namespace,) = rendered.all("Namespace")
    assert namespace["metadata"]["labels"] == {"pod-security.kubernetes.io/enforce": "restricted"}
    owned = [manifest for manifest in rendered.manifests if manifest is not namespace]
    assert {manifest["metadata"]["namespace"] for manifest in owned} == {namespace["metadata"]["name"]}


# ---- scaling


def test_an_autoscaled_deployment_has_no_number_of_its_own(production: Rendering):
    (hpa,) = production.all("HorizontalPodAutoscaler")
    (scaled,) = production.all("ScaledObject")
    assert hpa["spec"]["scaleTargetRef"]["name"] == "drafthouse-frontend"
    assert scaled["spec"]["scaleTargetRef"]["name"] == "drafthouse-engine"
    assert all("replicas" not in production.deployment(role)["spec"] for role in ROLES)
    assert "cpu" in production.container("frontend")["resources"]["requests"]  # what utilisation is a share of
    assert scaled["spec"]["minReplicaCount"] >= 1


def test_frontends_in_the_middle_of_a_rollout_still_fit_on_an_engine(production: Rendering):
    (hpa,) = production.all("HorizontalPodAutoscaler")
    assert 2 * (hpa["spec"]["maxReplicas"] + 1) <= MAX_FRONTENDS


def test_engines_scale_on_a_metric_that_exists_in_the_namespace_they_live_in(production: Rendering):
    (scaled,) = production.all("ScaledObject")
    (trigger,) = scaled["spec"]["triggers"]
    found = re.fullmatch(r'sum\(max by \(engine\) \(([\w:]+)\{namespace="(\w+)"\}\)\)', trigger["metadata"]["query"])
    assert found is not None
    assert found[1] == "vllm:num_requests_waiting" and FAMILIES[found[1]].kind == "gauge"
    assert found[2] == scaled["metadata"]["namespace"]


# ---- monitoring


def test_the_rules_are_those_of_compose(production: Rendering):
    (rule,) = production.all("PrometheusRule")
    source = yaml.safe_load((ROOT / "deploy" / "monitoring" / "rules.yml").read_text())
    assert rule["spec"] == source, "run deploy/kubernetes/update-rules.sh"


def test_every_frontend_is_scraped_for_its_own_families_and_one_of_them_for_the_engines(production: Rendering):
    (pods,) = production.all("PodMonitor")
    (endpoint,) = pods["spec"]["podMetricsEndpoints"]
    assert (endpoint["port"], endpoint["path"]) == ("http", "/metrics/frontend")
    assert selects(pods["spec"]["selector"], production.deployment("frontend"))
    (totals,) = production.all("ScrapeConfig")
    (targets,) = totals["spec"]["staticConfigs"]
    service = production.one("Service", "drafthouse-totals")
    place = (
        f"{service['metadata']['name']}.{service['metadata']['namespace']}.svc:{service['spec']['ports'][0]['port']}"
    )
    assert targets == {"targets": [place], "labels": {"namespace": service["metadata"]["namespace"]}}
    assert totals["spec"]["metricsPath"] == "/metrics/engine"
    assert service["spec"]["publishNotReadyAddresses"] is True


def test_the_jobs_are_called_as_compose_calls_them_and_as_the_rules_do(production: Rendering):
    compose = yaml.safe_load((ROOT / "deploy" / "monitoring" / "prometheus.yml").read_text())
    paths = {job["job_name"]: job.get("metrics_path", "/metrics") for job in compose["scrape_configs"]}
    endpoint = production.all("PodMonitor")[0]["spec"]["podMetricsEndpoints"][0]
    (relabelling,) = endpoint["relabelings"]
    totals = production.all("ScrapeConfig")[0]["spec"]
    ours = {relabelling["replacement"]: endpoint["path"], totals["jobName"]: totals["metricsPath"]}
    assert relabelling["targetLabel"] == "job"
    assert ours == {name: paths.get(name) for name in ours}
    rules = yaml.safe_dump(production.all("PrometheusRule"))
    assert set(re.findall(r'job="([^"]+)"', rules)) <= set(ours)
