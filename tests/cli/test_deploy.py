"""Tests examples/deploy: the files use existing options and settings, and the server and its
engines share one socket.

External tools check that the files follow the compose and Kubernetes specifications. The systemd
unit's command is run with the directories that systemd would create.
"""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

import kvloft
from kvloft.cli import metrics, serve
from kvloft.cli.commands import build_parser
from kvloft.config.sources import load_config

KVLOFT = [sys.executable, "-m", "kvloft.cli"]
DEPLOY = Path(__file__).parents[2] / "examples" / "deploy"


@dataclass(frozen=True, slots=True)
class Container:
    """A container of a deployment. ``mounts`` maps each path in the container to its content."""

    argv: list[str]
    mounts: dict[str, str]
    grace_s: int


def default(part: str) -> str:
    """Replace ``${NAME:-value}`` with the default value, as compose does if NAME is not set."""
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", part)


def of_compose() -> list[Container]:
    found = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    containers = []
    for service in found["services"].values():
        mounts = {
            inside: name for name, inside in (volume.split(":") for volume in service["volumes"])
        }
        assert set(mounts.values()) <= set(found["volumes"])
        argv = [default(part) for part in (*service.get("entrypoint", []), *service["command"])]
        containers.append(
            Container(argv, mounts, int(service["stop_grace_period"].removesuffix("s")))
        )
    return containers


def manifests() -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()))


def of_kubernetes() -> list[Container]:
    containers = []
    for document in manifests():
        if document["kind"] == "PersistentVolumeClaim":
            continue
        template = document["spec"]["template"]
        assert (
            document["spec"]["selector"]["matchLabels"].items()
            <= template["metadata"]["labels"].items()
        )
        spec = template["spec"]
        paths = {
            volume["name"]: volume.get("hostPath", {}).get("path", volume["name"])
            for volume in spec["volumes"]
        }
        for one in spec["containers"]:
            mounts = {mount["mountPath"]: paths[mount["name"]] for mount in one["volumeMounts"]}
            containers.append(
                Container(
                    [*one["command"], *one["args"]], mounts, spec["terminationGracePeriodSeconds"]
                )
            )
    return containers


def parsed(argv: list[str]) -> argparse.Namespace:
    return build_parser().parse_args(argv, argparse.Namespace(flags=[]))


def transfer_config(argv: list[str]) -> dict[str, Any]:
    config: dict[str, Any] = json.loads(argv[argv.index("--kv-transfer-config") + 1])
    return config


@pytest.mark.parametrize(
    "containers", [of_compose(), of_kubernetes()], ids=["compose", "kubernetes"]
)
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


def test_every_probe_has_a_timeout_and_asks_the_server_at_its_socket() -> None:
    (server,), (engine,) = (
        document["spec"]["template"]["spec"]["containers"]
        for document in manifests()
        if "selector" in document["spec"]
    )
    probes = [one[name] for one in (server, engine) for name in one if name.endswith("Probe")]
    assert len(probes) == 4
    assert all(probe["timeoutSeconds"] >= 5 for probe in probes), (
        "Kubernetes' default of 1 s is too short for kvloft status"
    )
    program, *argv = server["readinessProbe"]["exec"]["command"]
    assert program == "kvloft"
    assert parsed(argv).socket == parsed([*server["command"], *server["args"]][1:]).socket


def test_composes_health_check_asks_the_server_at_its_socket() -> None:
    service = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]["kvloft"]
    kind, program, *argv = service["healthcheck"]["test"]
    assert (kind, program) == ("CMD", "kvloft")
    assert f"--socket={parsed(argv).socket}" in service["command"]


def test_an_image_with_vllm_serve_as_entrypoint_starts_both() -> None:
    """vLLM's image has the entrypoint `vllm serve`, so each service must name its program, and its
    command must contain only arguments.
    """
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    assert [service.get("entrypoint") for service in services.values()] == [
        ["kvloft", "serve"],
        ["vllm", "serve"],
        ["vllm", "serve"],
    ]
    assert services["kvloft"]["command"][0].startswith("--") and services["engine-0"]["command"][
        0
    ].startswith("${MODEL")


def test_the_production_stacks_engines_use_the_daemon_sets_socket() -> None:
    values = yaml.safe_load((DEPLOY / "production-stack.yaml").read_text())
    server = of_kubernetes()[0]
    (model,) = values["servingEngineSpec"]["modelSpec"]
    config = transfer_config(model["vllmConfig"]["extraArgs"])
    socket = load_config(config["kv_connector_extra_config"]).server
    assert socket == serve.settings(parsed(server.argv[1:])).server is not None
    (volume,), (mount,) = model["extraVolumes"], model["extraVolumeMounts"]
    assert server.mounts[mount["mountPath"]] == volume["hostPath"]["path"]
    assert volume["name"] == mount["name"]
    assert model["vllmConfig"]["enablePrefixCaching"], (
        "must be set: the chart disables it by default"
    )


