"""The Kubernetes manifests as a cluster would get them: rendered, found by kind and name, their environment put together.

Rendered by kubectl or kustomize where there is one; the tests that need a rendering skip where there is none.
"""

import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
KUBERNETES = ROOT / "deploy" / "kubernetes"
COMPONENTS = sorted(path.name for path in (KUBERNETES / "components").iterdir())
POD_NAME = "drafthouse-engine-7c9f8d6b5c-x2x9z"
# Everything that is shipped to be applied, and every component by itself on the base.
CASES = ["base", "overlays/cpu", "overlays/production", *(f"components/{name}" for name in COMPONENTS)]

_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast, where it was built

Manifest = dict[str, Any]


@dataclass(frozen=True)
class Rendering:
    """What `kubectl apply -k` would send."""

    name: str
    manifests: tuple[Manifest, ...]

    def all(self, kind: str) -> list[Manifest]:
        return [manifest for manifest in self.manifests if manifest["kind"] == kind]

    def one(self, kind: str, name: str) -> Manifest:
        found = [manifest for manifest in self.all(kind) if manifest["metadata"]["name"] == name]
        assert len(found) == 1, f"{self.name} has {len(found)} {kind} {name}"
        return found[0]

    def deployment(self, role: str) -> Manifest:
        return self.one("Deployment", f"drafthouse-{role}")

    def pod(self, role: str) -> Manifest:
        spec: Manifest = self.deployment(role)["spec"]["template"]["spec"]
        return spec

    def container(self, role: str) -> Manifest:
        containers = self.pod(role)["containers"]
        assert [container["name"] for container in containers] == [role]
        return dict(containers[0])

    def environment(self, role: str) -> dict[str, str]:
        """As the kubelet puts it together: the ConfigMaps in order, then single variables."""
        container = self.container(role)
        values: dict[str, str] = {}
        for source in container.get("envFrom", []):
            values |= self.one("ConfigMap", source["configMapRef"]["name"])["data"]
        for variable in container.get("env", []):
            values[variable["name"]] = variable.get("value") or _from_downward_api(variable["valueFrom"], container)
        return values


def _from_downward_api(source: Manifest, container: Manifest) -> str:
    if source.keys() == {"fieldRef"}:
        assert source["fieldRef"]["fieldPath"] == "metadata.name"
        return POD_NAME
    place, _, resource = source["resourceFieldRef"]["resource"].partition(".")
    return str(container["resources"][place][resource])


@cache
def renderer() -> tuple[str, ...] | None:
    """The command that renders a directory."""
    if shutil.which("kubectl"):
        return ("kubectl", "kustomize")
    return ("kustomize", "build") if shutil.which("kustomize") else None


def render(case: str) -> Rendering:
    """`case`: a directory of deploy/kubernetes; a component is put on the base."""
    command = renderer()
    if command is None:
        pytest.skip("neither kubectl nor kustomize is installed, so nothing can be rendered")
    return _render(command, case)


@cache
def _render(command: tuple[str, ...], case: str) -> Rendering:
    with tempfile.TemporaryDirectory(prefix="drafthouse-test-") as directory:
        path = KUBERNETES / case
        if case.startswith("components/"):
            path = Path(directory)
            (path / "kustomization.yaml").write_text(_on_base(case, path))
        done = subprocess.run([*command, str(path)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    # kubectl goes on after some mistakes (a deprecated field, a patch without a target) and only warns.
    assert done.stderr == ""
    return Rendering(case, tuple(yaml.load_all(done.stdout, Loader=_Loader)))


def _on_base(component: str, at: Path) -> str:
    kustomization = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": [os.path.relpath(KUBERNETES / "base", at.resolve())],
        "components": [os.path.relpath(KUBERNETES / component, at.resolve())],
    }
    return yaml.safe_dump(kustomization)


def selects(selector: Manifest, manifest: Manifest) -> bool:
    """Whether a selector of labels (matchLabels, or a Service's plain one) takes the pods of a Deployment."""
    labels = manifest["spec"]["template"]["metadata"]["labels"]
    wanted = selector.get("matchLabels", selector)
    return bool(wanted) and all(labels.get(name) == value for name, value in wanted.items())


def seconds_of_find(command: list[str]) -> int:
    """The age in seconds that a probe by `find PATH -mmin -N` allows."""
    shell, flag, script = command
    assert (shell, flag) == ("sh", "-c")
    minutes = script.split(" -mmin -")[1].split(")")[0]
    return 60 * int(minutes)
