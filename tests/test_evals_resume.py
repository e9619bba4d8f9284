# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""The journal of a run, and what it takes to go on with one."""

from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from vllm_diffgemma_tp.tools.evals import settings
from vllm_diffgemma_tp.tools.evals.config import EvalConfig, load_config
from vllm_diffgemma_tp.tools.evals.evaluate import _check_one_model
from vllm_diffgemma_tp.tools.evals.journal import (
    Failure,
    Journal,
    Record,
    Reply,
    Session,
)
from vllm_diffgemma_tp.tools.shared.errors import UserError

CONFIGS = Path(__file__).parents[1] / "configs" / "gsm8k"
SESSION = Session(["serve"], "0.1.0", "0.32.0", "abc123")


def reply(index: int, session: int, sent: float, received: float) -> Reply:
    return Reply(index, session, f"answer {index}", 10, 5, sent, received)


def test_a_journal_is_read_back(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.jsonl")
    records: list[Record] = [SESSION, reply(3, 1, 1.0, 2.0), Failure(4, 1, "it broke")]
    for record in records:
        journal.add(record)
    again = Journal(tmp_path / "journal.jsonl")
    assert again.sessions == [SESSION]
    assert again.replies == {3: records[1]}
    assert again.failures == [records[2]]
    assert again.request_id(7) == "question-7-session-1"


def test_a_torn_line_is_dropped_and_not_run_on_from(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    journal = Journal(path)
    journal.add(SESSION)
    journal.add(reply(0, 1, 1.0, 2.0))
    path.write_bytes(path.read_bytes() + b'{"kind": "Reply", "ind')
    again = Journal(path)
    again.add(reply(1, 1, 2.0, 3.0))
    assert sorted(Journal(path).replies) == [0, 1]


def test_times_leave_out_the_interruption(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.jsonl")
    journal.add(SESSION)
    journal.add(reply(0, 1, 30.0, 33.0))
    journal.add(reply(1, 1, 31.0, 32.0))
    journal.add(SESSION)
    journal.add(reply(2, 2, 40.0, 44.0))
    assert journal.wall_seconds() == 33.0 + 44.0
    assert journal.request_seconds() == 3.0 + 4.0


# Settings ----------------------------------------------------------------------------


def config(**changes: object) -> EvalConfig:
    return load_config(CONFIGS / "tiny.yaml").model_copy(update=changes)


def test_the_same_run_may_go_on(tmp_path: Path) -> None:
    settings.begin(tmp_path / "run", settings.settings(config(), "abc"))
    settings.check_same(tmp_path / "run", settings.settings(config(), "abc"))


def test_the_gate_may_be_another_when_a_run_goes_on(tmp_path: Path) -> None:
    settings.begin(tmp_path, settings.settings(config(), "abc"))
    stricter = config(accuracy_threshold=0.99, tolerance=0.01)
    settings.check_same(tmp_path, settings.settings(stricter, "abc"))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"num_questions": 100}, "num_questions 200, not 100"),
        ({"seed": 1}, "seed 0, not 1"),
        ({"server_args": ""}, "server_args"),
        ({"lm_eval_task": CONFIGS.parent / "lm_eval" / "gsm8k_first5.yaml"}, "task"),
    ],
)
def test_another_run_is_refused_by_the_setting(
    tmp_path: Path, change: dict[str, object], named: str
) -> None:
    settings.begin(tmp_path, settings.settings(config(), "abc"))
    with pytest.raises(UserError, match=named):
        settings.check_same(tmp_path, settings.settings(config(**change), "abc"))


def test_other_questions_are_refused(tmp_path: Path) -> None:
    settings.begin(tmp_path, settings.settings(config(), "abc"))
    with pytest.raises(UserError, match="questions 'abc', not 'def'"):
        settings.check_same(tmp_path, settings.settings(config(), "def"))


def test_other_weights_are_refused(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "model.safetensors").write_bytes(b"one")
    changed = config(model_name=str(model))
    settings.begin(tmp_path, settings.settings(changed, "abc"))
    (model / "model.safetensors").write_bytes(b"two")
    with pytest.raises(UserError, match="model 'sha256:"):
        settings.check_same(tmp_path, settings.settings(changed, "abc"))


def test_a_model_from_the_hub_is_known_by_its_commit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    commit = tmp_path / "models--some--model" / "snapshots" / "0a1b2c"
    commit.mkdir(parents=True)
    (commit / "config.json").write_text("{}")
    refs = tmp_path / "models--some--model" / "refs"
    refs.mkdir()
    (refs / "main").write_text("0a1b2c")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    hub = config(model_name="some/model", model_revision="main")
    assert settings.model_version(hub) == "0a1b2c"
    # Before it is fetched only the name is known, and a resumed run must not differ.
    assert settings.settings(hub, "abc")["model"] == "main"


def test_where_nothing_began_nothing_goes_on(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="leave out --resume"):
        settings.check_same(tmp_path, {})


def test_a_run_is_not_begun_over_another(tmp_path: Path) -> None:
    settings.begin(tmp_path, {})
    with pytest.raises(UserError, match="add --resume"):
        settings.begin(tmp_path, {})


def test_a_task_that_another_includes_has_a_say(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text("a: !function data.load\n")
    task = tmp_path / "task.yaml"
    task.write_text(yaml.safe_dump({"include": "base.yaml"}))
    before = settings.yaml_digest(task)
    (tmp_path / "base.yaml").write_text("a: 2\n")
    assert settings.yaml_digest(task) != before


def test_answers_of_two_models_are_not_mixed(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.jsonl")
    journal.add(SESSION)
    _check_one_model(journal)
    journal.add(replace(SESSION, model_version="def456"))
    with pytest.raises(UserError, match="abc123, def456"):
        _check_one_model(journal)