def of_compose_spec(path: Path) -> int:
    argv = [
        sys.executable,
        "-m",
        "check_jsonschema",
        "--builtin-schema",
        "vendor.compose-spec",
        str(path),
    ]
    return subprocess.run(argv, capture_output=True, timeout=120, check=False).returncode


def test_the_compose_file_follows_its_specification(tmp_path: Path) -> None:
    text = (DEPLOY / "compose.yaml").read_text()
    wrong = tmp_path / "compose.yaml"
    wrong.write_text(text.replace("stop_grace_period", "stop_grace"))
    assert [of_compose_spec(path) for path in (DEPLOY / "compose.yaml", wrong)] == [0, 1]


@pytest.mark.parametrize("version", ["1.28", kubernetes_validate.latest_version()])
def test_kubernetes_understands_the_manifests(version: str) -> None:
    documents = manifests()
    assert [document["kind"] for document in documents] == [
        "DaemonSet",
        "PersistentVolumeClaim",
        "Deployment",
    ]
    for document in documents:
        kubernetes_validate.validate(document, version, strict=True)
        if document["kind"] == "PersistentVolumeClaim":
            continue
        spec = document["spec"]["template"]["spec"]
        spec["terminationGrace"] = spec.pop("terminationGracePeriodSeconds")
        with pytest.raises(kubernetes_validate.ValidationError):
            kubernetes_validate.validate(document, version, strict=True)


UNIT = (DEPLOY / "kvloft.service").read_text()


@pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="this machine has no systemd-analyze"
)
def test_systemd_understands_the_unit(tmp_path: Path) -> None:
    assert verified(tmp_path, UNIT) == ""
    assert "sometimes" in verified(
        tmp_path, UNIT.replace("Restart=on-failure", "Restart=sometimes")
    ), "the checker must detect mistakes"


def verified(folder: Path, text: str) -> str:
    unit = folder / "kvloft.service"
    unit.write_text(text.replace("/opt/kvloft/bin/kvloft", "/bin/true"))
    argv, env = (
        ["systemd-analyze", "verify", str(unit)],
        os.environ | {"XDG_RUNTIME_DIR": str(folder)},
    )
    return subprocess.run(argv, capture_output=True, text=True, timeout=60, env=env).stderr


def unit_command(run: Path, cache: Path) -> list[str]:
    """Return the unit's command with small sizes, and with the given directories instead of /run
    and /var/cache.
    """
    (line,) = re.findall(r"^ExecStart=/opt/kvloft/bin/kvloft (.*)$", UNIT, re.MULTILINE)
    for written, here in {
        "%t": str(run),
        "%C": str(cache),
        "64GiB": "16MiB",
        "500GiB": "64MiB",
        "9180": "0",
    }.items():
        assert written in line
        line = line.replace(written, here)
    return [*KVLOFT, *line.split()]


def test_the_units_command_starts_in_the_directories_that_systemd_makes() -> None:
    """systemd creates RuntimeDirectory under %t and CacheDirectory under %C. Only the unit's user
    can access these directories.
    """
    lines = {
        f"{kind}Directory{rest}"
        for kind in ("Runtime", "Cache")
        for rest in ("=kvloft", "Mode=0700")
    }
    assert lines <= set(UNIT.splitlines())
    with tempfile.TemporaryDirectory(prefix="kv-") as folder:  # a socket path must be short
        run, cache = Path(folder, "run"), Path(folder, "cache")
        for made in (run / "kvloft", cache / "kvloft"):
            made.mkdir(parents=True, mode=0o700)
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        with subprocess.Popen(unit_command(run, cache), **pipes) as server:
            assert server.stdout is not None
            try:
                assert f"unix:{run}/kvloft/kvloft.sock" in server.stdout.readline()
                status = [*KVLOFT, "status", "--socket", f"{run}/kvloft/kvloft.sock"]
                assert (
                    subprocess.run(status, capture_output=True, timeout=120, check=False).returncode
                    == 0
                )
                assert (cache / "kvloft" / "disk").is_dir()
                server.send_signal(signal.SIGTERM)
                server.stdout.read()
                assert server.wait(timeout=120) == 0
            finally:
                server.kill()


def test_prometheus_scrapes_composes_services_and_loads_the_alert_rules() -> None:
    config = yaml.safe_load((DEPLOY / "prometheus.yaml").read_text())
    assert [(DEPLOY / name).is_file() for name in config["rule_files"]] == [True]
    scraped = {
        job["job_name"]: [target for each in job["static_configs"] for target in each["targets"]]
        for job in config["scrape_configs"]
    }
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    published = {
        name: f"localhost:{service['ports'][0].split(':')[-2]}"
        for name, service in services.items()
    }
    assert scraped["kvloft"] == [published.pop("kvloft")]
    assert scraped["vllm"] == list(published.values())


def test_the_image_installs_this_version() -> None:
    (version,) = re.findall(
        r'^ARG KVLOFT="kvloft\[cu13\]==(.*)"$', (DEPLOY / "Dockerfile").read_text(), re.MULTILINE
    )
    assert version == kvloft.__version__
