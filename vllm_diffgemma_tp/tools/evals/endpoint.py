# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""An OpenAI endpoint as an lm-eval model, which journals replies and can resume.

lm-eval's own client has no per-question seed, cannot resume, and replaces a missing
text by "", which would be scored as a wrong answer.
"""

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import openai
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from tqdm import tqdm

from vllm_diffgemma_tp.tools.evals.config import EvalConfig
from vllm_diffgemma_tp.tools.evals.journal import Failure, Journal, Reply
from vllm_diffgemma_tp.tools.shared.errors import UserError

#: After this many failed requests no more are sent, as the server must be at fault.
MAX_FAILURES = 8


class BadReplyError(Exception):
    """A reply of the server contains no complete answer."""


class Endpoint(LM):
    """Sends questions to a server and adds every reply to a journal.

    Args:
        config: Sampling settings, concurrency and kind of endpoint.
        base_url: URL of the server, without ``/v1``.
        journal: Replies so far; questions in it are not asked again.
        is_right: Whether a text is the right answer, for the progress bar.
        started: ``time.monotonic()`` at the start of the server.
    """

    #: lm-eval reads this for its prompt cache, which is not used.
    tokenizer_name = ""

    def __init__(
        self,
        config: EvalConfig,
        base_url: str,
        journal: Journal,
        is_right: Callable[[Instance, str], bool],
        started: float,
    ) -> None:
        super().__init__()
        self._config = config
        self._url = f"{base_url}/v1"
        self._journal = journal
        self._is_right = is_right
        self._started = started
        self._failed = 0

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Return the messages as JSON, because the server applies the template."""
        return json.dumps(chat_history)

    def generate_until(self, requests: list[Instance]) -> list[str]:
        """Return the reply to every question.

        Raises:
            UserError: A request failed; all replies are in the journal.
        """
        replies = self._journal.replies
        waiting = [request for request in requests if request.doc_id not in replies]
        with tqdm(
            desc=f"{self._config.task_name}",
            total=len(requests),
            initial=len(requests) - len(waiting),
            unit="question",
        ) as bar:
            right = sum(
                self._is_right(request, replies[request.doc_id].text)
                for request in requests
                if request.doc_id in replies
            )
            if waiting:
                asyncio.run(self._ask_all(waiting, bar, right))
        if self._failed:
            first = self._journal.failures[-self._failed].reason
            left = sum(request.doc_id not in replies for request in requests)
            raise UserError(
                f"{self._failed} requests failed, {left} of {len(requests)} questions "
                f"are without an answer, and the first failure was '{first}': see the "
                "server's log, and add --resume to ask those again."
            )
        return [replies[request.doc_id].text for request in requests]

    async def _ask_all(self, waiting: list[Instance], bar: tqdm, right: int) -> None:
        client = openai.AsyncOpenAI(
            base_url=self._url,
            api_key="none",
            # A retry would hide the failure of the first request.
            max_retries=0,
            timeout=self._config.request_timeout_seconds,
        )

        async def ask_from(queue: Iterator[Instance]) -> None:
            nonlocal right
            for request in queue:
                if self._failed >= MAX_FAILURES:
                    return
                try:
                    reply = await self._ask(client, request)
                except (openai.OpenAIError, BadReplyError) as error:
                    self._failed += 1
                    self._journal.add(
                        Failure(request.doc_id, len(self._journal.sessions), str(error))
                    )
                else:
                    self._journal.add(reply)
                    right += self._is_right(request, reply.text)
                    bar.update()
                bar.set_postfix_str(
                    f"{self._failed} failed, {right / max(bar.n, 1):.1%} right"
                )

        queue = iter(waiting)
        async with client, asyncio.TaskGroup() as group:
            for _ in range(self._config.max_concurrency):
                group.create_task(ask_from(queue))

    async def _ask(self, client: openai.AsyncOpenAI, request: Instance) -> Reply:
        prompt, settings = request.args
        index = request.doc_id
        config = self._config
        values: dict[str, Any] = {
            "model": config.model_name,
            "max_tokens": config.max_tokens,
            "temperature": config.temperature,
            "stop": settings["until"],
            # The canvas log identifies the question by this id.
            "extra_body": {"request_id": self._journal.request_id(index)},
        }
        if config.seed is not None:
            values["seed"] = config.seed + index
        sent = time.monotonic() - self._started
        reply: Any
        if config.use_chat_completions:
            messages = json.loads(prompt)
            reply = await client.chat.completions.create(messages=messages, **values)
        else:
            reply = await client.completions.create(prompt=prompt, **values)
        text = _text(reply, config.use_chat_completions)
        return Reply(
            index=index,
            session=len(self._journal.sessions),
            text=text,
            prompt_tokens=reply.usage.prompt_tokens,
            completion_tokens=reply.usage.completion_tokens,
            sent=sent,
            received=time.monotonic() - self._started,
        )

    def loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:
        """Not implemented: a diffusion model has no likelihood for a text."""
        raise NotImplementedError

    def loglikelihood_rolling(self, requests: list[Instance]) -> list[float]:
        """Not implemented, for the same reason."""
        raise NotImplementedError


def _text(reply: Any, chat: bool) -> str:
    (choice,) = reply.choices
    text = choice.message.content if chat else choice.text
    if text is None:
        raise BadReplyError(f"no text in the reply {reply.to_json(indent=None)}")
    # If the engine aborted the request, the text is not the model's answer.
    if choice.finish_reason not in ("stop", "length"):
        raise BadReplyError(f"no finished answer in {reply.to_json(indent=None)}")
    return str(text)
