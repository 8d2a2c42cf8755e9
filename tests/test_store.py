"""Which store an engine opens."""

import pytest

from kvloft.config import Config
from kvloft.errors import ConfigError
from kvloft.seam.shape import CacheShape, GroupShape
from kvloft.store import open_store


def test_a_server_is_refused_for_several_groups_with_the_fix() -> None:
    shape = CacheShape((GroupShape(16), GroupShape(16, kind="window", reach=31)))
    with pytest.raises(ConfigError, match=r"server = unix:/run/a.sock .* has 2; leave server out, or kv_groups at \"one\""):
        open_store(Config(server="/run/a.sock"), shape, bytes(32), "", disk_path=None)
