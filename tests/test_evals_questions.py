# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""lm-eval against a small endpoint that refuses what vLLM refuses."""

import http.server
import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
import pytest

from vllm_diffgemma_tp.tools.evals.config import EvalConfig
from vllm_diffgemma_tp.tools.evals.endpoint import MAX_FAILURES
from vllm_diffgemma_tp.tools.evals.journal import Journal, Session
from vllm_diffgemma_tp.tools.evals.questions import Questions
from vllm_diffgemma_tp.tools.evals.results import GATE_FILTER, Answer
from vllm_diffgemma_tp.tools.shared.errors import UserError

TASKS = Path(__file__).parents[1] / "configs" / "lm_eval"
Reply = Callable[[str], str | None]


class Endpoint(http.server.ThreadingHTTPServer):
    """Completions and chat completions; ``reply`` maps a prompt to a text."""

    def __init__(self, reply: Reply) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.reply = reply
        self.payloads: list[dict[str, Any]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(http.server.BaseHTTPRequestHandler):
    server: Endpoint

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        payload = json.loads(body)
        self.server.payloads.append(payload)
        if payload["temperature"] != 1.0:
            self.refuse(400, "temperature is not supported")
            return
        chat = self.path == "/v1/chat/completions"
        text = self.server.reply(
            payload["messages"][-1]["content"] if chat else payload["prompt"]
        )
        if text == "fail":
            self.refuse(500, "EngineDeadError")
            return
        choice = {"message": {"content": text}} if chat else {"text": text}
        usage = {"prompt_tokens": 10, "completion_tokens": 4}
        finish_reason = "abort" if text == "half an" else "stop"
        choices = [{"index": 0, "finish_reason": finish_reason, **choice}]
        self.answer(200, {"choices": choices, "usage": usage})

    def refuse(self, status: int, message: str) -> None:
        self.answer(status, {"error": {"message": message, "code": status}})

    def answer(self, status: int, reply: dict[str, Any]) -> None:
        body = json.dumps(reply).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def serve() -> Iterator[Callable[[Reply], Endpoint]]:
    endpoints = []

    def start(reply: Reply) -> Endpoint:
        endpoint = Endpoint(reply)
        # Looks for the end of the test that often, in seconds.
        threading.Thread(
            target=endpoint.serve_forever, args=(0.01,), daemon=True
        ).start()
        endpoints.append(endpoint)
        return endpoint

    yield start
    for endpoint in endpoints:
        endpoint.shutdown()
        endpoint.server_close()


@pytest.fixture
def data(tmp_path: Path) -> Path:
    rows = [
        {"question": f"What is {a} + 1?", "answer": f"{a} + 1 = {a + 1}\n#### {a + 1}"}
        for a in range(1000, 1010)
    ]
    for split in ("train", "test"):
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / f"{split}.jsonl").write_text(text)
    return tmp_path


def config(**changes: Any) -> EvalConfig:
    values: dict[str, Any] = {
        "model_name": "model",
        "accuracy_threshold": 0.5,
        "num_questions": 4,
        "num_fewshot": 2,
        "max_concurrency": 4,
        "lm_eval_task": TASKS / "gsm8k_first5.yaml",
    }
    return EvalConfig(**(values | changes))


def journal_in(folder: Path) -> Journal:
    """The journal of a server that is up, in the folder."""
    journal = Journal(folder / "journal.jsonl")
    journal.add(Session(["serve"], "0.1.0", "0.32.0", "abc123"))
    return journal


def run(endpoint: Endpoint, data: Path, **changes: Any) -> tuple[Answer, ...]:
    questions = Questions(config(data=data, **changes))
    started = time.monotonic()
    log = data / "canvases.jsonl"
    return questions.answer(endpoint.url, journal_in(data), started, log)


def num_correct(answers: tuple[Answer, ...], filter_name: str) -> int:
    return sum(answer.correct[filter_name] for answer in answers)


def last_question(prompt: str) -> int:
    return int(prompt.rsplit("What is ", 1)[1].split(" ")[0])


def right(prompt: str) -> str:
    return f" It is\n#### {last_question(prompt) + 1:,}"


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("concurrency", [1, 4])
def test_right_answers_are_found_right(
    serve: Callable[[Reply], Endpoint], data: Path, chat: bool, concurrency: int
) -> None:
    answers = run(
        serve(right), data, use_chat_completions=chat, max_concurrency=concurrency
    )
    assert [answer.correct for answer in answers] == [
        {"strict-match": True, "flexible-extract": True}
    ] * 4
    replies = Journal(data / "journal.jsonl").replies
    assert sorted(replies) == [0, 1, 2, 3]
    assert {(one.prompt_tokens, one.completion_tokens) for one in replies.values()} == {
        (10, 4)
    }


