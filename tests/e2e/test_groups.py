"""Tests models with multiple KV cache groups, Mamba states and draft models: outputs must be
correct without a hit and with every kind of hit.

The oracle is the same vLLM without a connector, a prefix cache or a draft model. zoo/test_zoo.py
shows that a comparison with this oracle detects any wrong page. A hit must be at least as long as
the same prompt's hit in vLLM's own prefix cache, minus one unit for alignment.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from .cache_server import CacheServer, until
from .client import BLOCK, Engine, Req, Zygote, engine_kwargs, kvloft, random_ids
from .conftest import Truth
from .test_kv_events import Subscriber, router, settle, step  # noqa: F401
from .test_server import server  # noqa: F401
from .test_server import shared as sharing
from .zoo.draft_kernels import BOOK
from .zoo.models import IS_WHOLE, ZOO, Draft, ZooModel, chosen
from .zoo.test_zoo import needed

REFUSED = {
    "ngram-mamba2": "kvloft rejects draft tokens with Mamba2: plain vLLM is wrong on some "
    "hits (zoo/test_faults.py)",
    "deepseek-v2": "kvloft rejects latent attention on CPUs without AMX: vLLM does not split "
    "prompts there",
}
"""Maps each unsupported model to the reason. Remove a row when kvloft supports the model."""
VLLM_DIFFERS = {"lfm2": {65}}
"""Prompt lengths for which vLLM's CPU build gives a different output with its own prefix cache,
even without kvloft, because vLLM splits these prompts at token 64.
"""


@dataclass(frozen=True, slots=True)
class Place:
    """A model, its files and its reference outputs."""

    model: ZooModel
    folder: Path
    truth: Truth

    def prompt(
        self, seed: int, num_tokens: int, max_tokens: int = 12, before: tuple[int, ...] = ()
    ) -> Req:
        """Return a prompt that starts with ``before``. Its output does not depend on rounding."""
        return self.truth.pick(
            lambda s: Req(before + random_ids(s, num_tokens - len(before)), max_tokens=max_tokens),
            seed,
        )


def names() -> list[Any]:
    """Return the chosen models of the zoo.

    Unsupported models run only with the whole zoo and are expected to fail.
    """
    waiting = {name: pytest.mark.xfail(strict=False, reason=why) for name, why in REFUSED.items()}
    tried = [name for name in chosen() if IS_WHOLE or name not in waiting]
    return [pytest.param(name, marks=[waiting[name]] if name in waiting else []) for name in tried]


@pytest.fixture(scope="module", params=names())
def place(
    request: pytest.FixtureRequest, zygote: Zygote, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Place]:
    """Yield each model in turn."""
    model = ZOO[request.param]
    folder = model.write(tmp_path_factory.mktemp(model.name))
    plain = engine_kwargs(folder, **model.plain())
    truth = Truth(lambda: zygote.engine(plain, prepare=model.prepare), folder.parent / "book")
    yield Place(model, folder, truth)
    truth.close()


@pytest.fixture
def serve(place: Place, zygote: Zygote) -> Iterator[Callable[..., Engine]]:
    """Yield a function that starts engines with kvloft: ``serve(disk, **engine_arguments)``."""
    engines: list[Engine] = []

    def launch(disk: Path | None = None, **more: Any) -> Engine:
        arguments = (
            place.model.engine(place.folder)
            | {"kv_transfer_config": kvloft(disk, kv_groups=place.model.kv_groups)}
            | more
        )
        env = {BOOK: str(place.folder.parent / "book")}
        engine = zygote.engine(
            engine_kwargs(place.folder, **arguments), prepare=place.model.prepare, env=env
        )
        engines.append(engine)
        return engine

    yield launch
    for engine in engines:
        engine.kill()


def ask(place: Place, engine: Engine, *requests: Req) -> list[int]:
    """Run all prompts (together if the model allows it), check their tokens, and return the number
    of external tokens of each prompt.
    """
    results = (engine.ask_each if place.model.alone else engine.ask)(*(r.again() for r in requests))
    assert [r.tokens for r in results] == [place.truth.tokens(r) for r in requests]
    return [r.num_external for r in results]


def least(place: Place, num_tokens: int) -> int:
    """Return the minimum number of external tokens for a prompt of ``num_tokens``."""
    return max(0, place.model.own_hit(num_tokens) - place.model.hit_tokens)


def assert_sound(engine: Engine) -> None:
    """Check that no error occurred and nothing is pinned or reserved."""
    metrics = engine.metrics()
    assert (
        metrics["vllm:kvloft_hook_errors_total"] + metrics["vllm:kvloft_verify_failures_total"] == 0
    )
    engine.assert_at_rest()


def test_cold_from_host_and_from_disk_say_the_truth(
    place: Place, serve: Callable[..., Engine], tmp_path: Path
) -> None:
    engine = serve(tmp_path)
    prompts = [place.prompt(9000 + i, 150 + 67 * i) for i in range(5)]
    wanted = [least(place, p.num_prompt_tokens) for p in prompts]
    assert ask(place, engine, *prompts) == [0] * len(prompts)
    for _ in range(2):
        assert engine.reset()
        found = ask(place, engine, *prompts)
        assert all(n >= w for n, w in zip(found, wanted, strict=True)), f"{found} of {wanted}"
    assert_sound(engine)
    engine.stop()
    again = serve(tmp_path)
    found = ask(place, again, *prompts)
    assert all(n >= w for n, w in zip(found, wanted, strict=True)), f"{found} of {wanted} from disk"
    assert again.metrics()["vllm:kvloft_load_tokens_disk_total"] >= sum(wanted)
    assert_sound(again)


def boundaries(model: ZooModel) -> list[int]:
    """Return prompt lengths around the ends of blocks, chunks, windows and local attention
    chunks.
    """
    sizes = {
        BLOCK,
        model.hit_tokens,
        *(int(kind.split()[1]) for kind in model.kinds if kind.split()[0] in ("window", "chunk")),
    }
    marks = sorted({n * size for size in sizes for n in (1, 2, 3, 5)} | {s + BLOCK for s in sizes})
    return sorted(
        {mark + d for mark in marks for d in (-1, 0, 1, 2)} - VLLM_DIFFERS.get(model.name, set())
    )


def test_lengths_around_every_boundary_say_the_truth(
    place: Place, serve: Callable[..., Engine]
) -> None:
    engine = serve()
    prompts = [place.prompt(9200 + n, n, 6) for n in boundaries(place.model)]
    ask(place, engine, *prompts)
    assert engine.reset()
    found = ask(place, engine, *prompts)
    wanted = [least(place, p.num_prompt_tokens) for p in prompts]
    assert all(n >= w for n, w in zip(found, wanted, strict=True)), f"{found} of {wanted}"
    assert_sound(engine)


def test_another_ending_after_a_cached_prefix_is_right(
    place: Place, serve: Callable[..., Engine]
) -> None:
    """A hit can end where no earlier request ended.

    If the window or state at that position is not stored, the hit must be shorter.
    """
    engine = serve()
    first = place.prompt(9500, 330)
    ask(place, engine, first)
    for shared in (64, 128, 200, 256, 300):
        assert engine.reset()
        ask(place, engine, place.prompt(9510 + shared, 350, before=(first.ids or ())[:shared]))
    assert_sound(engine)


def test_turn_two_hits_the_tokens_of_turn_one(place: Place, serve: Callable[..., Engine]) -> None:
    """The first turn decodes beyond the window and past more than one state, so vLLM frees blocks
    of windows and of states during the run.
    """
    # By default, vLLM retains only the states at the end of a prompt and offers no other states.
    retained = (
        {"prefix_cache_retention_interval": place.model.hit_tokens}
        if "state (align)" in place.model.kinds
        else {}
    )
    engine = serve(**retained)
    first = place.prompt(9600, 70, max_tokens=190)
    ask(place, engine, first)
    history = (first.ids or ()) + place.truth.tokens(first)
    assert engine.reset()
    second = place.prompt(9601, len(history) + 21, before=history)
    found = ask(place, engine, second)[0]
    # If draft KV depends on the next token, a state is saved only if the token after the state is
    # already known when vLLM offers the state (see the next test).
    is_chance = bool(retained) and place.model.drops_a_block
    assert is_chance or found >= least(place, len(history) - 1)
    assert_sound(engine)


def require_batches(place: Place) -> None:
    """Skip models whose output depends on the other requests in a step."""
    if place.model.alone:
        pytest.skip("vLLM's CPU build gives different outputs for this model in a batch")


def require_draft_kv(place: Place) -> Draft:
    """Return the draft model. Skip models without a draft model that has its own KV."""
    if place.model.draft is None or not place.model.draft.layer:
        pytest.skip("this model has no draft model with its own KV")
    return place.model.draft


def require_drafts_with_states(place: Place) -> None:
    """Skip models without a draft model or without Mamba states."""
    if place.model.draft is None or "state (align)" not in place.model.kinds:
        pytest.skip("this model has no draft model or no Mamba states")


def test_states_at_boundaries_that_accepted_drafts_passed_are_right(
    place: Place, serve: Callable[..., Engine]
) -> None:
    """If a step accepts draft tokens across a boundary, vLLM moves the state at the boundary to its
    block only after sampling.

    vLLM offers few of these states, so only one of the prompts has to hit such a state.
    """
    require_drafts_with_states(place)
    size = place.model.hit_tokens
    engine = serve(prefix_cache_retention_interval=size)
    prompts = [place.prompt(9650 + i, size - 12 + i, max_tokens=20) for i in range(12)]
    ask(place, engine, *prompts)
    assert accepted(engine) > 4 * len(prompts)
    said = [(p.ids or ()) + place.truth.tokens(p) for p in prompts]
    assert engine.reset()
    assert (
        max(
            ask(
                place,
                engine,
                *(place.prompt(9680 + i, len(ids) + 9, before=ids) for i, ids in enumerate(said)),
            )
        )
        >= size
    )
    assert_sound(engine)


def test_overwriting_a_loaded_state_changes_answers(
    place: Place, serve: Callable[..., Engine]
) -> None:
    """Checks that the tests above would fail if a loaded state were wrong.

    Each group gets a new engine, because kvloft stops caching when a test changes a worker's
    memory.
    """
    require_drafts_with_states(place)
    prompt = place.prompt(9690, 418)
    for group, kind in enumerate(place.model.kinds):
        engine = serve()
        ask(place, engine, prompt)
        assert engine.reset()
        assert ask(place, engine, prompt)[0] > 0
        hit = engine.probe(
            "hit", ids=list(prompt.ids or ())
        )  # the loaded blocks are now in vLLM's own cache
        assert engine.probe("damage", group=group, block=hit["blocks"][group][-1])
        assert engine.ask(prompt.again())[0].tokens != place.truth.tokens(prompt), (
            f"group {group} {kind}"
        )
        engine.kill()


def test_overwriting_a_loaded_block_changes_answers_with_blocks_of_two_sizes(
    place: Place, serve: Callable[..., Engine]
) -> None:
    """Like the test above, but damages the first or the last block that kvloft loads in each group.

    This block can be at any position in its chunk.
    """
    engine = serve()
    if len({group["block_tokens"] for group in engine.probe("groups")["groups"]}) == 1:
        pytest.skip("all groups of this model have the same block size")
    prompts = [place.prompt(9695 + i, 418) for i in range(3)]
    for group, kind in enumerate(place.model.kinds):
        for index in (0, -1):
            ask(place, engine, *prompts)
            assert engine.reset()
            assert min(ask(place, engine, *prompts)) > 0
            for prompt in prompts:
                held = list(
                    filter(None, engine.probe("hit", ids=list(prompt.ids or ()))["blocks"][group])
                )
                assert engine.probe("damage", group=group, block=held[index])
            said = [result.tokens for result in engine.ask_each(*(p.again() for p in prompts))]
            assert said != [place.truth.tokens(p) for p in prompts], f"group {group} {kind}"
            engine.kill()
            engine = serve()


def test_few_blocks_and_many_requests_say_the_truth(
    place: Place, serve: Callable[..., Engine]
) -> None:
    """Covers preemptions and blocks that are reused immediately."""
    require_batches(place)
    groups = len(place.model.kinds)
    engine = serve(
        num_blocks=20 + 16 * groups * BLOCK // min(BLOCK, place.model.hit_tokens),
        max_model_len=512,
        max_num_batched_tokens=512,
    )
    prompts = [place.prompt(9700 + i, 120 + 31 * i, max_tokens=24) for i in range(8)]
    for _ in range(3):
        ask(place, engine, *prompts)
        engine.reset()
    assert_sound(engine)


def test_drafts_are_accepted_as_often_on_a_hit_as_cold(
    place: Place, serve: Callable[..., Engine]
) -> None:
    require_draft_kv(place)
    engine = serve()
    prompts = [place.prompt(9800 + i, 300 + 7 * i, max_tokens=24) for i in range(6)]
    ask(place, engine, *prompts)
    cold = accepted(engine)
    assert engine.reset()
    assert min(ask(place, engine, *prompts)) > 0
    warm = accepted(engine) - cold
    assert warm >= 0.99 * cold


def test_a_loaded_page_of_the_drafter_that_is_overwritten_is_seen(
    place: Place, serve: Callable[..., Engine]
) -> None:
    """Shows that the test above can fail.

    If a loaded page of the draft model is damaged, the tokens remain correct, but fewer draft
    tokens are accepted.
    """
    draft = require_draft_kv(place)
    if place.model.drops_a_block and any(kind.startswith("window") for kind in place.model.kinds):
        pytest.skip(
            "with this model's draft model and windows, vLLM's own hit is a block shorter than the "
            "load, so kvloft loads the damaged page again"
        )
    engine = serve()
    prompts = [place.prompt(9850 + i, 300 + 7 * i, max_tokens=24) for i in range(4)]
    ask(place, engine, *prompts)
    cold = accepted(engine)
    assert engine.reset()
    for prompt in prompts:
        assert ask(place, engine, replace(prompt, max_tokens=1))[0] > 0
    before = accepted(engine)
    hits = [engine.probe("hit", ids=list(prompt.ids or ())) for prompt in prompts]
    for group, found in enumerate(engine.probe("groups")["groups"]):
        mine = [name for name in found["layers"] if draft.layer in name]
        for block in (
            {block for hit in hits for block in hit["blocks"][group] if block} if mine else ()
        ):
            assert engine.probe("damage", group=group, block=block, layers=mine)
    ask(place, engine, *prompts)
    assert accepted(engine) - before < 0.7 * cold


def test_aborts_and_resets_under_way_say_the_truth(
    place: Place, serve: Callable[..., Engine]
) -> None:
    """Requests are aborted while they load, wait or run.

    vLLM's cache is reset while the other requests run. In every second turn, the reset preempts
    these requests.
    """
    require_batches(place)
    engine = serve(
        num_blocks=20 + 16 * len(place.model.kinds), max_model_len=512, max_num_batched_tokens=512
    )
    prompts = [place.prompt(9950 + i, 120 + 31 * i, max_tokens=24) for i in range(8)]
    ask(place, engine, *prompts)
    for turn in range(4):
        engine.reset()
        asked = [p.again() for p in prompts]
        for nth, request in enumerate(asked):
            engine.add(request)
            engine.step(turn + nth % 3)
            if nth % 3 == turn % 3:
                engine.abort(asked[nth // 2].id)
        engine.reset(running=turn % 2 == 1)
        results = engine.run()
        done = [
            (results[a.id], place.truth.tokens(p))
            for a, p in zip(asked, prompts, strict=True)
            if a.id in results
        ]
        whole = [(result.tokens, truth) for result, truth in done if result.finish != "abort"]
        assert len(whole) >= 4
        assert all(tokens == truth for tokens, truth in whole)
    assert_sound(engine)


def accepted(engine: Engine) -> float:
    """Return the number of draft tokens accepted since the engine started."""
    return engine.metrics()["vllm:spec_decode_num_accepted_tokens_total"]


def block_sizes(engine: Engine) -> list[int]:
    return [group["block_tokens"] for group in engine.probe("groups")["groups"]]


def predicted_hit(place: Place, told: Subscriber, sizes: list[int], prompt: Req) -> int:
    """Return the number of tokens in the deepest hit, according to the events that a router
    received. In a hit, each group has all required chunks.
    """
    unit, kinds = place.model.hit_tokens, list(zip(place.model.kinds, sizes, strict=True))
    names, there = told.names(prompt, set(sizes)), {**told.blocks["CPU"], **told.blocks["STORAGE"]}
    assert all(block["size"] == sizes[group] for (group, _), block in there.items())
    for num_tokens in range((prompt.num_prompt_tokens - 1) // unit * unit, 0, -unit):
        rows = [
            [(nth, (i + 1) * size) for i in needed(kind, num_tokens, size)]
            for nth, (kind, size) in enumerate(kinds)
        ]
        if all((group, names.get(end)) in there for row in rows for group, end in row):
            return num_tokens
    return 0


def test_events_contain_the_blocks_of_each_group(
    place: Place,
    serve: Callable[..., Engine],
    router: Subscriber,  # noqa: F811
    tmp_path: Path,
) -> None:
    """Uses few frames and slots so that chunks of each group are saved and evicted.

    After a restart, kvloft announces chunks on disk when a request looks them up.
    """
    if place.model.draft is not None:
        pytest.skip(
            "this model has a draft model: its chunks have a key for each next token, which a "
            "router cannot predict from a prompt"
        )
    config = kvloft(
        tmp_path / "disk", kv_groups=place.model.kv_groups, host_size="1MiB", disk_size="4MiB"
    )
    prompts = [place.prompt(9950 + i, 150 + 67 * i) for i in range(6)]
    found = list[int]()
    again = [5, 5, 2, 2]
    for order in ([0, 0, 1, 0, 2, 1, 3, 3, 4, 2, 5, 5, 0], again):
        seen = set[int]()
        engine = serve(kv_transfer_config=config, kv_events_config=router.settings())
        sizes = block_sizes(engine)
        router.join()
        for nth, prompt in ((nth, prompts[nth]) for nth in order):
            # after the restart, the chunks are on disk, and their events contain no tokens
            is_of_before = order is again and nth not in seen
            num_cleared = router.num_cleared
            assert engine.reset()
            settle(engine)
            step(engine)  # earlier events are repeated, which can take one more step
            until(
                lambda n=num_cleared: (router.hear(), router.num_cleared > n)[1],
                "no event for the reset",
            )  # type: ignore[misc]
            expected = predicted_hit(place, router, sizes, prompt)
            found += ask(place, engine, prompt)
            assert expected == (0 if is_of_before else found[-1]), (order, found)
            seen.add(nth)
        assert_sound(engine)
        engine.stop()
        router.hear()
        router.begin()
    assert sum(map(bool, found)) > 4 and not all(found), found


@pytest.mark.parametrize("is_finer", [False, True], ids=["as it does", "in shorter steps"])
def test_blocks_have_vllms_hashes_with_every_algorithm(
    place: Place,
    serve: Callable[..., Engine],
    router: Subscriber,  # noqa: F811
    is_finer: bool,
) -> None:
    """kvloft and vLLM (if configured to keep all blocks) send the same fields for each block in
    each group: size, name, parent, tokens and extra keys.
    """
    if is_finer and len(place.model.kinds) == 1:
        pytest.skip("this model has one KV cache group: vLLM rejects --prefix-match-unit")
    if any(kind.startswith("state") for kind in place.model.kinds):
        pytest.skip("this model has Mamba states, which are saved only at some boundaries")
    more = {"prefix_match_unit": 16} if is_finer else {}
    engine = serve(
        kv_transfer_config=kvloft(kv_groups=place.model.kv_groups),
        kv_events_config=router.settings(),
        enable_prefix_caching=True,
        prefix_cache_retention_interval=None,
        **more,
    )
    sizes = block_sizes(engine)
    router.join()
    prompt = place.prompt(9960, 300)
    ask(place, engine, prompt)
    engine.ask(replace(prompt.again(), salt="of a user"))
    settle(engine)
    router.hear()
    gpu, host = router.blocks["GPU"], router.blocks["CPU"]
    assert {each: gpu.get(each) for each in host} == host
    num_tokens = (
        (prompt.num_prompt_tokens + prompt.max_tokens - 1)
        // place.model.hit_tokens
        * place.model.hit_tokens
    )
    assert Counter(group for group, _ in host) == {
        nth: 2 * num_tokens // size for nth, size in enumerate(sizes)
    }
    assert {block["size"] for block in host.values()} == set(sizes)
    assert Counter(str(block["extra"]) for block in host.values())["['of a user']"] == len(sizes), (
        "only the first of each group"
    )


def test_engines_on_a_server_find_each_others_and_compute_when_it_dies(
    place: Place,
    serve: Callable[..., Engine],
    server: CacheServer,  # noqa: F811
) -> None:
    one, other = (
        serve(kv_transfer_config=sharing(server, kv_groups=place.model.kv_groups)) for _ in range(2)
    )
    prompts = [place.prompt(9900 + i, 150 + 67 * i) for i in range(5)]
    wanted = [least(place, p.num_prompt_tokens) for p in prompts]
    assert ask(place, one, *prompts) == [0] * len(prompts)

    def are_found(engine: Engine) -> bool:
        assert engine.reset()
        return all(n >= w for n, w in zip(ask(place, engine, *prompts), wanted, strict=True))

    assert are_found(other)
    assert are_found(one)
    if not place.model.alone:
        for steps in (1, 3):  # while loads and saves are in flight
            assert other.reset()
            requests = [p.again() for p in prompts]
            other.add(*requests)
            other.step(steps)
            server.end()
            other.step(2)
            server.start()
            results = other.run()
            assert [results[r.id].tokens for r in requests] == [
                place.truth.tokens(p) for p in prompts
            ]
    server.end()
    assert other.reset()
    assert ask(place, other, *prompts) == [0] * len(prompts)
    server.start()
    until(lambda: are_found(other), "hits do not return")
    for engine in (one, other):
        assert_sound(engine)
    server.assert_at_rest()
