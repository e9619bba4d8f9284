# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""`verify` in real ranks: every line passes, and every sabotage fails its own."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from sabotage import SABOTAGES

from vllm_diffgemma_tp.cpu import cpu_engine
from vllm_diffgemma_tp.tools import cli
from vllm_diffgemma_tp.tools.shared import costs
from vllm_diffgemma_tp.tools.shared.environment import quiet_vllm
from vllm_diffgemma_tp.tools.shared.group import bind_cores, tensor_parallel_group
from vllm_diffgemma_tp.tools.verify import command
from vllm_diffgemma_tp.tools.verify.command import judge
from vllm_diffgemma_tp.tools.verify.lines import ByT, Line
from vllm_diffgemma_tp.tools.verify.rank import Measured, measure_all

RIGHT = "nothing"


def measure_and_sabotage(
    tp_size: int, port: int, rank: int, progress: Callable[[str], None]
) -> dict[str, Measured]:
    """What a rank measures without a sabotage, and under every sabotage."""
    bind_cores(rank, tp_size)
    with tensor_parallel_group(tp_size, port, rank) as device:
        from vllm.distributed.parallel_state import get_tp_group

        found = {RIGHT: measure_all(device, progress)}
        for name, sabotage in SABOTAGES.items():
            module, function = sabotage.part
            part = importlib.import_module(f"vllm_diffgemma_tp.tools.verify.{module}")
            with sabotage.patch():
                again = getattr(part, function)(get_tp_group(), device)
            found[name] = {**found[RIGHT], **again}
        return found


@pytest.fixture(scope="module")
def by_sabotage() -> dict[str, ByT]:
    with quiet_vllm():
        cpu_engine.arrange()
        ranks = {t: command.run_group(t, measure_and_sabotage) for t in (1, 2)}
    return {
        name: {t: [rank[name] for rank in of_t] for t, of_t in ranks.items()}
        for name in (RIGHT, *SABOTAGES)
    }


def failed(lines: list[Line]) -> list[str]:
    return [line.claim for line in lines if not line.ok]


@pytest.mark.slow
def test_every_claim_holds(by_sabotage: dict[str, ByT]) -> None:
    lines = judge(by_sabotage[RIGHT])
    assert failed(lines) == []
    assert all(line.measured and line.how for line in lines)


@pytest.mark.slow
@pytest.mark.parametrize("name", SABOTAGES)
def test_a_sabotage_fails_its_claims(name: str, by_sabotage: dict[str, ByT]) -> None:
    fails = failed(judge(by_sabotage[name]))
    for beginning in SABOTAGES[name].fails:
        assert any(claim.startswith(beginning) for claim in fails), fails


@pytest.mark.slow
@pytest.mark.parametrize("name", [RIGHT, "the reduce left out"])
def test_the_command_says_so_and_ends_with_that_status(
    name: str,
    by_sabotage: dict[str, ByT],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(command, "run_group", lambda t, _: by_sabotage[name][t])
    file = tmp_path / "verify.json"
    status = cli.main(["verify", "--tp", "2", "--json", str(file)])
    text, content = capsys.readouterr().out, json.loads(file.read_text())
    sound = name == RIGHT
    assert status == (0 if sound else 1)
    assert content["ok"] is sound
    assert [line["ok"] for line in content["lines"]].count(False) == text.count(
        "\nFAIL  "
    )
    assert (text.splitlines()[-1].startswith("verify: PASS, all")) is sound
    assert ("\nFAIL  the identity" in text) is not sound


@contextmanager
def wrong(monkeypatch: pytest.MonkeyPatch, name: str, result: float) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setattr(costs, name, lambda *_, **__: result)
        yield


@pytest.mark.parametrize(
    ("name", "claim"),
    [
        ("table_bytes", "the embedding table"),
        ("soft_embedding_flops", "the soft-embedding product"),
        ("ring_all_reduce_bytes", "reduced:"),
        ("crossover_canvas_steps", "crossover"),
    ],
)
def test_a_wrong_formula_fails_its_claim(
    name: str, claim: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm_diffgemma_tp.tools.verify import arithmetic

    assert failed(list(arithmetic.lines())) == []
    with wrong(monkeypatch, name, 1_000):
        fails = failed(list(arithmetic.lines()))
    assert any(one.startswith(claim) for one in fails)


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--tp", "1"], "shows no sharding"),
        (["--tp", "3"], "not a divisor of 128"),
        (["--json", "/nowhere/verify.json"], "cannot be written"),
    ],
)
def test_what_cannot_be_verified_is_one_sentence(
    argv: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["verify", *argv]) == 1
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1


def test_wrong_usage_is_status_2() -> None:
    for argv in (["--tp", "none"], ["--tp", "0"], ["--ranks", "2"]):
        with pytest.raises(SystemExit) as stopped:
            cli.main(["verify", *argv])
        assert stopped.value.code == 2


def test_more_ranks_than_devices_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[Any]
) -> None:
    monkeypatch.setattr(cpu_engine, "is_cpu_build", lambda: False)
    with pytest.raises(command.UserError, match="needs as many devices, and"):
        command.check_devices(64)
