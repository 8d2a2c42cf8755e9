"""Server events are logged even if the engine makes no step."""

import os
import tempfile
import threading
from contextlib import closing
from functools import partial

from kvloft import _core
from kvloft.vllm.store_log import EventPoller

PACE = float(os.environ.get("TEST_PACE", "1"))


def test_an_idle_engine_logs_the_connection_to_its_server() -> None:
    heard, is_news = list[str](), threading.Condition()

    def tell(session: _core.Session) -> None:
        with is_news:
            heard.extend(session.take_events())
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
        del server  # only then is the socket free
        _server = _core.Server(path, host_bytes=1 << 20)
        poller.close()
        assert not heard, "nothing is logged after close"
        session.close()
