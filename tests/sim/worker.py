"""A worker of the symbolic engine: vLLM's model runner contract over paged KV that holds symbols.

It understands both shapes of scheduler output, checks every position it reads, verifies drafts, and runs the real
``KVLoftConnector``'s worker half in the hook order of the runner it plays.
"""

import random
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from .symbols import Prefix, Spec, extend, next_token


class WrongKV(AssertionError):
    """A position was read whose KV is not that of the request's prefix."""


@dataclass
class Running:
    """What a model runner remembers of a request: contents so far (confirmed and sampled), block table, drafts."""

    spec: Spec
    prefix: Prefix
    table: list[int]
    drafts: list[int] = field(default_factory=list)


class Worker:
    """One rank. ``kv`` is int64 [blocks, tokens per block]; every rank holds the same symbols."""

    def __init__(
        self, connector: Any, kv: torch.Tensor, specs: dict[str, Spec], *, num_drafts: int, early_results: bool,
        seed: int,
    ) -> None:  # fmt: skip
        self.connector, self.kv, self._specs, self._num_drafts = connector, kv, specs, num_drafts
        self._early_results = early_results
        self._random = random.Random(seed)
        self._running: dict[str, Running] = {}
        self._block = kv.shape[1]

    def execute(self, output: Any, metadata: Any) -> ModelRunnerOutput:
        """One step; ``metadata`` is the connector's, as it came over the wire."""
        if hasattr(self.connector, "handle_preemptions"):
            self.connector.handle_preemptions(metadata)
        self._update(output)
        self.connector.bind_connector_metadata(metadata)
        assert not output.has_sync_kv_loads, "kvloft never loads synchronously"
        sampled = self._forward(output) if output.total_num_scheduled_tokens else {}
        self.connector.start_load_kv(None)
        if not self._early_results:
            self.connector.wait_for_save()
        transfers = self._transfers(output.finished_req_ids)
        if self._early_results:
            self.connector.wait_for_save()
        self.connector.clear_connector_metadata()
        ids = list(output.num_scheduled_tokens)
        return ModelRunnerOutput(
            req_ids=ids, req_id_to_index={r: i for i, r in enumerate(ids)}, sampled_token_ids=[sampled[r] for r in ids],
            logprobs=None, prompt_logprobs_dict={}, pooler_output=None, kv_connector_output=transfers,
        )  # fmt: skip

    def _transfers(self, finished: set[str]) -> KVConnectorOutput:
        sending, recving = self.connector.get_finished(finished)
        assert not sending, "kvloft never delays a request's blocks"
        return KVConnectorOutput(
            finished_recving=recving or None,
            invalid_block_ids=self.connector.get_block_ids_with_load_errors(),
            kv_connector_worker_meta=self.connector.build_connector_worker_meta(),
        )

    # -- states ---------------------------------------------------------------------------------------------------

    def _update(self, output: Any) -> None:
        for req_id in output.finished_req_ids:
            self._running.pop(req_id, None)
        for new in output.scheduled_new_reqs:
            ids = new.prefill_token_ids if new.prefill_token_ids is not None else new.prompt_token_ids
            self._start(new.req_id, ids or (), new.block_ids[0])
        cached = output.scheduled_cached_reqs
        for i, req_id in enumerate(cached.req_ids):
            blocks = cached.new_block_ids[i]
            if req_id in cached.resumed_req_ids:
                self._start(req_id, cached.all_token_ids[req_id], blocks[0])
            elif blocks:
                self._running[req_id].table += blocks[0]

    def _start(self, req_id: str, ids: Any, blocks: list[int]) -> None:
        spec = self._specs[req_id]
        prefix = Prefix(spec.start)
        contents = [*spec.contents, *ids[len(spec.contents) :]]
        for content in contents:
            prefix.append(content)
        self._running[req_id] = Running(spec, prefix, list(blocks))

    # -- the forward ----------------------------------------------------------------------------------------------

    def _forward(self, output: Any) -> dict[str, list[int]]:
        """All writes, then all reads: requests of one step may read blocks that others of it write."""
        plan: list[tuple[str, Running, int, list[int]]] = []
        computed = {n.req_id: n.num_computed_tokens for n in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        computed |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for req_id, count in output.num_scheduled_tokens.items():
            state = self._running[req_id]
            drafts = self._drafts_of(state, output.scheduled_spec_decode_tokens.get(req_id, []))
            start = computed[req_id]
            if drafts and start >= len(state.prefix):  # async: vLLM counts drafts in flight as accepted
                start = len(state.prefix) - 1
            stop = start + count - len(drafts)
            assert stop <= len(state.prefix), f"{req_id}: {stop} positions asked for, {len(state.prefix)} known"
            self._write(state, start, stop, drafts)
            plan.append((req_id, state, stop, drafts))
        return {req_id: self._sample(req_id, state, stop, drafts) for req_id, state, stop, drafts in plan}

    def _drafts_of(self, state: Running, scheduled: list[int]) -> list[int]:
        if scheduled and scheduled[0] == -1:  # async: the worker has its own
            own = state.drafts[: len(scheduled)]
            return own + [0] * (len(scheduled) - len(own))
        return list(scheduled)

    def _write(self, state: Running, start: int, stop: int, drafts: list[int]) -> None:
        for p in range(start, stop):
            self.kv[state.table[p // self._block], p % self._block] = state.prefix.symbols[p]
        symbol = state.prefix.symbols[stop - 1]
        for p, draft in enumerate(drafts, start=stop):
            symbol = extend(symbol, draft)
            self.kv[state.table[p // self._block], p % self._block] = symbol

    def _sample(self, req_id: str, state: Running, stop: int, drafts: list[int]) -> list[int]:
        self._check(req_id, state, stop)
        if stop < len(state.prefix):
            return []
        said: list[int] = []
        for draft in [*drafts, None]:
            token = next_token(state.prefix.last)
            state.prefix.append(token)
            said.append(token)
            if token != draft:
                break
        self._propose(state)
        return said

    def _check(self, req_id: str, state: Running, stop: int) -> None:
        blocks = -(-stop // self._block)
        found = self.kv[state.table[:blocks]].flatten()[:stop].tolist()
        if found != state.prefix.symbols[:stop]:
            at = next(i for i in range(stop) if found[i] != state.prefix.symbols[i])
            raise WrongKV(f"{req_id}: position {at} of {stop}, block {state.table[at // self._block]}")

    def _propose(self, state: Running) -> None:
        """Drafts that are right now and then."""
        symbol, state.drafts = state.prefix.last, []
        for _ in range(self._num_drafts):
            token = next_token(symbol) if self._random.random() < 0.6 else 3 + self._random.randrange(30)
            state.drafts.append(token)
            symbol = extend(symbol, token)

    def drafts(self, req_ids: list[str]) -> list[list[int]]:
        """Drafts for the next step, as the sync scheduler asks for them."""
        return [list(self._running[r].drafts) if r in self._running else [] for r in req_ids]
