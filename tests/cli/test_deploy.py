"""examples/deploy for containers: what kvloft is told there are its own options and settings, and both sides find one socket.

The files follow the specifications of compose and of Kubernetes, as tools read them that others made.
"""

import argparse
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from kvloft.cli import metrics, serve
from kvloft.cli.commands import build_parser
from kvloft.config import load_config

DEPLOY = Path(__file__).parents[2] / "examples" / "deploy"


@dataclass(frozen=True, slots=True)
class Container:
    """``mounts``: path inside -> what is there."""

    argv: list[str]
    mounts: dict[str, str]
    grace_s: int


def of_compose() -> list[Container]:
    found = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    containers = []
    for service in found["services"].values():
        mounts = {inside: name for name, inside in (volume.split(":") for volume in service["volumes"])}
        assert set(mounts.values()) <= set(found["volumes"])
        containers.append(Container(service["command"], mounts, int(service["stop_grace_period"].removesuffix("s"))))
    return containers


def of_kubernetes() -> list[Container]:
    containers = []
    for document in yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()):
        template = document["spec"]["template"]
        assert document["spec"]["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
        spec = template["spec"]
        paths = {volume["name"]: volume["hostPath"]["path"] for volume in spec["volumes"]}
        for one in spec["containers"]:
            mounts = {mount["mountPath"]: paths[mount["name"]] for mount in one["volumeMounts"]}
            containers.append(Container([*one["command"], *one["args"]], mounts, spec["terminationGracePeriodSeconds"]))
    return containers


def parsed(argv: list[str]) -> argparse.Namespace:
    return build_parser().parse_args(argv, argparse.Namespace(flags=[]))


def transfer_config(argv: list[str]) -> dict[str, Any]:
    config: dict[str, Any] = json.loads(argv[argv.index("--kv-transfer-config") + 1])
    return config


@pytest.mark.parametrize("containers", [of_compose(), of_kubernetes()], ids=["compose", "kubernetes"])
def test_a_server_and_engines_share_a_socket(containers: list[Container]) -> None:
    server, *engines = containers
    assert server.argv[:2] == ["kvloft", "serve"]
    args = parsed(server.argv[1:])
    config = serve.settings(args)
    metrics.address(args.metrics)
    assert config.server is not None
    assert server.grace_s > serve.CLOSE_TIMEOUT_S
    assert str(config.disk_path) in server.mounts
    place = str(Path(config.server.removeprefix("unix:")).parent)
    assert engines
    for engine in engines:
        told = transfer_config(engine.argv)
        assert told["kv_connector"] == "KVLoftConnector"
        assert load_config(told["kv_connector_extra_config"]).server == config.server
        assert engine.mounts[place] == server.mounts[place]
        assert engine.grace_s > int(engine.argv[engine.argv.index("--shutdown-timeout") + 1])


def test_the_readiness_probe_is_a_command_of_kvlofts() -> None:
    daemon = next(yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()))
    (container,) = daemon["spec"]["template"]["spec"]["containers"]
    program, *argv = container["readinessProbe"]["exec"]["command"]
    assert program == "kvloft"
    assert parsed(argv).socket == parsed([*container["command"], *container["args"]][1:]).socket


def of_compose_spec(path: Path) -> int:
    argv = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", str(path)]
    return subprocess.run(argv, capture_output=True, timeout=120, check=False).returncode


def test_the_compose_file_follows_its_specification(tmp_path: Path) -> None:
    text = (DEPLOY / "compose.yaml").read_text()
    wrong = tmp_path / "compose.yaml"
    wrong.write_text(text.replace("stop_grace_period", "stop_grace"))
    assert [of_compose_spec(path) for path in (DEPLOY / "compose.yaml", wrong)] == [0, 1]


@pytest.mark.parametrize("version", ["1.28", kubernetes_validate.latest_version()])
def test_kubernetes_understands_the_manifests(version: str) -> None:
    documents = list(yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()))
    assert [document["kind"] for document in documents] == ["DaemonSet", "Deployment"]
    for document in documents:
        kubernetes_validate.validate(document, version, strict=True)
        spec = document["spec"]["template"]["spec"]
        spec["terminationGrace"] = spec.pop("terminationGracePeriodSeconds")
        with pytest.raises(kubernetes_validate.ValidationError):
            kubernetes_validate.validate(document, version, strict=True)
