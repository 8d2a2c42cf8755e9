"""Records when the pieces of a load are submitted and copied.

`LoadTrace` wraps a mover's load lane and records a timing event after the copies of each piece.
Recording an event takes about one microsecond and does not wait for the device.
"""

from __future__ import annotations

import time
from typing import Any

from kvloft.transfer.cuda import driver


class LoadTrace:
    """Traces the loads of ``mover``. Times are in seconds since `start`."""

    def __init__(self, mover: Any) -> None:
        self._lane, self._mover = mover.load_lane, mover
        self._submit, self._submit_loads = self._lane.submit, mover.submit_loads
        self._lane.submit, mover.submit_loads = self._traced_submit, self._traced_submit_loads
        self._zero = driver.Event(timing=True)
        self._pool = [driver.Event(timing=True) for _ in range(2048)]
        self.start()

    def start(self) -> None:
        """Discard all records, wait for the device, and restart the time measurement."""
        driver.synchronize()
        self._zero.record(self._lane.copy_streams[0])
        driver.synchronize()
        self._begin = time.perf_counter()
        self._pieces: list[tuple[float, float, int]] = []
        self._calls: list[tuple[float, float]] = []

    def _now(self) -> float:
        return time.perf_counter() - self._begin

    def _traced_submit_loads(self, plans: Any) -> None:
        begin = self._now()
        self._submit_loads(plans)
        self._calls.append((begin, self._now()))

    def _traced_submit(self, piece: Any, **more: Any) -> Any:
        begin = self._now()
        sent = self._submit(piece, **more)
        if len(self._pieces) < len(self._pool):
            self._pool[len(self._pieces)].record(self._lane._slots[-1].copy_stream)
            self._pieces.append((begin, self._now(), piece.num_bytes))
        return sent

    def summary(self) -> dict[str, Any]:
        """Summarize when pieces were submitted and copied.

        ``worst_gaps_ms`` lists the six longest gaps between copies. A gap excludes the time to
        transfer a piece's bytes at full link speed.
        """
        driver.synchronize()
        done = [event.seconds_since(self._zero) for event in self._pool[: len(self._pieces)]]
        if not done:
            return {}
        gaps = [
            (after - max(before, piece[0]) - piece[2] / 55.4e9, after)
            for before, after, piece in zip(done, done[1:], self._pieces[1:], strict=False)
        ]
        total = sum(piece[2] for piece in self._pieces)
        return {
            "submit_loads_ms": [(round(a * 1e3, 2), round(b * 1e3, 2)) for a, b in self._calls],
            "first_submit_ms": self._pieces[0][0] * 1e3,
            "last_submit_ms": self._pieces[-1][0] * 1e3,
            "submit_each_us": sum(b - a for a, b, _ in self._pieces) / len(self._pieces) * 1e6,
            "first_copied_ms": done[0] * 1e3,
            "last_copied_ms": done[-1] * 1e3,
            "pieces": len(self._pieces),
            "bytes": total,
            "gbps_first_to_last": (total - self._pieces[0][2])
            / max(done[-1] - done[0], 1e-9)
            / 1e9,
            "late_submits": sum(
                1
                for before, piece in zip(done, self._pieces[1:], strict=False)
                if piece[0] > before
            ),
            "worst_gaps_ms": [
                (round(gap * 1e3, 2), round(at * 1e3, 1))
                for gap, at in sorted(gaps, reverse=True)[:6]
            ],
        }
