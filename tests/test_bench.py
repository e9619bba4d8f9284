# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""The benchmark at a tiny shape: its figures are well formed, its bytes are right."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_diffgemma_tp.tools.bench import meters, report
from vllm_diffgemma_tp.tools.bench.figures import RankReport, StepFigures
from vllm_diffgemma_tp.tools.bench.shape import VARIANT_NAMES, BenchPlan
from vllm_diffgemma_tp.tools.cli import main
from vllm_diffgemma_tp.tools.shared.errors import UserError
from vllm_diffgemma_tp.tools.shared.processes import run_ranks

ROWS, VOCAB, HIDDEN = 256, 512, 64
SHAPE = ["--vocab-size", str(VOCAB), "--hidden-size", str(HIDDEN)]
BF16, FP32 = 2, 4


@pytest.fixture(scope="module")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Any]]:
    """What the command writes for T = 1 and T = 2, by T."""
    path = tmp_path_factory.mktemp("bench") / "bench.json"
    with pytest.MonkeyPatch.context() as patch:
        # What is measured is not looked at, and compiling takes most of a minute.
        patch.setenv("TORCH_COMPILE_DISABLE", "1")
        command = ["bench", *SHAPE, "--tp", "1,2", "--repeats", "2"]
        assert main([*command, "--json", str(path)]) == 0
    return {shape["tp"]: shape for shape in json.loads(path.read_text())}


