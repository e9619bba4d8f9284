# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""lm-eval against a small endpoint that refuses what vLLM refuses."""

import http.server
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lm_eval.evaluator
import pytest

from vllm_diffgemma_tp.errors import UserError
from vllm_diffgemma_tp.evals.config import EvalConfig
from vllm_diffgemma_tp.evals.lm_eval_run import TaskRun, run_task

TASK = Path(__file__).parents[1] / "configs" / "lm_eval" / "gsm8k_local.yaml"
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
        if payload["temperature"] != 1.0 or payload["seed"] is not None:
            self.answer(400, {"error": "temperature or seed is not supported"})
            return
        chat = self.path == "/v1/chat/completions"
        text = self.server.reply(
            payload["messages"][-1]["content"] if chat else payload["prompt"]
        )
        if text == "fail":
            self.answer(500, {"error": "EngineDeadError"})
            return
        choice = {"message": {"content": text}} if chat else {"text": text}
        usage = {"prompt_tokens": 10, "completion_tokens": 4}
        finish_reason = "abort" if text == "half an" else "stop"
        choices = [{"index": 0, "finish_reason": finish_reason, **choice}]
        self.answer(200, {"choices": choices, "usage": usage})

    def answer(self, status: int, reply: dict[str, Any]) -> None:
        body = json.dumps(reply).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(autouse=True)
def no_description_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    # lm-eval lists every installed package after each run, which takes seconds.
    monkeypatch.setattr(lm_eval.evaluator, "add_env_info", lambda results: None)


@pytest.fixture
def serve() -> Iterator[Callable[[Reply], Endpoint]]:
    endpoints = []

    def start(reply: Reply) -> Endpoint:
        endpoint = Endpoint(reply)
        threading.Thread(target=endpoint.serve_forever, daemon=True).start()
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
        "lm_eval_task": TASK,
    }
    return EvalConfig(**(values | changes))


def run(endpoint: Endpoint, data: Path, **changes: Any) -> TaskRun:
    log = data / "lm-eval.log"
    return run_task(config(**changes), endpoint.url, data, log)


def last_question(prompt: str) -> int:
    return int(prompt.rsplit("What is ", 1)[1].split(" ")[0])


def right(prompt: str) -> str:
    return f" It is\n#### {last_question(prompt) + 1:,}"


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("concurrency", [1, 4])
def test_right_answers_are_found_right(
    serve: Callable[[Reply], Endpoint], data: Path, chat: bool, concurrency: int
) -> None:
    task = run(
        serve(right), data, use_chat_completions=chat, max_concurrency=concurrency
    )
    assert [answer.correct for answer in task.answers] == [
        {"strict-match": True, "flexible-extract": True}
    ] * 4
    assert (task.requests_sent, task.requests_failed) == (4, 0)
    assert (task.prompt_tokens, task.completion_tokens) == (40, 16)


def test_the_filters_differ_where_the_mark_is_missing(
    serve: Callable[[Reply], Endpoint], data: Path
) -> None:
    task = run(serve(lambda prompt: f"it is {last_question(prompt) + 1}"), data)
    assert task.num_correct("strict-match") == 0
    assert task.num_correct("flexible-extract") == 4


def test_answers_stay_with_their_questions(
    serve: Callable[[Reply], Endpoint], data: Path
) -> None:
    odd_only = serve(lambda p: right(p) if last_question(p) % 2 else "#### 7")
    task = run(odd_only, data)
    assert [answer.correct["strict-match"] for answer in task.answers] == [
        False,
        True,
        False,
        True,
    ]
    assert task.answers[1].question == "What is 1001 + 1?"
    assert task.answers[1].response == right("What is 1001 + 1?")


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


def test_nothing_more_is_sent_after_a_failure(
    serve: Callable[[Reply], Endpoint], data: Path
) -> None:
    broken = serve(lambda prompt: "fail")
    with pytest.raises(UserError, match="after 0 answers"):
        run(broken, data, max_concurrency=2)
    assert len(broken.payloads) <= 2


def test_settings_that_the_server_refuses_fail_the_run(
    serve: Callable[[Reply], Endpoint], data: Path
) -> None:
    refused = config().model_copy(update={"temperature": 0.0})
    with pytest.raises(UserError, match="temperature or seed is not supported"):
        run_task(refused, serve(right).url, data, data / "lm-eval.log")


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
    with pytest.raises(UserError, match="A request failed after 0 answers"):
        run_task(config(), "http://127.0.0.1:9", data, data / "lm-eval.log")