def test_the_filters_differ_where_the_mark_is_missing(
    serve: Callable[[Reply], Endpoint], data: Path
) -> None:
    answers = run(serve(lambda prompt: f"it is {last_question(prompt) + 1}"), data)
    assert num_correct(answers, "strict-match") == 0
    assert num_correct(answers, "flexible-extract") == 4


def test_answers_stay_with_their_questions(
    serve: Callable[[Reply], Endpoint], data: Path
) -> None:
    odd_only = serve(lambda p: right(p) if last_question(p) % 2 else "#### 7")
    answers = run(odd_only, data)
    assert [answer.correct["strict-match"] for answer in answers] == [
        False,
        True,
        False,
        True,
    ]
    assert answers[1].question == "What is 1001 + 1?"
    assert answers[1].response == right("What is 1001 + 1?")


def test_the_prompt_starts_with_the_first_training_rows(
    serve: Callable[[Reply], Endpoint], data: Path
) -> None:
    endpoint = serve(right)
    run(endpoint, data)
    prompt = min(payload["prompt"] for payload in endpoint.payloads)
    assert prompt == (
        "Question: What is 1000 + 1?\nAnswer: 1000 + 1 = 1001\n#### 1001\n\n"
        "Question: What is 1001 + 1?\nAnswer: 1001 + 1 = 1002\n#### 1002\n\n"
        "Question: What is 1000 + 1?\nAnswer:"
    )


def test_max_tokens_reaches_the_server(
    serve: Callable[[Reply], Endpoint], data: Path
) -> None:
    endpoint = serve(right)
    run(endpoint, data, max_tokens=77)
    assert {payload["max_tokens"] for payload in endpoint.payloads} == {77}


@pytest.mark.parametrize("concurrency", [1, 4])
def test_one_failed_request_fails_the_run(
    serve: Callable[[Reply], Endpoint], data: Path, concurrency: int
) -> None:
    broken = serve(lambda p: "fail" if last_question(p) == 1002 else right(p))
    with pytest.raises(UserError, match="EngineDeadError"):
        run(broken, data, max_concurrency=concurrency)


def test_the_other_questions_are_asked_after_a_failure(
    serve: Callable[[Reply], Endpoint], data: Path
) -> None:
    broken = serve(lambda p: "fail" if last_question(p) == 1000 else right(p))
    with pytest.raises(UserError, match="1 requests failed, 1 of 4 questions"):
        run(broken, data, max_concurrency=1)
    journal = Journal(data / "journal.jsonl")
    assert sorted(journal.replies) == [1, 2, 3]
    assert [failure.index for failure in journal.failures] == [0]


def test_nothing_more_is_sent_when_the_server_is_not_well(
    serve: Callable[[Reply], Endpoint], data: Path
) -> None:
    broken = serve(lambda prompt: "fail")
    with pytest.raises(UserError, match=f"{MAX_FAILURES} requests failed"):
        run(broken, data, num_questions=10, max_concurrency=1)
    assert len(broken.payloads) == MAX_FAILURES


def test_settings_that_the_server_refuses_fail_the_run(
    serve: Callable[[Reply], Endpoint], data: Path
) -> None:
    questions = Questions(config(data=data).model_copy(update={"temperature": 0.5}))
    with pytest.raises(UserError, match="temperature is not supported"):
        questions.answer(serve(right).url, journal_in(data), 0.0, data / "none.jsonl")


@pytest.mark.parametrize("chat", [False, True])
def test_a_reply_without_text_is_no_wrong_answer(
    serve: Callable[[Reply], Endpoint], data: Path, chat: bool
) -> None:
    with pytest.raises(UserError, match="no text in the reply"):
        run(serve(lambda prompt: None), data, use_chat_completions=chat)


def test_an_aborted_answer_is_no_wrong_answer(
    serve: Callable[[Reply], Endpoint], data: Path
) -> None:
    with pytest.raises(UserError, match="no finished answer"):
        run(serve(lambda prompt: "half an"), data)


def test_a_server_that_is_gone_fails_the_run(data: Path) -> None:
    questions = Questions(config(data=data))
    with pytest.raises(UserError, match="4 of 4 questions are without an answer"):
        questions.answer(
            "http://127.0.0.1:9", journal_in(data), 0.0, data / "none.jsonl"
        )


def test_every_question_has_its_own_seed(
    serve: Callable[[Reply], Endpoint], data: Path
) -> None:
    endpoint = serve(right)
    run(endpoint, data, seed=7, max_concurrency=1)
    assert [payload["seed"] for payload in endpoint.payloads] == [7, 8, 9, 10]


