"""Provides kernels that speculative decoding with Mamba states requires but the CPU build lacks:
vLLM's two Triton kernels that move states, and support for draft tokens.

The replacements take the same arguments as the kernels and copy the same bytes. vLLM's surrounding
code decides which state to move to which block. The module also provides a drafting method whose
tokens are mostly correct. kernels.py computes the layers themselves.
"""

import ctypes
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Row:
    """The part of a step that belongs to one request in one layer."""

    slots: list[int]
    """State blocks: one block or, with draft tokens, one block for each token that the step can
    compute.
    """
    rejected_from: int = 0
    """Number of draft tokens accepted in the previous step.

    States after these tokens do not belong to the request.
    """
    is_new: bool = False
    """True if the request has no state yet."""
    is_drafted: bool = False
    """True if part of the step can be rolled back."""


def rows(step: Any) -> Iterator[tuple[Any, Row]]:
    """Yield (tokens, row) for each request, according to vLLM's metadata for gated delta nets.
    ``tokens`` is an index into the rows of the step.
    """
    every = torch.arange(step.num_actual_tokens)
    others = every if step.spec_sequence_masks is None else step.non_spec_token_indx
    if (num_others := step.num_decodes + step.num_prefills) > 0:
        bounds, slots = (
            step.non_spec_query_start_loc.tolist(),
            step.non_spec_state_indices_tensor.tolist(),
        )
        for i in range(num_others):
            is_new = i >= step.num_decodes and not bool(step.has_initial_state[i])
            yield others[bounds[i] : bounds[i + 1]], Row([slots[i]], is_new=is_new)
    if step.spec_sequence_masks is None:
        return
    bounds, accepted = step.spec_query_start_loc.tolist(), step.num_accepted_tokens.tolist()
    for i, slots in enumerate(step.spec_state_indices_tensor.tolist()[: step.num_spec_decodes]):
        yield (
            step.spec_token_indx[bounds[i] : bounds[i + 1]],
            Row(slots, accepted[i] - 1, is_drafted=True),
        )


def moved_states() -> None:
    """Make vLLM move states to the position of accepted draft tokens before and after a step."""
    from vllm.v1.worker import mamba_utils

    mamba_utils.precopy_mamba_align_fused_kernel = _Launched(_before_a_step)
    mamba_utils.postprocess_mamba_fused_kernel = _Launched(_behind_a_step)


@dataclass(frozen=True, slots=True)
class _Launched:
    """A function that is launched like a Triton kernel."""

    kernel: Callable[..., None]

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return self.kernel


def _before_a_step(
    columns: Any,
    source_columns: Any,
    biases: Any,
    tables: Any,
    stride: int,
    *more: Any,
    HAS_IDX_MAPPING: bool,
    **constants: Any,
) -> None:
    """Replaces precopy_mamba_align_fused_kernel."""
    *layout, _, num_reqs = more
    assert not HAS_IDX_MAPPING, "only the GPU model runner sets HAS_IDX_MAPPING"
    for i in range(num_reqs):
        source, target = int(source_columns[i]), int(columns[i])
        if source >= 0 and source != target:
            _copy(
                i,
                source,
                target,
                int(biases[i]),
                tables,
                stride,
                layout,
                constants["CONV_STATE_DIM_FIRST"],
            )


def _behind_a_step(
    accepted: Any,
    columns: Any,
    scheduled: Any,
    computed: Any,
    drafts: Any,
    tables: Any,
    stride: int,
    *more: Any,
    block_size: int,
    CONV_STATE_DIM_FIRST: bool,
    **_constants: Any,
) -> None:
    """Replaces postprocess_mamba_fused_kernel."""
    *layout, accepted_out, _, num_reqs = more
    for i, num_accepted in enumerate(accepted[:num_reqs].tolist()):
        running, source = int(computed[i] + scheduled[i] - drafts[i]), int(columns[i])
        aligned = (running + num_accepted - 1) // block_size * block_size
        if aligned < running:
            continue
        bias, target = aligned - running, aligned // block_size - 1
        if source == target:
            accepted_out[i] = 1
        if source != target or bias:
            _copy(i, source, target, bias, tables, stride, layout, CONV_STATE_DIM_FIRST)


def _copy(
    row: int,
    source: int,
    target: int,
    bias: int,
    tables: Any,
    stride: int,
    layout: list[Any],
    is_dim_first: bool,
) -> None:
    """Apply _copy_mamba_state_block to every state of every layer.

    ``source`` and ``target`` are block table columns; ``bias`` is the number of tokens to skip.
    """

    def block(group: int, column: int) -> int:
        return ctypes.c_int32.from_address(int(tables[group]) + 4 * (row * stride + column)).value

    for base, block_bytes, size, inner, width, group, dims, dim_bytes in zip(
        *(t.tolist() for t in layout), strict=True
    ):
        to = base + block(group, target) * block_bytes
        if not width:  # a separate state for each token
            ctypes.memmove(to, base + block(group, source + bias) * block_bytes, inner * size)
            continue
        at = base + block(group, source) * block_bytes
        for i in range(dims if is_dim_first else 1):
            token = size if is_dim_first else inner * size
            ctypes.memmove(
                to + i * dim_bytes, at + i * dim_bytes + bias * token, (width - bias) * token
            )


