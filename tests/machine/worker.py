"""A worker of the correctness machine. The worker implements vLLM's model runner contract with
paged memory that holds symbols.

The worker supports both forms of scheduler output, verifies draft tokens, and calls the real
connector's worker-side hooks in the model runner's order. In each group, it checks the content of
every block that a scheduled token attends to (`memory`).
"""

import random
from dataclasses import dataclass, field
from typing import Any

from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from .memory import Memory, Work
from .shape import Shape
from .symbols import Prefix, Spec, extend, next_token


@dataclass
class Running:
    """The model runner's state for a request: confirmed and sampled contents, a block table per
    group, and draft tokens.

    ``computed`` is the number of tokens with confirmed KV. ``columns`` contains the column of the
    running state for each Mamba group.
    """

    spec: Spec
    prefix: Prefix
    tables: list[list[int]]
    computed: int
    drafts: list[int] = field(default_factory=list)
    columns: dict[int, int] = field(default_factory=dict)
    accepted: int = 1


class Worker:
    """One rank of the engine. ``connector`` is None for an engine without a connector."""

    def __init__(
        self,
        connector: Any,
        memory: Memory,
        specs: dict[str, Spec],
        shape: Shape,
        luck: random.Random,
    ) -> None:
        self.connector, self.memory, self._specs, self._shape, self._luck = (
            connector,
            memory,
            specs,
            shape,
            luck,
        )
        self.acceptance = 0.6
        """Probability that a draft token is correct."""
        self.running: dict[str, Running] = {}
        self.works: list[Work] = []
        """The work of the previous step."""
        self._has_drafter = True
        """True if the draft model runs in this step."""

    def execute(self, output: Any, metadata: Any) -> ModelRunnerOutput:
        """Run one step. ``metadata`` is the received connector metadata."""
        connector = self.connector
        if connector is not None and not self._shape.v2:
            connector.handle_preemptions(metadata)
        self._update(output)
        if connector is not None:
            if self._shape.v2:
                connector.handle_preemptions(metadata)
            connector.bind_connector_metadata(metadata)
            assert not output.has_sync_kv_loads, "kvloft never loads synchronously"
        works = self.works = self._forward(output) if output.total_num_scheduled_tokens else []
        self._has_drafter = self._fits_drafter(works)
        transfers: Any = None
        if connector is not None and works and self._shape.early_results:
            transfers = self._results(output.finished_req_ids, saves=False)
        sampled = self._sample(works)
        if connector is not None:
            if transfers is None:
                transfers = self._results(output.finished_req_ids, saves=True)
            else:
                connector.wait_for_save()
            connector.clear_connector_metadata()
        ids = list(output.num_scheduled_tokens)
        return ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={r: i for i, r in enumerate(ids)},
            sampled_token_ids=[sampled[r] for r in ids],
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=None,
            kv_connector_output=transfers,
        )

    def _results(self, finished: set[str], *, saves: bool) -> KVConnectorOutput:
        connector = self.connector
        connector.start_load_kv(None)
        if saves:
            connector.wait_for_save()
        more: dict[str, Any] = {}
        if hasattr(connector, "get_transfer_results"):  # vLLM 0.32
            results = connector.get_transfer_results(finished)
            sending, recving = results.finished_sending, results.finished_recving
            more = {"failed_recving": results.failed_recving}
        else:
            sending, recving = connector.get_finished(finished)
        assert not sending, "kvloft never delays a request's blocks"
        return KVConnectorOutput(
            finished_recving=recving or None,
            **more,
            invalid_block_ids=connector.get_block_ids_with_load_errors(),
            kv_connector_worker_meta=connector.build_connector_worker_meta(),
        )

    # -- states
    # -----------------------------------------------------------------------------------------

    def _update(self, output: Any) -> None:
        for req_id in output.finished_req_ids:
            self.running.pop(req_id, None)
        for new in output.scheduled_new_reqs:
            ids = (
                new.prefill_token_ids if new.prefill_token_ids is not None else new.prompt_token_ids
            )
            self._start(new.req_id, ids or (), new.block_ids, new.num_computed_tokens)
        cached = output.scheduled_cached_reqs
        for i, req_id in enumerate(cached.req_ids):
            blocks = cached.new_block_ids[i]
            if req_id in cached.resumed_req_ids:
                self._start(
                    req_id, cached.all_token_ids[req_id], blocks, cached.num_computed_tokens[i]
                )
            elif blocks:
                for table, more in zip(self.running[req_id].tables, blocks, strict=True):
                    table += more
        self.memory.zero(getattr(output, "new_block_ids_to_zero", None) or ())
        self.memory.copy(getattr(output, "kv_cache_block_copies", None) or ())

    def _start(self, req_id: str, ids: Any, blocks: Any, computed: int) -> None:
        spec = self._specs[req_id]
        self.running[req_id] = Running(
            spec, spec.prefix(ids), [list(table) for table in blocks], computed
        )

    # -- forward pass
    # ----------------------------------------------------------------------------------------------

    def _forward(self, output: Any) -> list[Work]:
        """Run the forward pass.

        The worker first moves states, then performs all writes and finally all reads, because a
        request can read blocks that other requests write in the same step.
        """
        works = self._works(output)
        for work in works:
            self.memory.begin_states(work)
        for work in works:
            self.memory.write(work)
        for work in works:
            self.memory.check(work)
        return works

    def _sample(self, works: list[Work]) -> dict[str, list[int]]:
        """Sample after the forward pass.

        With a draft model, the connector's results are collected before sampling, and the draft
        model's layers run last.
        """
        sampled = {work.req_id: self._finish(work) for work in works}
        for work in works if self._has_drafter else ():
            self.memory.check_drafter(work)
        return sampled

    def _works(self, output: Any) -> list[Work]:
        told = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        told |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        works = []
        for req_id, count in output.num_scheduled_tokens.items():
            state = self.running[req_id]
            drafts = self._drafts_of(state, output.scheduled_spec_decode_tokens.get(req_id, ()))
            # With async scheduling, vLLM counts draft tokens in flight as computed. The runner's
            # count is correct.
            late = self._shape.async_scheduling and self._shape.num_drafts
            assert state.computed == told[req_id] or (late and state.computed < told[req_id]), (
                state,
                told[req_id],
            )
            stop = state.computed + count - len(drafts)
            assert stop <= len(state.prefix), (
                f"{req_id}: {stop} positions requested, {len(state.prefix)} known"
            )
            works.append(Work(req_id, state, state.computed, stop, drafts))
        return works

    def _drafts_of(self, state: Running, scheduled: Any) -> list[int]:
        if scheduled and scheduled[0] == -1:  # async scheduling: the worker keeps draft tokens
            own = state.drafts[: len(scheduled)]
            return own + [0] * (len(scheduled) - len(own))
        return list(scheduled)

    def _finish(self, work: Work) -> list[int]:
        """Sample tokens and verify draft tokens, then write the draft model's KV and the states of
        accepted draft tokens.
        """
        state, said = work.state, list[int]()
        if work.stop == len(state.prefix):
            for draft in [*work.drafts, None]:
                token = next_token(state.prefix.last)
                state.prefix.append(token)
                said.append(token)
                if token != draft:
                    break
            self._propose(state)
        state.accepted = max(1, len(said))
        state.computed = work.stop + state.accepted - 1
        self.memory.end_step(work, has_drafter=self._has_drafter)
        return said

    def _fits_drafter(self, works: list[Work]) -> bool:
        """Return True if the draft model runs in this step, like vLLM's `_input_fits_in_drafter`.

        Blocks that were written without the draft model also lack draft KV in later hits.
        """
        limit, is_dflash = self._shape.drafter_tokens, self._shape.drafter == "dflash"
        return (
            not limit
            or max((work.end for work in works), default=0) + self._shape.num_drafts + is_dflash
            <= limit
        )

    def _propose(self, state: Running) -> None:
        """Set draft tokens that are sometimes correct, or zeros if the draft model does not run."""
        if not self._has_drafter:
            state.drafts = [0] * self._shape.num_drafts
            return
        symbol, state.drafts = state.prefix.last, []
        for _ in range(self._shape.num_drafts):
            token = (
                next_token(symbol)
                if self._luck.random() < self.acceptance
                else 3 + self._luck.randrange(30)
            )
            state.drafts.append(token)
            symbol = extend(symbol, token)

    def drafts(self, req_ids: list[str]) -> list[list[int]]:
        """Return the draft tokens that the synchronous scheduler schedules in the next step."""
        return [list(self.running[r].drafts) if r in self.running else [] for r in req_ids]
