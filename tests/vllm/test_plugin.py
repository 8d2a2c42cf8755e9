"""Tests that vLLM's own factory reports invalid settings while vLLM checks its arguments, before
models or engines are created.
"""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

from kvloft.errors import ConfigError
from kvloft.vllm import KVLoftConnector
from kvloft.vllm.connector import KVLoftGroupsConnector
from kvloft.vllm.plugin import NAME, check_settings_early, register

OTHER = "ExampleConnector"


@pytest.fixture
def factory() -> Iterator[Any]:
    """Return vLLM's factory with the plugin registered, and restore it after the test."""
    method, registry = (
        vars(KVConnectorFactory)["get_connector_class"],
        dict(KVConnectorFactory._registry),
    )
    current: Any = KVConnectorFactory.get_connector_class
    if hasattr(current, "kvloft_wraps"):
        KVConnectorFactory.get_connector_class = staticmethod(current.__wrapped__)  # type: ignore[method-assign]
    register()
    register()
    yield KVConnectorFactory
    KVConnectorFactory.get_connector_class = method  # type: ignore[method-assign]
    KVConnectorFactory._registry = registry


def transfer(name: str = NAME, **more: Any) -> KVTransferConfig:
    return KVTransferConfig(kv_connector=name, kv_role="kv_both", **more)


BY_NAME_AND_MODULE = pytest.mark.parametrize(
    "how", [{}, {"kv_connector_module_path": "kvloft.vllm"}], ids=["name", "module"]
)


@BY_NAME_AND_MODULE
def test_a_wrong_setting_is_reported_when_vllm_checks_for_the_hybrid_manager(
    factory: Any, how: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError, match=r"host_sze.*did you mean host_size"):
        factory.supports_hma_config(transfer(kv_connector_extra_config={"host_sze": "1GiB"}, **how))
    right = {"host_size": "1GiB", "kv_groups": "one"}
    assert factory.supports_hma_config(transfer(kv_connector_extra_config=right, **how)) is False


def test_unsupported_hardware_is_reported_then_too(factory: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"^kvloft: host_size = 900TiB .* is more than this machine's memory"
    ):
        factory.get_connector_class(transfer(kv_connector_extra_config={"host_size": "900TiB"}))
    with pytest.raises(
        ConfigError,
        match=r"^kvloft: disk_path = /proc/kvloft \(kv_connector_extra_config\) cannot be created",
    ):
        factory.get_connector_class(
            transfer(kv_connector_extra_config={"disk_path": "/proc/kvloft"})
        )


def test_a_wrong_setting_inside_multi_connector_is_reported(factory: Any) -> None:
    child = {
        "kv_connector": NAME,
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"host_sze": "1GiB"},
    }
    with pytest.raises(ConfigError, match="host_sze"):
        factory.supports_hma_config(
            transfer("MultiConnector", kv_connector_extra_config={"connectors": [child]})
        )


def test_a_wrong_environment_variable_or_file_is_reported(
    factory: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("KVLOFT_HOST_SZE", "1GiB")
    with pytest.raises(ConfigError, match=r"KVLOFT_HOST_SZE.*did you mean KVLOFT_HOST_SIZE"):
        factory.get_connector_class(transfer())
    monkeypatch.delenv("KVLOFT_HOST_SZE")
    (tmp_path / "kvloft.yaml").write_text("host_sze: 1GiB\n")
    monkeypatch.setenv("KVLOFT_CONFIG", str(tmp_path / "kvloft.yaml"))
    with pytest.raises(ConfigError, match=r"host_sze.*file .*kvloft\.yaml"):
        factory.get_connector_class(transfer())


def test_settings_valid_at_start_are_not_read_again(
    factory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert issubclass(factory.get_connector_class(transfer()), KVLoftConnector)
    monkeypatch.setenv("KVLOFT_HOST_SZE", "1GiB")
    assert issubclass(factory.get_connector_class(transfer()), KVLoftConnector)


def test_other_connectors_are_none_of_our_business(
    factory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVLOFT_HOST_SZE", "1GiB")
    given = transfer(OTHER, kv_connector_extra_config={"host_sze": 1})
    assert factory.get_connector_class(given).__name__ == OTHER
    with pytest.raises(ValueError, match="Unsupported connector type: nothing"):
        factory.get_connector_class(transfer("nothing"))


def test_a_call_is_wrapped_once_and_keeps_its_arguments() -> None:
    calls: list[Any] = []

    class Factory:
        @classmethod
        def get_connector_class(cls, config: Any, *args: Any, **kwargs: Any) -> Any:
            calls.append((args, kwargs))
            return KVLoftConnector

    for _ in range(2):
        check_settings_early(Factory)
    wrapped: Any = Factory.get_connector_class
    assert not hasattr(wrapped.__wrapped__, "kvloft_wraps")
    given = SimpleNamespace(kv_connector_extra_config=None)
    assert issubclass(Factory().get_connector_class(given, 1, more=2), KVLoftConnector)
    assert calls == [((1,), {"more": 2})]


def test_a_factory_that_looks_up_in_another_way_is_left_alone() -> None:
    class Factory:
        pass

    check_settings_early(Factory)
    assert "get_connector_class" not in vars(Factory)


@pytest.mark.parametrize(
    ("extra", "has_groups", "is_grouped"),
    [
        ({}, True, True),
        ({}, False, False),
        ({"kv_groups": "auto"}, True, True),
        ({"kv_groups": "one"}, True, False),
        ({"kv_groups": "all"}, True, True),
        ({"kv_groups": "all"}, False, True),
    ],
)
def test_vllm_keeps_several_groups_if_supported_and_not_overridden(
    factory: Any,
    extra: dict[str, str],
    has_groups: bool,
    is_grouped: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvloft.vllm.connector.HAS_GROUPS", has_groups)
    for _ in range(2):
        wanted = transfer(kv_connector_extra_config={"host_size": "1GiB", **extra})
        assert factory.supports_hma_config(wanted) is is_grouped
        assert factory.get_connector_class(wanted).__name__ == (
            "KVLoftGroupsConnector" if is_grouped else NAME
        )


@pytest.mark.parametrize("connector", [KVLoftConnector, KVLoftGroupsConnector])
def test_every_connector_class_is_found_by_its_own_name(factory: Any, connector: Any) -> None:
    """MultiConnector looks up the class of a child by name when it rebuilds statistics."""
    assert factory.get_connector_class_by_name(connector.__name__) is connector


@pytest.mark.parametrize("is_enabled", [False, True])
@pytest.mark.parametrize(
    ("connector", "encoder", "is_kept"),
    [
        (NAME, None, True),
        (NAME, SimpleNamespace(is_ec_consumer=False), True),
        (NAME, SimpleNamespace(is_ec_consumer=True), False),
        ("NixlConnector", None, False),
    ],
)
def test_media_embedding_inputs_stay_as_the_user_set_them(
    connector: str, encoder: Any, is_kept: bool, is_enabled: bool
) -> None:
    """Otherwise, a request for media embeddings without tensors would stop the engine."""
    register()
    media = SimpleNamespace(enable_mm_embeds=is_enabled, allow_missing_mm_embeddings=False)
    config: Any = SimpleNamespace(
        model_config=SimpleNamespace(multimodal_config=media),
        kv_transfer_config=KVTransferConfig(kv_connector=connector, kv_role="kv_both"),
        ec_transfer_config=encoder,
    )
    VllmConfig._resolve_mm_embedding_inputs(config)
    assert media.enable_mm_embeds is (is_enabled or not is_kept)
    assert media.allow_missing_mm_embeddings is not is_kept
