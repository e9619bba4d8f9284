# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""``vllm-diffgemma-tp bench --live``: the real engine at the real shape.

One server after the other, with this project's class and with vLLM's own, on
``configs/real-shape``: the released model's dimensions, two layers of thirty, no
weights. What is timed is a request of one canvas, over HTTP.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from vllm_diffgemma_tp.cpu import cpu_engine
from vllm_diffgemma_tp.tools.bench import live_report, report
from vllm_diffgemma_tp.tools.bench.resident import memory, reset_peak
from vllm_diffgemma_tp.tools.shared import preflight
from vllm_diffgemma_tp.tools.shared.errors import UserError
from vllm_diffgemma_tp.tools.shared.long_run import (
    run_folder,
    say,
    terminating_like_ctrl_c,
)
from vllm_diffgemma_tp.tools.shared.server import Server, group_members
from vllm_diffgemma_tp.worker.live_line import parse_live_lines

MODEL = Path("configs/real-shape")
SERVER_ARGS = (
    *("--load-format", "dummy", "--dtype", "bfloat16", "--enforce-eager"),
    *("--max-model-len", "1024", "--max-num-seqs", "4"),
    *("--kv-cache-memory-bytes", str(256 * 2**20)),
    *("--limit-mm-per-prompt", '{"image":0,"video":0}'),
)
# Denoising steps of a pair of requests. Both have one prefill and one commit, so the
# difference is steps alone. Not 1: for that vLLM's own class skips a product.
SHORT, LONG = 2, 4
NUM_PAIRS = 3
# Token ids; they need mean nothing, as the weights do not.
PROMPT = list(range(10, 26))
REQUEST_MAX_WAIT_SECONDS = 600

# Bytes in use at the peak, measured at T = 2 with vLLM's own class: what the ranks
# share out, and what each has for itself.
_SHARED_BYTES, _BYTES_PER_RANK = 11 * 10**9, 3.3 * 10**9