@pytest.mark.slow
@pytest.mark.parametrize("tp_size", [1, 2])
def test_every_variant_is_reported(
    shapes: dict[int, dict[str, Any]], tp_size: int
) -> None:
    shape = shapes[tp_size]
    assert (shape["rows"], shape["vocab_size"], shape["hidden_size"]) == (
        ROWS,
        VOCAB,
        HIDDEN,
    )
    assert shape["dtype"] == "bfloat16"
    assert set(shape["versions"]) == {"vllm_diffgemma_tp", "vllm", "torch", "python"}
    assert tuple(shape["variants"]) == VARIANT_NAMES
    for figures in shape["variants"].values():
        assert len(figures["seconds"]) == shape["repeats"] == 2
        assert 0 < figures["seconds_min"] <= figures["seconds_median"]
        assert figures["seconds_median"] <= figures["seconds_max"]
        assert figures["peak_bytes_per_rank"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("tp_size", [1, 2])
def test_the_variants_do_the_same_work(
    shapes: dict[int, dict[str, Any]], tp_size: int
) -> None:
    for name, figures in shapes[tp_size]["variants"].items():
        if name != "floor":
            # Logits that round to the same bf16 number are a tie for some only.
            assert figures["argmax_agreement"] > 0.98


@pytest.mark.slow
def test_one_rank_sends_nothing(shapes: dict[int, dict[str, Any]]) -> None:
    for figures in shapes[1]["variants"].values():
        assert figures["wire_bytes_per_rank"] == 0
    assert "in_tree/ours wire_bytes_per_rank" not in shapes[1]["ratios"]


@pytest.mark.slow
def test_bytes_sent_by_the_in_tree_step_are_those_of_its_two_collectives(
    shapes: dict[int, dict[str, Any]],
) -> None:
    variants = shapes[2]["variants"]
    own_logits = ROWS * VOCAB // 2 * BF16
    soft_embedding = ROWS * HIDDEN * BF16
    assert (
        variants["in_tree"]["wire_bytes_per_rank"]
        == own_logits + 2 * soft_embedding // 2
    )
    assert variants["allgather_weights"]["wire_bytes_per_rank"] == 0
    assert variants["floor"]["wire_bytes_per_rank"] == 0


@pytest.mark.slow
def test_bytes_sent_by_our_step_are_blocks_and_soft_embeddings(
    shapes: dict[int, dict[str, Any]],
) -> None:
    # Blocks of 64 ids, three numbers each, beside a row's two candidates.
    own_table = ROWS * (4 + 3 * (VOCAB // 2 // 64)) * FP32
    soft_embedding = ROWS * HIDDEN * FP32
    sent = shapes[2]["variants"]["ours"]["wire_bytes_per_rank"]
    assert sent == own_table + 2 * soft_embedding // 2


def test_collectives_are_counted_by_the_stated_convention() -> None:
    calls = []

    def collective(*args: Any) -> str:
        calls.append(args)
        return "result"

    communicator = SimpleNamespace(
        all_reduce=collective, all_gather=collective, gather=collective
    )
    group: Any = SimpleNamespace(world_size=4, device_communicator=communicator)
    meter = meters.WireMeter(group)
    tensor = torch.zeros(10, dtype=torch.bfloat16)
    for name, sent in (("all_reduce", 30), ("all_gather", 60), ("gather", 20)):
        assert getattr(communicator, name)(tensor, 0) == "result"
        assert meter.take() == sent
    assert meter.take() == 0
    assert calls == [(tensor, 0)] * 3


@pytest.mark.slow
def test_peak_memory_is_what_was_held_at_once_used_or_not() -> None:
    # In a process of its own: it changes how the process allocates.
    (peaks,) = run_ranks(1, _peaks, lambda text: None)
    expected = {"one after the other": 40e6, "at once": 80e6, "reserved": 40e6}
    for name, num_bytes in expected.items():
        assert peaks[name] == pytest.approx(num_bytes, rel=0.1), name


def _peaks(rank: int, progress: Callable[[str], None]) -> dict[str, int]:
    meters.make_allocations_resident()
    kept = []

    def one_after_the_other() -> None:
        torch.ones(10_000_000)
        torch.ones(10_000_000)

    def at_once() -> None:
        first = torch.ones(10_000_000)
        torch.neg(first)

    def reserved() -> None:
        kept.append(torch.empty(10_000_000))

    cpu = torch.device("cpu")
    works = (one_after_the_other, at_once, reserved)
    return {
        work.__name__.replace("_", " "): meters.peak_bytes(cpu, work) for work in works
    }


def test_times_are_of_the_slowest_rank_repeat_by_repeat() -> None:
    def of_rank(seconds: list[float], wire: int, peak: int) -> RankReport:
        figures = StepFigures(seconds, wire, peak, None, "")
        return RankReport({ROWS: {"floor": figures}}, "a CPU", 1, {})

    ranks = [of_rank([1.0, 5.0, 3.0], 7, 20), of_rank([4.0, 2.0, 1.0], 8, 10)]
    plan = BenchPlan(2, (ROWS,), VOCAB, HIDDEN, 3, ("floor",))
    (shape,) = report.results(plan, ranks)
    figures = shape["variants"]["floor"]
    assert figures["seconds"] == [4.0, 5.0, 3.0]
    assert figures["seconds_median"] == 4.0
    assert figures["wire_bytes_per_rank"] == 8
    assert figures["peak_bytes_per_rank"] == 20
    assert shape["ratios"] == {}


@pytest.mark.parametrize(
    ("arguments", "status", "sentence"),
    [
        (["--variants", "ours,dense"], 1, "There is no variant 'dense'"),
        (["--rows", "100"], 1, "--rows 100 is not a number of whole canvases"),
        (["--rows", "0"], 2, "0 is not at least 1"),
        (["--tp", "3"], 1, "--tp 3 does not divide"),
        (["--rows", "1048576", "--tp", "2"], 1, "GiB are available"),
        (["--json", "/nowhere/bench.json"], 1, "cannot be written"),
    ],
)
def test_bad_input_is_one_sentence(
    arguments: list[str],
    status: int,
    sentence: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    try:
        found = main(["bench", *arguments])
    except SystemExit as left:
        found = int(str(left.code))
    assert found == status
    output = capsys.readouterr()
    assert output.out == ""
    assert sentence in output.err
    if status == 1:
        assert len(output.err.splitlines()) == 1


@pytest.mark.slow
def test_a_rank_that_dies_ends_the_command_and_its_neighbours() -> None:
    with pytest.raises(UserError, match="Rank 1 was killed, most likely because"):
        run_ranks(2, _die_on_rank_1, lambda text: None)


def _die_on_rank_1(rank: int, progress: Callable[[str], None]) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)


def _wait(rank: int, _: Any) -> None:
    time.sleep(600)


@pytest.mark.slow
def test_ranks_that_fall_silent_end_the_command() -> None:
    with pytest.raises(UserError, match="No rank has reported for 2 s"):
        run_ranks(2, _wait, lambda text: None, longest_silence_s=2)


@pytest.mark.slow
def test_a_rank_that_fails_says_why() -> None:
    with pytest.raises(UserError, match="^Rank 0 failed: ValueError: no such thing.$"):
        run_ranks(1, _fail, lambda text: None)


def _fail(rank: int, progress: Callable[[str], None]) -> None:
    raise ValueError("no such\nthing.")


@pytest.mark.slow
def test_nothing_is_left_after_ctrl_c(tmp_path: Path) -> None:
    script = f"""
from functools import partial
from test_bench import _record_and_wait
from vllm_diffgemma_tp.tools.shared.processes import run_ranks
if __name__ == "__main__":
    run_ranks(2, partial(_record_and_wait, {str(tmp_path)!r}), print)
"""
    main_file = tmp_path / "main.py"
    main_file.write_text(script)
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    process = subprocess.Popen(
        [sys.executable, str(main_file)],
        env={**os.environ, "PYTHONPATH": path},
        stderr=subprocess.DEVNULL,
    )
    try:
        pids = [int(_when_written(tmp_path / f"rank{rank}")) for rank in range(2)]
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=30) != 0
    finally:
        process.kill()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def _record_and_wait(folder: str, rank: int, progress: Callable[[str], None]) -> None:
    (Path(folder) / f"rank{rank}").write_text(f"{os.getpid()}\n")
    time.sleep(600)


def _when_written(path: Path) -> str:
    deadline = time.monotonic() + 60
    while not (path.exists() and path.read_text().endswith("\n")):
        assert time.monotonic() < deadline, f"{path} was not written"
        time.sleep(0.1)
    return path.read_text()
