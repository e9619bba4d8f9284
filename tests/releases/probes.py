# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""What vLLM's own class does with a few requests, release by release.

Run as a script by the Python of a release's environment, it asks them of vLLM's own
class, one of them of this project's too, and writes a JSON file. All of this project's
answers are in `test_live_release.py`.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
import tempfile
import urllib.error
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from http.client import HTTPException
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1]
sys.path.insert(0, str(TESTS))
from completions import PROMPT, complete  # noqa: E402
from plugin_folder import NAME, install  # noqa: E402
from tiny_server import TINY_CHECKPOINT, tiny_server  # noqa: E402

from vllm_diffgemma_tp.cpu import cpu_engine  # noqa: E402
from vllm_diffgemma_tp.tools.bench.live import InTreeServer  # noqa: E402
from vllm_diffgemma_tp.tools.shared.errors import UserError  # noqa: E402
from vllm_diffgemma_tp.tools.shared.server import Server, telling_line  # noqa: E402
from vllm_diffgemma_tp.worker.live_line import format_live_line  # noqa: E402

ALLOWED = [20, 60, 130, 200]
BIASED = 200
# What the founding report quotes, inside an error of several lines.
_FOUNDING = re.compile(r"a and b must have same reduction dim.*(?=[.'])")
ANSWERED, IGNORED, REFUSED = "answered", "ignored", "refused"
FAILED, ENDED = "failed", "ended the server"

# vLLM 0.25 to 0.30 asks how much device memory is free, which its CPU platform does not
# say. Only with an answer can its own class be asked anything there.
REPORT_FREE_MEMORY = """
def register():
    from vllm.platforms import current_platform
    if getattr(current_platform, "mem_get_info", None) is None:
        type(current_platform).mem_get_info = lambda *_: (2**30, 2**30)
"""


@dataclass(frozen=True)
class Probe:
    """One request.

    Attributes:
        name: As the table of releases says it.
        tp_size: T of the server that is asked.
        body: Of ``/v1/completions``, beside the prompt.
        honoured: Whether an answer's ids are what was asked for.
        again: Whether the same answer must come a second time.
        refused: Whether this project answers it with a 400.
        needs_diffusion_args: Whether vLLM to 0.30 does not know it.
    """

    name: str
    tp_size: int
    body: dict[str, Any]
    honoured: Callable[[list[int]], bool] = bool
    again: bool = False
    refused: bool = False
    needs_diffusion_args: bool = False


#: In the order in which a server is asked: what may end it comes last.
PROBES = (
    Probe("any request at T = 1", 1, {}),
    Probe("`seed`", 1, {"seed": 1}, again=True),
    Probe("`temperature` 0", 1, {"temperature": 0}, again=True),
    Probe(
        "`logit_bias`",
        1,
        {"logit_bias": {str(BIASED): 50}},
        honoured=lambda ids: set(ids) == {BIASED},
    ),
    Probe("`prompt_logprobs`", 1, {"prompt_logprobs": 1}, refused=True),
    Probe("any request at T = 2", 2, {}),
    Probe(
        "`diffusion_constrained` at T = 2",
        2,
        {
            "logprobs": len(ALLOWED),
            "logprob_token_ids": ALLOWED,
            "vllm_xargs": {"diffusion_constrained": 1, "diffusion_max_steps": 2},
        },
        honoured=lambda ids: set(ids) <= set(ALLOWED),
        needs_diffusion_args=True,
    ),
)


def known_probes() -> list[Probe]:
    """Those whose request the installed release has heard of."""
    from vllm_diffgemma_tp.compat.requests import has_diffusion_args

    known = has_diffusion_args()
    return [probe for probe in PROBES if known or not probe.needs_diffusion_args]


def outcome(server: Server, probe: Probe) -> str:
    """What comes of a request: one of the words above."""
    # vLLM's own class takes no other temperature, and its default may be another.
    body = {"max_tokens": 32, "temperature": 1.0, "return_token_ids": True}
    try:
        first, *others = (
            complete(server, PROMPT, **body | probe.body)["token_ids"]
            for _ in range(1 + probe.again)
        )
    except urllib.error.HTTPError as error:
        if error.code < 500:
            return REFUSED
    except (OSError, HTTPException):
        pass
    else:
        same = all(other == first for other in others)
        return ANSWERED if same and probe.honoured(first) else IGNORED
    return FAILED if server.wait(20) is None else ENDED


def ask_in_tree(probes: Iterable[Probe], tp_size: int, folder: Path) -> dict[str, Any]:
    """Outcome, and the telling line of the log, of each probe at this T."""
    model = folder / "model"
    _unpadded(TINY_CHECKPOINT, model)
    cpu_engine.arrange(tp_size)
    plugin = folder / "plugin"
    plugin.mkdir()
    server = tiny_server(
        tp_size,
        folder,
        model=model,
        flags=["--load-format", "dummy"],
        env=install(REPORT_FREE_MEMORY, plugin),
        kind=partial(InTreeServer, plugins=NAME),
    )
    found: dict[str, Any] = {}
    try:
        with server:
            for probe in probes:
                word = outcome(server, probe)
                found[probe.name] = _found(word, server)
                if word == ENDED:
                    break
    except UserError:
        return {probe.name: _found(ENDED, server) for probe in probes}
    return found


def _unpadded(checkpoint: Path, folder: Path) -> None:
    """The checkpoint without weights, of a vocabulary that one rank need not pad.

    Of a padded one, as the tiny checkpoint's, vLLM 0.24 multiplies by the padding too,
    so that its own class fails at T = 1 already.
    """
    shutil.copytree(checkpoint, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["vocab_size"] = 256
    (folder / "config.json").write_text(json.dumps(config))


def ask_ours(folder: Path) -> dict[str, str]:
    """What this project's class says of itself at T = 2, and its first answer."""
    with tiny_server(2, folder) as server:
        last = max(server.assert_plugin_live(), key=lambda live: live.rank)
        answer = complete(server, PROMPT, max_tokens=32, seed=1)["text"]
        return {"live_line": format_live_line(last), "answer": answer}


def _found(word: str, server: Server) -> dict[str, str]:
    if word not in (FAILED, ENDED):
        return {"outcome": word, "line": ""}
    # Without what a terminal makes colours of.
    log = re.sub(r"\x1b\[[0-9;]*m", "", server.log)
    founding = _FOUNDING.search(log)
    return {"outcome": word, "line": founding[0] if founding else telling_line(log)}


def main() -> None:
    """Ask all that this release knows, and write what came of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("result", type=Path)
    path = parser.parse_args().result
    cpu_engine.arrange()
    known = known_probes()
    in_tree: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for tp_size in (1, 2):
            probes = [probe for probe in known if probe.tp_size == tp_size]
            own = Path(folder) / str(tp_size)
            own.mkdir()
            in_tree |= ask_in_tree(probes, tp_size, own)
        ours = ask_ours(Path(folder) / "ours")
    path.write_text(json.dumps({"in_tree": in_tree, **ours}, indent=2))


if __name__ == "__main__":
    main()
