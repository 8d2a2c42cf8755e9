"""Tests the zoo itself: vLLM creates the groups named in models.py, and the output depends on every
page that a hit needs.

Cache tests rely on these properties, because an output that does not depend on a page would hide a
wrong page. The engines in this module do not use kvloft.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from e2e.client import Engine, Req, Result, Zygote, engine_kwargs, random_ids
from e2e.conftest import Truth

from .draft_kernels import BOOK
from .models import ZOO, ZooModel, chosen

NUM_TOKENS = 418
"""Number of tokens in each prompt: more than one block beyond every window, half a chunk beyond the
last complete chunk, and a tail of two tokens.
"""
PROMPTS = (500, 501, 502)
"""Seeds of the prompts.

Sharp attention sometimes skips a page, so it is sufficient that one prompt reads the page.
"""
PROMPTS_OF_A_DRAFTER = 4


@dataclass(frozen=True, slots=True)
class Cage:
    """A model, its reference outputs, and an engine that uses vLLM's own prefix cache."""

    model: ZooModel
    engine: Engine
    truth: Truth

    def prompt(self, seed: int, num_tokens: int = NUM_TOKENS, max_tokens: int = 12) -> Req:
        """Return a prompt whose output does not depend on rounding."""
        return self.truth.pick(
            lambda s: Req(random_ids(s, num_tokens), max_tokens=max_tokens), seed
        )

    def cold(self, *requests: Req) -> list[Result]:
        """Run the requests one at a time with an initially empty prefix cache."""
        assert self.engine.reset()
        return self.engine.ask_each(*(r.again() for r in requests))

    @property
    def groups(self) -> list[dict[str, Any]]:
        return self.engine.probe("groups")["groups"]

    def hit(self, request: Req) -> dict[str, Any]:
        """Return the hit for a prompt in vLLM's own cache (see probe.hit)."""
        return self.engine.probe("hit", ids=list(request.ids or ()))

    def damage(self, group: int, block: int) -> None:
        """Overwrite a block of a group in the target model's layers."""
        assert self.engine.probe(
            "damage",
            group=group,
            block=block,
            layers=self.model.target_layers(self.groups[group]["layers"]),
        )

    def begin(self, request: Req) -> list[list[int]]:
        """Compute a prompt and return the block tables of the request, which keeps running."""
        assert self.engine.reset()
        self.engine.add(request)
        while self.engine.state()["computed"][request.id] < request.num_prompt_tokens:
            self.engine.step(1)
        return self.engine.probe("tables")

    def accepted(self, request: Req, how: str) -> float:
        """Return the number of draft tokens accepted for a request that runs cold, with a hit, or
        with a hit on overwritten draft KV.
        """
        said = self.cold(request)[0].tokens if how != "cold" else self.truth.tokens(request)
        if how == "cold":
            assert self.engine.reset()
        if how == "damaged":
            draft = self.model.draft
            for nth, group in enumerate(self.groups):
                mine = [name for name in group["layers"] if draft and draft.layer in name]
                for block in self.hit(request)["blocks"][nth] if mine else ():
                    self.engine.probe("damage", group=nth, block=block, layers=mine)
        before = self.engine.metrics()["vllm:spec_decode_num_accepted_tokens_total"]
        assert self.engine.ask(request.again())[0].tokens == said
        return self.engine.metrics()["vllm:spec_decode_num_accepted_tokens_total"] - before


@pytest.fixture(scope="module", params=chosen())
def cage(
    request: pytest.FixtureRequest, zygote: Zygote, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cage]:
    """Yield each chosen model in turn."""
    model = ZOO[request.param]
    folder = model.write(tmp_path_factory.mktemp(model.name))
    plain = model.plain()
    book = folder.parent / "book"
    truth = Truth(
        lambda: zygote.engine(engine_kwargs(folder, **plain), prepare=model.prepare), book
    )
    engine = zygote.engine(
        engine_kwargs(folder, **model.engine(folder)), prepare=model.prepare, env={BOOK: str(book)}
    )
    yield Cage(model, engine, truth)
    engine.kill()
    truth.close()


