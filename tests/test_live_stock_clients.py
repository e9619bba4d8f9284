# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""lm-eval as it comes, with `temperature: 0` and `seed: 1234` in every request."""

from __future__ import annotations

from typing import Any

import pytest
from test_live_server import TINY, final_number, held_out

from vllm_diffgemma_tp.cpu import cpu_engine
from vllm_diffgemma_tp.tools.shared.server import Server

# Before lm-eval imports transformers, and that torchvision.
cpu_engine.arrange()
from lm_eval.api.instance import Instance  # noqa: E402
from lm_eval.models.openai_completions import LocalCompletionsAPI  # noqa: E402

QUESTIONS = 12

pytestmark = pytest.mark.live


def test_lm_eval_with_its_own_settings(
    live_tp2: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = LocalCompletionsAPI(
        model=live_tp2.model,
        base_url=f"{live_tp2.base_url}/v1/completions",
        tokenizer=str(TINY / "checkpoint"),
        tokenizer_backend="huggingface",
        num_concurrent=4,
        max_retries=1,
    )
    sent: list[dict[str, Any]] = []
    create = model._create_payload

    def note(*args: Any, **kwargs: Any) -> dict[str, Any]:
        sent.append(create(*args, **kwargs))
        return sent[-1]

    monkeypatch.setattr(model, "_create_payload", note)
    rows = held_out(QUESTIONS)
    settings = {"until": ["Question:"], "do_sample": False, "max_gen_toks": 64}
    instances = [
        Instance(
            request_type="generate_until",
            doc=row,
            arguments=(f"Question: {row['question']}\nAnswer:", dict(settings)),
            idx=index,
        )
        for index, row in enumerate(rows)
    ]
    texts = model.generate_until(instances, disable_tqdm=True)
    assert {(body["temperature"], body["seed"]) for body in sent} == {(0, 1234)}
    right = [
        final_number(text) == final_number(row["answer"])
        for text, row in zip(texts, rows, strict=True)
    ]
    # The checkpoint's greedy score is above 0.9.
    assert sum(right) >= QUESTIONS * 3 // 4
