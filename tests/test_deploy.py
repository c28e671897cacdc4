"""The files of deploy/ follow the schemas of Compose and Kubernetes, and use options and paths that exist."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from typer.main import get_command

from tests.support.http_server import example_server
from tidings import Live
from tidings.cli.commands import make_app

DEPLOY = Path(__file__).parents[1] / "deploy"


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    return loaded


@pytest.fixture(scope="module")
def objects() -> dict[str, dict[str, Any]]:
    """The Kubernetes objects, by kind and name."""
    loaded = yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())
    return {f"{each['kind']}/{each['metadata']['name']}": each for each in loaded}


def check_arguments(arguments: list[str]) -> None:
    """Check that these are arguments of `tidings serve`."""
    assert arguments[0] == "serve"
    command = getattr(get_command(make_app()), "commands")["serve"]  # noqa: B009  # typer does not declare it
    with command.make_context("serve", arguments[1:]) as context:
        assert context.params["nats"].startswith("nats://")
        assert context.params["host"] == "0.0.0.0"


def health_paths() -> set[str]:
    return {route.path for route in Live(example_server()).health_routes()}


def load_schema(name: str) -> Any:
    return json.loads((Path(__file__).parent / "schemas" / name).read_text())


def test_compose_file_follows_its_schema(compose: dict[str, Any]) -> None:
    schema = load_schema("compose.json")
    jsonschema.validate(compose, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**compose, "services": {"x": {"imag": "y"}}}, schema)


def test_compose_file_starts_three_replicas_behind_nginx(compose: dict[str, Any]) -> None:
    services = compose["services"]
    tidings = services["tidings"]
    assert tidings["deploy"]["replicas"] == 3
    check_arguments(tidings["command"])
    assert (DEPLOY / tidings["build"]["context"] / tidings["build"]["dockerfile"]).is_file()
    assert any(path in tidings["healthcheck"]["test"][-1] for path in health_paths())
    (configuration,) = services["nginx"]["volumes"]
    nginx = (DEPLOY / configuration.split(":")[0]).read_text()
    assert "server tidings:8765;" in nginx
    assert nginx.count("{") == nginx.count("}")


def check_object(given: dict[str, Any]) -> None:
    """Check the types of all fields, that none is missing, and that none is unknown."""
    jsonschema.validate(given, load_schema("kubernetes.json")[given["kind"]])


def test_kubernetes_objects_follow_their_schemas(objects: dict[str, dict[str, Any]]) -> None:
    assert len(objects) == 5
    for each in objects.values():
        check_object(each)


@pytest.mark.parametrize("wrong", [{"replica": 3}, {"replicas": "3"}, {"selector": None}])
def test_kubernetes_object_with_a_wrong_field_is_noticed(
    objects: dict[str, dict[str, Any]], wrong: dict[str, Any]
) -> None:
    deployment = objects["Deployment/tidings"]
    with pytest.raises(jsonschema.ValidationError):
        check_object({**deployment, "spec": {**deployment["spec"], **wrong}})


def test_kubernetes_probes_ask_for_paths_that_exist(objects: dict[str, dict[str, Any]]) -> None:
    (container,) = objects["Deployment/tidings"]["spec"]["template"]["spec"]["containers"]
    check_arguments(container["args"])
    probes = {name: container[f"{name}Probe"]["httpGet"] for name in ("startup", "liveness", "readiness")}
    assert {probe["path"] for probe in probes.values()} <= health_paths()
    assert {probe["port"] for probe in probes.values()} == {container["ports"][0]["name"]}
    assert probes["readiness"]["path"] == "/health/ready"


def test_kubernetes_names_and_labels_fit_together(objects: dict[str, dict[str, Any]]) -> None:
    for name, workload in (("tidings", "Deployment"), ("tidings-nats", "StatefulSet")):
        labels = objects[f"{workload}/{name}"]["spec"]["template"]["metadata"]["labels"]
        assert objects[f"{workload}/{name}"]["spec"]["selector"]["matchLabels"] == labels
        assert objects[f"Service/{name}"]["spec"]["selector"] == labels
    (container,) = objects["Deployment/tidings"]["spec"]["template"]["spec"]["containers"]
    port = objects["Service/tidings-nats"]["spec"]["ports"][0]["port"]
    assert f"nats://tidings-nats:{port}" in container["args"]
    assert objects["Service/tidings"]["spec"]["sessionAffinity"] == "ClientIP"


@pytest.mark.slow
def test_image_is_built_from_its_lock(tmp_path: Path) -> None:
    """Run the steps of the Dockerfile that copy and install, with an environment in place of the image."""
    steps = (DEPLOY / "Dockerfile").read_text()
    for sources, target in re.findall(r"^COPY (.+) (/src/\S*)$", steps, re.MULTILINE):
        folder = tmp_path / target.lstrip("/")
        for source in sources.split():
            path = DEPLOY.parent / source
            if path.is_dir():
                shutil.copytree(path, folder)
            else:
                folder.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, folder)
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "image"], check=True)
    commands = re.findall(r"^RUN (pip install .+)$", steps, re.MULTILINE)
    for command in commands:
        arguments = [each.replace("/src", str(tmp_path / "src")) for each in command.split()[1:]]
        subprocess.run([tmp_path / "image/bin/python", "-m", "pip", "-qq", *arguments], check=True, timeout=300)
    assert len(commands) == 2

    tidings = tmp_path / "image/bin/tidings"
    assert "serve" in subprocess.check_output([tidings, "--help"], text=True)
    subprocess.run([tmp_path / "image/bin/python", "-c", "import tidings.cluster.nats_client"], check=True)
