"""Helpers for tests of `kvloft status` and metrics with a server."""

from kvloft import _core


def save(engine: _core.Session, prompt: list[int]) -> None:
    chain = _core.KeyChain(bytes(32), block_tokens=1)
    chain.append_tokens(prompt)
    (chunks,), _ = engine.reserve(
        [(chain, (), 0, 0, len(prompt), [[block + 1 for block in range(len(prompt))]])]
    )
    assert chunks is not None
    engine.settle(chunks.tickets())


def stats_of(socket: str) -> dict[str, int]:
    """Return the statistics of the only namespace."""
    (space,) = _core.server_status(socket)["namespaces"]
    stats: dict[str, int] = space["stats"]
    return stats