class InTreeServer(Server):
    """A server that runs vLLM's own class.

    ``vllm-diffgemma-tp serve`` would refuse to, so this is ``vllm serve``, which finds
    the CPU engine arranged through its environment.

    Args:
        plugins: The vLLM plugins that it loads all the same; ours must not be one.
    """

    def __init__(self, *args: Any, plugins: str = "none", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._env["VLLM_PLUGINS"] = plugins
        serve = self.command.index("serve")
        entry = [sys.executable, "-m", "vllm.entrypoints.cli.main"]
        self.command = [*entry, *self.command[serve:]]


def run(args: argparse.Namespace) -> int:
    """Measure both classes at each T of ``args.tp``, print the tables, and return 0.

    Without ``args.tp``, T is 2.

    Raises:
        UserError: No CPU build, no ``configs/real-shape``, too little memory, or a
            server that failed or ran the other class.
    """
    sizes = list(dict.fromkeys(args.tp or [2]))
    for tp_size in sizes:
        check(tp_size)
    folder = run_folder("bench-live")
    say(f"the servers' logs go to {folder}")
    reports = []
    with terminating_like_ctrl_c():
        for tp_size in sizes:
            cpu_engine.arrange(tp_size, size_kv_cache=False)
            classes = {
                name: measure(name, tp_size, folder / f"{name}-tp{tp_size}")
                for name in live_report.CLASSES
            }
            reports.append(live_report.result(MODEL, tp_size, classes))
    print("\n\n".join(map(live_report.as_text, reports)))
    if args.json is not None:
        report.write_json(args.json, reports)
    return 0


def check(tp_size: int) -> None:
    """What can be known to be wrong before minutes of work.

    Raises:
        UserError: Naming what to change.
    """
    if not cpu_engine.is_cpu_build():
        raise UserError(
            "bench --live reads its memory figures from the processes, which hold the "
            "model on vLLM's CPU build only: run it on that build."
        )
    if not MODEL.is_dir():
        raise UserError(f"There is no {MODEL} here: run this in the project's root.")
    preflight.check_plugin()
    preflight.check_model(str(MODEL), tp_size)
    needed = _SHARED_BYTES + tp_size * _BYTES_PER_RANK
    available = psutil.virtual_memory().available
    if needed > available:
        raise UserError(
            f"The server of vLLM's own class takes about {needed / 1e9:.0f} GB of "
            f"memory at --tp {tp_size}, and {available / 1e9:.0f} GB are available: "
            "end what else runs here."
        )


def measure(name: str, tp_size: int, folder: Path) -> dict[str, Any]:
    """Start the server of one class, time its requests, and read its memory.

    Args:
        name: One of ``live_report.CLASSES``.
        tp_size: T.
        folder: Where the log goes, and a cache that no other run has filled.

    Raises:
        UserError: The server failed, or runs the other class.
    """
    server_class = Server if name == "ours" else InTreeServer
    started = time.monotonic()
    with server_class(
        str(MODEL.resolve()),
        tp_size,
        folder / "server.log",
        SERVER_ARGS,
        env={"VLLM_CACHE_ROOT": str((folder / "vllm-cache").resolve())},
    ) as server:
        startup_seconds = time.monotonic() - started
        if name == "ours":
            server.assert_plugin_live()
        elif parse_live_lines(server.log):
            raise UserError(
                "The plugin is live although VLLM_PLUGINS leaves it out, so there is "
                f"nothing to compare with: see {server.log_path}."
            )
        workers = worker_processes(group_members(server.process_group))
        ready = [memory(worker.pid) for worker in workers]
        for worker in workers:
            # From here on, VmHWM is the peak of serving.
            reset_peak(worker.pid)
        warm_up_seconds = seconds_of_request(server, SHORT)
        seconds: dict[int, list[float]] = {SHORT: [], LONG: []}
        for pair in range(NUM_PAIRS):
            say(f"{name} at T = {tp_size}: pair {pair + 1} of {NUM_PAIRS}")
            for steps, of_steps in seconds.items():
                of_steps.append(seconds_of_request(server, steps))
        return {
            "startup_seconds": startup_seconds,
            "warm_up_seconds": warm_up_seconds,
            "request_seconds": seconds,
            **spread("step_seconds", seconds_per_step(seconds[SHORT], seconds[LONG])),
            **spread("long_request_seconds", seconds[LONG]),
            "ready_bytes_per_rank": [of_rank["VmRSS"] for of_rank in ready],
            "startup_peak_bytes_per_rank": [of_rank["VmHWM"] for of_rank in ready],
            "peak_bytes_per_rank": [memory(worker.pid)["VmHWM"] for worker in workers],
        }


def seconds_per_step(short: Sequence[float], long: Sequence[float]) -> list[float]:
    """Seconds a denoising step takes, by pair of requests that took so long."""
    pairs = zip(short, long, strict=True)
    return [(more - less) / (LONG - SHORT) for less, more in pairs]


def spread(name: str, values: list[float]) -> dict[str, Any]:
    """Values with their median, least and greatest, under names that begin alike."""
    return {
        name: values,
        f"{name}_median": median(values),
        f"{name}_min": min(values),
        f"{name}_max": max(values),
    }


def seconds_of_request(server: Server, num_steps: int) -> float:
    """Seconds that one canvas of ``num_steps`` denoising steps takes over HTTP.

    Weights that mean nothing never converge, so no canvas ends sooner.

    Raises:
        UserError: The server did not answer.
        RuntimeError: The answer is not a whole canvas.
    """
    canvas_length = live_report.canvas_length(MODEL)
    body = {
        "model": server.model,
        "prompt": PROMPT,
        "max_tokens": canvas_length,
        "ignore_eos": True,
        "vllm_xargs": {"diffusion_max_steps": num_steps},
    }
    request = urllib.request.Request(
        f"{server.base_url}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    started = time.monotonic()
    try:
        with urllib.request.urlopen(request, timeout=REQUEST_MAX_WAIT_SECONDS) as reply:
            answer = json.load(reply)
    except OSError as error:
        raise UserError(
            f"The server did not answer ({error}): see {server.log_path}."
        ) from error
    seconds = time.monotonic() - started
    if answer["usage"]["completion_tokens"] != canvas_length:
        raise RuntimeError(f"asked for {canvas_length} tokens, got {answer['usage']}")
    return seconds


def worker_processes(members: Sequence[psutil.Process]) -> list[psutil.Process]:
    """The processes that hold the model, by rank; vLLM titles them.

    At T = 1 that is the engine core itself.
    """
    titles = {process: " ".join(process.cmdline()) for process in members}
    for kind in ("Worker", "EngineCore"):
        found = [member for member in members if f"::{kind}" in titles[member]]
        if found:
            return sorted(found, key=lambda process: titles[process])
    raise RuntimeError(f"no worker among {sorted(titles.values())}")
