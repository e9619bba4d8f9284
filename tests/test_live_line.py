# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""The live line is read back as it was written, and a silent rank is noticed."""

from vllm_diffgemma_tp.worker.live_line import (
    LiveRank,
    format_live_line,
    missing_ranks,
    parse_live_lines,
)

FIRST = LiveRank("0.1.0", "0.32.0+cpu", 0, 2, 0, 128)
SECOND = LiveRank("0.1.0", "0.32.0+cpu", 1, 2, 128, 245)


def _log(*ranks: LiveRank) -> str:
    prefix = "(Worker_TP0 pid=7) INFO 01-01 00:00:00 [model.py:1] "
    lines = [f"{prefix}{format_live_line(rank)}" for rank in ranks]
    return "\n".join(["INFO starting", *lines, "INFO ready"])


def test_a_live_line_survives_the_round_trip_through_a_log() -> None:
    assert parse_live_lines(_log(FIRST, SECOND)) == [FIRST, SECOND]


def test_a_log_without_live_lines_yields_nothing() -> None:
    assert parse_live_lines("INFO vllm_diffgemma_tp is installed") == []


def test_no_rank_is_missing_when_all_wrote_their_line() -> None:
    assert missing_ranks(_log(FIRST, SECOND), tp_size=2) == set()


def test_a_rank_that_wrote_no_line_is_missing() -> None:
    assert missing_ranks(_log(FIRST), tp_size=2) == {1}


def test_lines_of_another_tensor_parallel_size_do_not_count() -> None:
    assert missing_ranks(_log(FIRST, SECOND), tp_size=4) == {0, 1, 2, 3}
