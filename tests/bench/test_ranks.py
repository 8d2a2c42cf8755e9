"""Tests, without a GPU, that the multi-rank check reports an error in any rank."""

from copy import deepcopy
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed")

from benches.gpu import ranks


def rank(loaded: int, differing: int = 0, **more: int) -> dict[str, int]:
    return {"loaded": loaded, "loaded_differing": differing, "unknown": 0, "bad_chunks": 0, **more}


def result() -> dict[str, Any]:
    cold, other, both = [[1, 2], [3, 4]], [[1, 2], [5, 6]], [[1, 2], [3, 4], [7, 8]]
    runs = {
        "cold": (cold, [0, 0], 0, 0),
        "hbm": (cold, [0, 96], 0, 0),
        "warm": (cold, [0, 96], 6, 0),
        "crowd": (both, [0, 96, 0], 6, 0),
        "crowd_warm": (both, [0, 96, 96], 9, 0),
        "skipped_load": (other, [0, 96], 6, 6),
    }
    return {
        "runs": {
            name: {"tokens": tokens, "cached": cached, "ranks": [rank(loaded, differing)] * 2}
            for name, (tokens, cached, loaded, differing) in runs.items()
        }
    }


def test_ranks_that_load_their_saves_are_no_problem() -> None:
    assert list(ranks.problems(result(), 2)) == []
    assert ranks.table(result())[-1] == ("skipped_load", "1 of 2", "96", "6, 6", "6, 6")


@pytest.mark.parametrize(
    ("run", "key", "value", "word"),
    [
        ("warm", "tokens", [[1, 2], [3, 5]], "tokens in warm differ"),
        ("hbm", "tokens", [[1, 2], [3, 5]], "tokens in hbm differ"),
        ("crowd", "tokens", [[1, 2], [3, 5], [7, 8]], "tokens in crowd differ"),
        ("crowd_warm", "tokens", [[1, 2], [3, 4], [7, 9]], "tokens in crowd_warm differ"),
        ("crowd_warm", "cached", [0, 96, 0], "no cached tokens for some of the prompts"),
        ("crowd_warm", "cached", [0, 80, 96], "fewer cached tokens in crowd_warm than in warm"),
        ("crowd", "cached", [0, 0, 0], "fewer cached tokens in crowd than in warm"),
        ("skipped_load", "ranks", [rank(6, 6)], "skipped_load: 1 ranks responded, expected 2"),
        ("skipped_load", "ranks", [rank(6, 6), rank(0)], "rank 1: the audit did not detect"),
        ("crowd", "ranks", [rank(6, 1), rank(6)], "rank 0 loaded nothing, or loaded pages"),
        ("crowd_warm", "ranks", [rank(9), rank(0)], "rank 1 loaded nothing, or loaded pages"),
        ("skipped_load", "tokens", [[1, 2], [3, 4]], "do not depend"),
        ("warm", "cached", [0, 64], "fewer cached tokens than with"),
        (
            "warm",
            "ranks",
            [rank(6), rank(0)],
            "rank 1 loaded nothing, or loaded pages that differ",
        ),
        ("warm", "ranks", [rank(6, 1), rank(6)], "rank 0 loaded nothing, or loaded pages"),
        ("warm", "ranks", [rank(6), rank(6, unknown=1)], "rank 1 loaded nothing, or loaded pages"),
        (
            "warm",
            "ranks",
            [rank(6), rank(6, bad_chunks=1)],
            "rank 1 loaded nothing, or loaded pages",
        ),
        ("skipped_load", "ranks", [rank(6, 6), rank(6, 5)], "rank 1: the audit did not detect"),
    ],
)
def test_errors_of_one_rank_are_named(run: str, key: str, value: Any, word: str) -> None:
    found = deepcopy(result())
    found["runs"][run][key] = value
    said = list(ranks.problems(found, 2))
    assert word in said[0]
    assert len(said) == 1 or (run, key) == ("crowd", "tokens"), (
        "later results are compared with the crowd"
    )


def test_a_rank_that_is_missing_and_an_engine_that_died_are_problems() -> None:
    assert any(
        "2 ranks responded, expected 4" in problem for problem in ranks.problems(result(), 4)
    )
    assert list(ranks.problems({"error": "ended with 1"}, 2)) == ["ended with 1"]
