# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""An OpenAI endpoint as lm-eval's model: asks what is not yet answered, and notes it.

lm-eval's own client knows neither a seed for each question nor how to go on after an
interruption, and fills a missing text with "", which would score as a wrong answer.
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

#: Failed requests after which no more are sent: the server is not well.
MAX_FAILURES = 8


class BadReplyError(Exception):
    """The server answered a request without an answer in it."""


class Endpoint(LM):
    """Asks a server, keeping every reply in a journal.

    Args:
        config: Sampling, concurrency and kind of endpoint.
        base_url: Root of the server, without ``/v1``.
        journal: Replies so far; a question in it is not asked again.
        is_right: Whether a text answers a question, for the progress bar.
        started: ``time.monotonic()`` at the start of the server.
    """

    #: Part of the key of lm-eval's cache of prompts, which is not used.
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
        """The messages as they are: the server applies its own template."""
        return json.dumps(chat_history)

    def generate_until(self, requests: list[Instance]) -> list[str]:
        """The reply to every question.

        Raises:
            UserError: some request failed; the others are in the journal.
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
                "server's log, and add --resume to ask those that are left."
            )
        return [replies[request.doc_id].text for request in requests]

    async def _ask_all(self, waiting: list[Instance], bar: tqdm, right: int) -> None:
        client = openai.AsyncOpenAI(
            base_url=self._url,
            api_key="none",
            # A second try would hide that the first one failed.
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
            # By it the canvas log knows the question.
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
        """Not defined: a diffusion model gives a text no likelihood."""
        raise NotImplementedError

    def loglikelihood_rolling(self, requests: list[Instance]) -> list[float]:
        """Not defined, for the same reason."""
        raise NotImplementedError


def _text(reply: Any, chat: bool) -> str:
    (choice,) = reply.choices
    text = choice.message.content if chat else choice.text
    if text is None:
        raise BadReplyError(f"no text in the reply {reply.to_json(indent=None)}")
    # An answer that the engine gave up on is not the model's answer.
    if choice.finish_reason not in ("stop", "length"):
        raise BadReplyError(f"no finished answer in {reply.to_json(indent=None)}")
    return str(text)
