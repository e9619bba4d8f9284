# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""``LLM.generate`` answers, refuses and fails as a server does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from completions import PROMPT, complete
from conftest import LiveServers
from plugin_folder import install
from test_live_faults import CAUSE, NAN_LOGITS, PLANT_NANS
from test_live_requests import ALLOWED, MANY_ALLOWED, REFUSED, has_diffusion_args

CHECKPOINT = Path(__file__).parents[1] / "configs" / "tiny" / "checkpoint"
EXTRA = {"diffusion_max_steps": 3}
HONOURED: list[dict[str, Any]] = [
    {"seed": 7},
    {"temperature": 0.0},
    {"seed": 7, "temperature": 2.0, "min_p": 0.1, "extra_args": EXTRA},
    {"seed": 7, "top_k": 5, "top_p": 0.9},
    {"seed": 7, "logit_bias": {"200": 50.0}, "bad_words": ["7"]},
    {"seed": 7, "allowed_token_ids": MANY_ALLOWED, "extra_args": EXTRA},
    {
        "seed": 7,
        "logprob_token_ids": ALLOWED,
        "logprobs": len(ALLOWED),
        "extra_args": {"diffusion_constrained": 1, **EXTRA},
    },
]
if not has_diffusion_args():
    HONOURED = [settings for settings in HONOURED if "extra_args" not in settings]
# What has another name over HTTP or is not known to SamplingParams.
NOT_OFFLINE = {"response_format", "structured_outputs", "use_beam_search"}
SCRIPT = """
import json, sys
from vllm_diffgemma_tp.cpu import cpu_engine

def main():
    order = json.load(sys.stdin)
    cpu_engine.arrange(order["tp"])
    from vllm import LLM, SamplingParams
    from vllm.exceptions import VLLMValidationError
    llm = LLM(
        order["model"], tensor_parallel_size=order["tp"], dtype="float32",
        max_model_len=512, max_num_seqs=8, enforce_eager=True,
        limit_mm_per_prompt={"image": 0, "video": 0},
    )
    refused = []
    for settings in order["refused"]:
        try:
            llm.generate(order["prompt"], SamplingParams(**settings), use_tqdm=False)
            refused.append("")
        except VLLMValidationError as error:
            refused.append(str(error))
    for each in order["honoured"]:
        if "logit_bias" in each:
            # JSON has no integer keys.
            each["logit_bias"] = {int(k): v for k, v in each["logit_bias"].items()}
    params = [SamplingParams(max_tokens=64, **each) for each in order["honoured"]]
    replies = llm.generate([order["prompt"]] * len(params), params, use_tqdm=False)
    outputs = [reply.outputs[0] for reply in replies]
    answers = [
        (list(each.token_ids), each.finish_reason, each.stop_reason)
        for each in outputs
    ]
    json.dump({"refused": refused, "answers": answers}, sys.stdout)

if __name__ == "__main__":
    main()
"""

pytestmark = [pytest.mark.live, pytest.mark.own_server, pytest.mark.full]


@pytest.mark.parametrize("tp_size", [1, 2])
def test_offline_as_over_http(
    live_servers: LiveServers, tmp_path: Path, tp_size: int, exhaustive: bool
) -> None:
    if tp_size == 1 and not exhaustive:
        pytest.skip("an engine more than the default allows for: --exhaustive")
    expected = []
    server = live_servers.at(tp_size)
    for settings in HONOURED:
        body = dict(settings)
        body["vllm_xargs"] = body.pop("extra_args", None)
        reply = complete(server, PROMPT, max_tokens=64, return_token_ids=True, **body)
        expected.append((reply["token_ids"], reply["finish_reason"]))
    live_servers.stop()

    refused = {name: REFUSED[name] for name in REFUSED.keys() - NOT_OFFLINE}
    broken = {"seed": 1, "temperature": NAN_LOGITS}
    order = {
        "tp": tp_size,
        "model": str(CHECKPOINT),
        "prompt": PROMPT,
        "honoured": [*HONOURED, broken],
        "refused": [
            {"extra_args" if key == "vllm_xargs" else key: value}
            for settings in refused.values()
            for key, value in settings.items()
        ],
    }
    plugin = tmp_path / "plugin"
    plugin.mkdir()
    (tmp_path / "offline.py").write_text(SCRIPT)
    finished = subprocess.run(
        [sys.executable, tmp_path / "offline.py"],
        input=json.dumps(order),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=500,
        env={
            **os.environ,
            **install(PLANT_NANS, plugin),
            "VLLM_CACHE_ROOT": str(tmp_path / "cache"),
            "VLLM_LOGGING_STREAM": "ext://sys.stderr",
            "HF_HUB_OFFLINE": "1",
        },
    )
    found = json.loads(finished.stdout.splitlines()[-1])
    for name, message in zip(refused, found["refused"], strict=True):
        assert name in message
    *answers, (_, finish_reason, stop_reason) = found["answers"]
    assert [(ids, reason) for ids, reason, _ in answers] == [
        (ids, reason) for ids, reason in expected
    ]
    if tp_size > 1:
        # The fault is one of rank 1.
        assert finish_reason == "error"
        assert CAUSE in stop_reason