def drafted_convolutions() -> None:
    """Make Mamba2 convolutions start after the accepted draft tokens. vLLM's CPU convolution
    ignores the number of accepted draft tokens.
    """
    from vllm.model_executor.layers.mamba import mamba_mixer2

    update = mamba_mixer2.causal_conv1d_update

    def by_requests(
        x: Any, states: Any, weight: Any, bias: Any, activation: Any, **more: Any
    ) -> Any:
        if more["num_accepted_tokens"] is None:
            return update(x, states, weight, bias, activation, **more)
        bounds, width, out = more["query_start_loc"].tolist(), weight.shape[1], torch.empty_like(x)
        for i, accepted in enumerate(more["num_accepted_tokens"].tolist()[: len(bounds) - 1]):
            tokens = slice(bounds[i], bounds[i + 1])
            state = states[more["conv_state_indices"][i, 0]]  # (channels, width - 1 + drafts)
            inputs = torch.cat([state[:, accepted - 1 : accepted + width - 2], x[tokens].T], dim=1)
            out[tokens] = (
                (inputs.unfold(1, width, 1) * weight[:, None]).sum(-1)
                + (0 if bias is None else bias[:, None])
            ).T
            state[:, : inputs.shape[1] - 1] = inputs[:, 1:]
        return torch.nn.functional.silu(out) if activation in ("silu", "swish") else out

    mamba_mixer2.causal_conv1d_update = by_requests


def drafted_scans() -> None:
    """Make Mamba2 layers continue from the state after the accepted draft tokens and keep the state
    after each token.
    """
    from vllm.model_executor.layers.mamba import mamba_mixer2

    update = mamba_mixer2.selective_state_update

    def by_tokens(
        states: Any, x: Any, dt: Any, A: Any, B: Any, C: Any, D: Any, *more: Any, **named: Any
    ) -> None:
        if (accepted := named["num_accepted_tokens"]) is None:
            update(states, x, dt, A, B, C, D, *more, **named)
            return
        bounds, slots = named["cu_seqlens"].tolist(), named["state_batch_indices"].tolist()
        repeat = x.shape[1] // B.shape[1]
        for i in range(len(bounds) - 1):
            state = states[slots[i][int(accepted[i]) - 1]].clone()  # (heads, channels, state)
            for nth, t in enumerate(range(bounds[i], bounds[i + 1])):
                step = torch.nn.functional.softplus(dt[t] + more[0])
                b, c = (one[t].repeat_interleave(repeat, dim=0) for one in (B, C))
                state = (
                    state * torch.exp(step[..., None] * A) + (step * x[t])[..., None] * b[:, None]
                )
                named["out"][t] = ((state * c[:, None]).sum(-1) + D * x[t]).view(
                    named["out"][t].shape
                )
                states[slots[i][nth]] = state

    mamba_mixer2.selective_state_update = by_tokens


BOOK = "ZOO_BOOK"
"""Environment variable with the path of a file that contains one text per line as JSON.

Without this variable, drafting does not look up texts.
"""


def well_read_ngram() -> None:
    """Make ngram drafting also search texts that the tests recorded, because it finds almost no
    matches in random texts.

    Every fifth token from these texts is wrong, so steps accept none, some, or all of their
    draft tokens.
    """
    from vllm.v1.spec_decode.ngram_proposer import NgramProposer

    propose, book = NgramProposer.propose, Book()

    def look_up(
        self: Any,
        num_drafts: int,
        sampled: Any,
        num_tokens: Any,
        ids: Any,
        *more: Any,
        **named: Any,
    ) -> Any:
        drafts = propose(self, num_drafts, sampled, num_tokens, ids, *more, **named)
        for i, said in enumerate(sampled):
            if said and (found := book.after(ids[i, : num_tokens[i]].tolist(), num_drafts)):
                drafts[i] = found[: self.max_model_len - num_tokens[i]]
        return drafts

    NgramProposer.propose = look_up


class Book:
    """The texts that the tests recorded. `after` reads the lines added since the previous call."""

    def __init__(self) -> None:
        self._path, self._at = os.environ.get(BOOK), 0
        self._texts: list[list[int]] = []

    def after(self, begin: list[int], num_tokens: int) -> list[int]:
        """Return the continuation of ``begin`` in the first text that starts with ``begin``, with
        deliberate errors.
        """
        if not self._path:
            return []
        with open(self._path) as file:
            file.seek(self._at)
            self._texts += [json.loads(line) for line in file.read().splitlines()]
            self._at = file.tell()
        n = len(begin)
        text = next((text for text in self._texts if len(text) > n and text[:n] == begin), [])
        return [
            token if (n + i) % 5 else token ^ 1 for i, token in enumerate(text[n : n + num_tokens])
        ]