def some(of: list[int]) -> list[int]:
    """Return the first, the middle and the last element."""
    return sorted({of[0], of[len(of) // 2], of[-1]}) if of else []


def needed(kind: str, num_tokens: int, block: int) -> range:
    """Return the blocks that a hit of ``num_tokens`` needs in a group of the given kind."""
    last = num_tokens // block
    name, _, size = kind.partition(" ")
    if name == "window":
        return range(max(0, num_tokens - int(size) + 1) // block, last)
    if name == "chunk":
        return range(num_tokens // int(size) * int(size) // block, last)
    return range(last - 1, last) if name == "state" else range(last)


def test_vllm_forms_the_groups_that_the_zoo_names(cage: Cage) -> None:
    found = cage.engine.probe("groups")
    assert tuple(g["kind"] for g in found["groups"]) == cage.model.kinds
    assert found["hit_tokens"] == cage.model.hit_tokens


def test_a_hit_needs_the_blocks_of_its_kind_and_answers_correctly(cage: Cage) -> None:
    request = cage.prompt(500)
    assert cage.cold(request)[0].tokens == cage.truth.tokens(request)
    hit = cage.hit(request)
    assert hit["tokens"] == cage.model.own_hit(NUM_TOKENS)
    for group, blocks in zip(cage.groups, hit["blocks"], strict=True):
        there = [i for i, block in enumerate(blocks) if block]
        assert there == list(needed(group["kind"], hit["tokens"], group["block_tokens"])), group[
            "kind"
        ]
    again = cage.engine.ask(request.again())[0]
    assert (again.tokens, again.cached) == (cage.truth.tokens(request), hit["tokens"])


def test_answers_do_not_depend_on_rounding(cage: Cage) -> None:
    """With random weights, a rounding difference can change a token, which would make comparisons
    meaningless.
    """
    requests = [cage.prompt(600 + i, 190 + 61 * i) for i in range(4)]
    assert cage.engine.reset()
    for how in ("in a batch", "on hits in a batch"):
        ask = cage.engine.ask_each if cage.model.alone else cage.engine.ask
        said = [r.tokens for r in ask(*(r.again() for r in requests))]
        assert said == [cage.truth.tokens(r) for r in requests], how


def test_the_answer_of_a_hit_depends_on_every_page(cage: Cage) -> None:
    if not cage.model.is_cached_by_vllm:
        pytest.skip("vLLM disables its prefix cache for latent attention on CPUs")
    for group, kind in enumerate(cage.model.kinds):
        cage.cold(cage.prompt(500))
        there = [i for i, block in enumerate(cage.hit(cage.prompt(500))["blocks"][group]) if block]
        assert there, f"a hit needs no block of group {group}: choose a different length"
        for index in some(there):
            assert any(hit_is_damaged(cage, cage.prompt(seed), group, index) for seed in PROMPTS), (
                f"{group} {kind} {index}"
            )


def hit_is_damaged(cage: Cage, request: Req, group: int, index: int) -> bool:
    """Return True if overwriting block ``index`` of ``group`` changes the output of a hit."""
    cage.cold(request)
    cage.damage(group, cage.hit(request)["blocks"][group][index])
    return cage.engine.ask(request.again())[0].tokens != cage.truth.tokens(request)


def test_the_next_token_depends_on_every_page_of_a_running_request(cage: Cage) -> None:
    """Like the test above, but pages are damaged between prefill and decode.

    A Mamba group also has blocks for earlier boundaries and draft tokens, but only one of its
    blocks is read.
    """
    for group, kind in enumerate(cage.model.kinds):
        block_tokens = cage.groups[group]["block_tokens"]
        for index in (
            [(NUM_TOKENS - 1) // block_tokens]
            if kind.startswith("state")
            else some(list(needed(kind, NUM_TOKENS, block_tokens)))
        ):
            assert any(
                output_is_damaged(cage, cage.prompt(seed), group, index) for seed in PROMPTS
            ), f"{group} {kind} {index}"


def output_is_damaged(cage: Cage, request: Req, group: int, index: int) -> bool:
    """Return True if the output of a request changes after block ``index`` of ``group`` is
    overwritten between prefill and decode.
    """
    running = request.again()
    table = cage.begin(running)[group]
    cage.damage(group, table[index])
    return cage.engine.run()[running.id].tokens != cage.truth.tokens(request)


def test_drafts_are_accepted_and_depend_on_the_drafters_own_pages(cage: Cage) -> None:
    """Without the pages of its draft model, an engine still generates the correct tokens but
    accepts fewer draft tokens. The acceptance rate therefore shows whether cached draft KV is
    correct.
    """
    draft = cage.model.draft
    if draft is None or not draft.layer:
        pytest.skip("no draft model with its own KV")
    requests = [cage.prompt(700 + i, 300 + 7 * i, 24) for i in range(PROMPTS_OF_A_DRAFTER)]
    shares = dict[str, float]()
    for how in ("cold", "hit", "damaged"):
        shares[how] = sum(cage.accepted(r, how) for r in requests) / (24 * len(requests))
    print(f"{cage.model.name}: accepted share of output {shares}")
    assert shares["cold"] > 0.3
    assert abs(shares["hit"] - shares["cold"]) < 0.05
    assert shares["damaged"] < 0.7 * shares["cold"]
