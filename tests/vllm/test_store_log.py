"""Tests that events of servers and disks are logged even if the engine does not run a step."""

import logging
import os
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest

from kvloft import _core
from kvloft.vllm.store_log import EventPoller, StoreLog

PACE = float(os.environ.get("TEST_PACE", "1"))


def test_an_idle_engine_logs_the_connection_to_its_server() -> None:
    heard, is_news = list[str](), threading.Condition()

    def tell(session: _core.Session) -> None:
        with is_news:
            heard.extend(line for line, _ in session.take_events())
            is_news.notify_all()

    def has_heard(text: str) -> bool:
        with is_news:
            return is_news.wait_for(lambda: any(text in line for line in heard), timeout=60 * PACE)

    with tempfile.TemporaryDirectory(prefix="kv-") as folder:
        path = f"{folder}/run/kv.sock"
        session = _core.Session.connect(path, frame_bytes=4096, namespace=bytes(32), timeout_s=60.0)
        with closing(EventPoller(partial(tell, session), every_s=0.01)) as poller:
            server = _core.Server(path, host_bytes=1 << 20)
            assert has_heard("connected to the kvloft server")
            assert session.renew()
            server.close(0.0)
            assert has_heard("lost the connection to the kvloft server")
        heard.clear()
        del server  # the socket is released only when the server is dropped
        _server = _core.Server(path, host_bytes=1 << 20)
        poller.close()
        assert not heard, "nothing may be logged after close"
        session.close()


def test_an_engine_logs_once_as_info_that_its_disk_is_back(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    logged: Callable[[], list[logging.LogRecord]],
) -> None:
    caplog.set_level(logging.INFO)

    def open_session() -> _core.Session:
        return _core.Session(
            frame_bytes=4096,
            host_bytes=1 << 20,
            namespace=bytes(32),
            disk_path=str(tmp_path),
            disk_bytes=1 << 24,
        )

    def about_the_disk() -> list[tuple[str, str]]:
        lines = [(record.levelname, record.getMessage()) for record in logged()]
        return [line for line in lines if "disk tier" in line[1]]

    owner, session = open_session(), open_session()
    log = StoreLog(session, bytes(32))
    with closing(EventPoller(log.log_events, every_s=0.01)):
        deadline = time.monotonic() + 60 * PACE
        while not about_the_disk() and time.monotonic() < deadline:
            time.sleep(0.01)
        owner.close()
        while len(about_the_disk()) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.1)
    (closed, refused), (opened, works) = about_the_disk()
    assert (closed, opened) == ("WARNING", "INFO")
    assert "failed to open" in refused
    assert "disk tier: opened with 0 chunks" in works
    session.close()
