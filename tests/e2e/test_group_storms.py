"""Stress test of models with multiple KV cache groups, Mamba states and draft models.

Host memory is small, so the groups' chunks are evicted unevenly. Requests have salts, and faults
occur at random times: a failing disk, damaged frames, aborts, resets, restarts and kills. Every
output is compared with the output of vLLM without any cache. This test does not check the number of
hits. KV_STORM_ROUNDS sets the number of rounds.
"""

import os
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from .cache_server import CacheServer
from .client import Engine, Req, kvloft
from .ext4 import Ext4, can_mount, mounted
from .test_groups import Place, place, require_batches, serve  # noqa: F401
from .test_server import server  # noqa: F401
from .test_server import shared as sharing

ROUNDS, SEED = (
    int(os.environ.get("KV_STORM_ROUNDS", "10")),
    int(os.environ.get("KV_STORM_SEED", "1")),
)
SALTS = (None, None, "pepper", "thyme")
Start = Callable[..., Engine]


def told(place: Place, pick: random.Random) -> list[Req]:  # noqa: F811
    """Return prompts that share prefixes, and follow-up turns for some of them."""
    prompts = [
        place.prompt(30 + i, 70 + 41 * i, max_tokens=pick.choice([2, 9, 24])) for i in range(8)
    ]
    for i in range(6):
        before = prompts[i].ids or ()
        history = (
            before[: pick.randrange(40, len(before))]
            if i % 2
            else before + place.truth.tokens(prompts[i])
        )
        prompts.append(
            place.prompt(60 + i, len(history) + 9 + 16 * i, max_tokens=8, before=history)
        )
    return prompts


class Storm:
    """Runs one engine after another on the same disk or the same server."""

    def __init__(
        self,
        place: Place,  # noqa: F811
        start: Callable[[], Engine],
        pick: random.Random,
        disk: Ext4 | None,
    ) -> None:
        self._place, self._start, self._pick, self._disk = place, start, pick, disk
        self._prompts = told(place, pick)
        self.engine = start()
        self.num_asked = self.num_external = 0

    def ask(self) -> None:
        """Run some requests with resets in between.

        One request may be aborted. The outputs of all finished requests must be correct.
        """
        pick, engine = self._pick, self.engine
        chosen = [pick.choice(self._prompts) for _ in range(pick.randrange(2, 8))]
        asked = [prompt.again(salt=pick.choice(SALTS)) for prompt in chosen]
        for request in asked:
            engine.add(request)
            engine.step(pick.randrange(3))
        if pick.random() < 0.3:
            engine.abort(pick.choice(asked).id)
        if pick.random() < 0.4:
            engine.reset(running=pick.random() < 0.5, connector=pick.random() < 0.2)
        results = engine.run()
        for request, prompt in zip(asked, chosen, strict=True):
            if (result := results.get(request.id)) is not None and result.finish != "abort":
                assert result.tokens == self._place.truth.tokens(prompt), (
                    f"{prompt.num_prompt_tokens} tokens, {result.external}"
                )
                self.num_asked, self.num_external = (
                    self.num_asked + 1,
                    self.num_external + result.num_external,
                )

    def hurt(self) -> None:
        pick, kinds = self._pick, ["bits", "restart", "kill", "reset", "nothing", "nothing"]
        kinds += ["fill", "freeze", "heal", "heal"] if self._disk is not None else []
        match pick.choice(kinds):
            case "bits":
                self.engine.flip_frames(keep=pick.randrange(8))
            case "reset":
                self.engine.reset()
            case "fill" | "freeze" as kind:
                assert self._disk is not None
                self.heal()
                self._disk.fill() if kind == "fill" else self._disk.freeze()
            case "heal":
                self.heal()
            case "restart" | "kill" as kind:
                self.heal()
                self.engine.stop() if kind == "restart" else self.engine.kill()
                self.engine = self._start()

    def heal(self) -> None:
        if self._disk is not None:
            self._disk.thaw()
            self._disk.make_room()

    def end(self) -> None:
        """After the faults, check that all resources are released and that a repeated prompt is a
        hit.
        """
        self.heal()
        prompt = self._prompts[3]
        for _ in range(2):
            self.engine.reset()
            result = self.engine.ask(prompt.again())[0]
            assert result.tokens == self._place.truth.tokens(prompt)
        assert self.engine.metrics()["vllm:kvloft_hook_errors_total"] == 0
        self.engine.assert_at_rest()
        self.engine.stop()


def small(place: Place, pick: random.Random, config: dict[str, Any]) -> dict[str, Any]:  # noqa: F811
    """Configure a small number of blocks so that requests are preempted and blocks outside windows
    are reused.
    """
    groups, per_chunk = len(place.model.kinds), max(1, place.model.hit_tokens // 32)
    num_blocks = (20 + 16 * groups * pick.choice([1, 2])) * per_chunk
    return {
        "num_blocks": num_blocks,
        "max_model_len": 640,
        "max_num_batched_tokens": 640,
        "kv_transfer_config": config,
    }


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Ext4 | None]:
    with ExitStack() as stack:
        yield stack.enter_context(mounted(tmp_path / "ext4", size_mib=24)) if can_mount() else None


def test_answers_are_right_in_a_storm_over_a_disk(
    place: Place,  # noqa: F811
    serve: Start,  # noqa: F811
    disk: Ext4 | None,
    tmp_path: Path,
) -> None:
    require_batches(place)
    pick, folder = random.Random(SEED), (disk.path if disk is not None else tmp_path) / "cache"
    sizes = {
        "host_size": pick.choice(["512KiB", "1MiB", "3MiB"]),
        "disk_size": "6MiB",
        "load_timeout": "500ms",
    }
    config = kvloft(folder, policy="recompute", kv_groups=place.model.kv_groups, **sizes)
    storm = Storm(place, lambda: serve(**small(place, pick, config)), pick, disk)
    for _ in range(ROUNDS):
        storm.ask()
        storm.hurt()
    storm.end()
    print(
        place.model.name,
        sizes["host_size"],
        storm.num_asked,
        "answers,",
        storm.num_external,
        "external tokens",
    )


def test_answers_are_right_in_a_storm_over_a_server(
    place: Place,  # noqa: F811
    serve: Start,  # noqa: F811
    server: CacheServer,  # noqa: F811
) -> None:
    require_batches(place)
    pick = random.Random(SEED + 1000)
    config = sharing(server, kv_groups=place.model.kv_groups)
    storms = [
        Storm(place, lambda: serve(**small(place, pick, config)), pick, None) for _ in range(2)
    ]
    for _ in range(ROUNDS):
        for storm in storms:
            storm.ask()
            storm.hurt()
        if pick.random() < 0.2:
            server.end()
            storms[0].ask()
            server.start()
    for storm in storms:
        storm.end()
    server.assert_at_rest()
    print(place.model.name, [(storm.num_asked, storm.num_external) for storm in storms])