def test_without_a_seed_none_is_sent(
    serve: Callable[[Reply], Endpoint], data: Path
) -> None:
    endpoint = serve(right)
    run(endpoint, data)
    assert all("seed" not in payload for payload in endpoint.payloads)


def test_an_interrupted_run_goes_on_where_it_was(
    serve: Callable[[Reply], Endpoint], data: Path
) -> None:
    whole = run(serve(right), data)
    journal = data / "journal.jsonl"
    lines = journal.read_text().splitlines(keepends=True)
    # One question finished, and the next one was being written.
    journal.write_text("".join(lines[:2]) + lines[2][:20])
    (kept,) = Journal(journal).replies
    endpoint = serve(right)
    assert run(endpoint, data) == whole
    assert len(endpoint.payloads) == 3
    asked = {payload["request_id"] for payload in endpoint.payloads}
    assert asked == {f"question-{i}-session-2" for i in range(4) if i != kept}


def test_a_finished_run_asks_nothing(
    serve: Callable[[Reply], Endpoint], data: Path
) -> None:
    endpoint = serve(right)
    whole = run(endpoint, data)
    questions = Questions(config(data=data))
    journal = Journal(data / "journal.jsonl")
    assert questions.answer("", journal, 0.0, data / "none.jsonl") == whole
    assert len(endpoint.payloads) == 4


def test_canvases_are_counted_with_the_reply_they_belong_to(
    serve: Callable[[Reply], Endpoint], data: Path
) -> None:
    run(serve(right), data)
    lines = [
        {"request": "cmpl-question-0-session-1-0-abc", "steps": 3, "capped": False},
        {"request": "cmpl-question-0-session-1-0-abc", "steps": 48, "capped": True},
        # Of an earlier session whose reply never came, and of no question.
        {"request": "cmpl-question-1-session-0-0-abc", "steps": 9, "capped": False},
        {"request": "cmpl-warm-up", "steps": 9, "capped": False},
    ]
    log = data / "canvases.jsonl"
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    journal = Journal(data / "journal.jsonl")
    answers = Questions(config(data=data)).answer("", journal, 0.0, log)
    assert (answers[0].steps, answers[0].capped) == ((3, 48), 1)
    assert (answers[1].steps, answers[1].capped) == ((), 0)


def test_the_drawn_examples_are_not_the_first(
    serve: Callable[[Reply], Endpoint], data: Path
) -> None:
    endpoint = serve(right)
    run(endpoint, data, lm_eval_task=TASKS / "gsm8k_drawn5.yaml")
    first = "Question: What is 1000 + 1?\nAnswer: 1000 + 1 = 1001"
    starts = [payload["prompt"].startswith(first) for payload in endpoint.payloads]
    assert not all(starts)
    assert all(p["prompt"].count("Answer:") == 3 for p in endpoint.payloads)


def test_chat_sends_one_message_with_the_examples_in_it(
    serve: Callable[[Reply], Endpoint], data: Path
) -> None:
    endpoint = serve(right)
    run(endpoint, data, use_chat_completions=True)
    (message,) = endpoint.payloads[0]["messages"]
    assert message["role"] == "user"
    assert message["content"].count("Question:") == 3


def test_without_a_folder_the_rows_are_the_hubs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []

    def load_dataset(*names: str) -> datasets.DatasetDict:
        asked.append(names)
        rows = datasets.Dataset.from_list([{"question": "1?", "answer": "#### 1"}] * 4)
        return datasets.DatasetDict(train=rows, test=rows)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    local = Questions(config(num_questions=4))
    assert asked == [("openai/gsm8k", "main")]
    assert len(local.digest()) == 64


def test_a_hub_that_cannot_be_reached_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def load_dataset(*names: str) -> None:
        raise ConnectionError("no route")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(UserError, match="no route.*--data DIR"):
        Questions(config())


def test_the_digest_follows_the_questions(data: Path) -> None:
    before = Questions(config(data=data)).digest()
    assert Questions(config(data=data)).digest() == before
    assert Questions(config(data=data, num_questions=3)).digest() != before
    text = (data / "test.jsonl").read_text().replace("1003 + 1?", "1003 + 2?")
    (data / "test.jsonl").write_text(text)
    assert Questions(config(data=data)).digest() != before


def test_the_running_accuracy_is_the_final_one(
    serve: Callable[[Reply], Endpoint], data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    odd_only = serve(lambda p: right(p) if last_question(p) % 2 else "#### 7")
    answers = run(odd_only, data)
    assert num_correct(answers, GATE_FILTER) == 2
    assert "4/4" in (shown := capsys.readouterr().err)
    assert "0 failed, 50.0% right" in shown
