# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""``vllm-diffgemma-tp bench --live``: the real engine at the real shape.

Starts one server with this project's class, then one with vLLM's own, both on
``configs/real-shape``: the released model's dimensions, two of thirty layers, dummy
weights. Times requests of one canvas over HTTP.
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
# Denoising steps of a pair of requests. Both have one prefill and one commit, so their
# difference is denoising steps only. Not 1, where vLLM's own class skips a matmul.
SHORT, LONG = 2, 4
NUM_PAIRS = 3
# Arbitrary token ids, as the weights are random.
PROMPT = list(range(10, 26))
REQUEST_MAX_WAIT_SECONDS = 600

# Peak bytes measured at T = 2 with vLLM's own class: the part sharded over the ranks,
# and the part that each rank has in addition.
_SHARED_BYTES, _BYTES_PER_RANK = 11 * 10**9, 3.3 * 10**9


class InTreeServer(Server):
    """A server that runs vLLM's own class.

    ``vllm-diffgemma-tp serve`` refuses to do that, so this runs ``vllm serve``, which
    inherits the CPU engine's setup through the environment.

    Args:
        plugins: Value of VLLM_PLUGINS, which must not include this plugin.
    """

    def __init__(self, *args: Any, plugins: str = "none", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._env["VLLM_PLUGINS"] = plugins
        serve = self.command.index("serve")
        entry = [sys.executable, "-m", "vllm.entrypoints.cli.main"]
        self.command = [*entry, *self.command[serve:]]


def run(args: argparse.Namespace) -> int:
    """Measure both classes at each T of ``args.tp`` (default 2), print the tables.

    Returns 0.

    Raises:
        UserError: There is no CPU build, no ``configs/real-shape`` or too little
            memory, or a server failed or ran the wrong class.
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
    """Check what can be checked before minutes of work.

    Raises:
        UserError: A check failed.
    """
    if not cpu_engine.is_cpu_build():
        raise UserError(
            "bench --live measures the memory of processes, which hold the model on "
            "vLLM's CPU build only: run it on that build."
        )
    if not MODEL.is_dir():
        raise UserError(f"There is no {MODEL} here: run this in the project's root.")
    preflight.check_plugin()
    preflight.check_model(str(MODEL), tp_size)
    needed = _SHARED_BYTES + tp_size * _BYTES_PER_RANK
    available = psutil.virtual_memory().available
    if needed > available:
        raise UserError(
            f"The server with vLLM's own class needs about {needed / 1e9:.0f} GB of "
            f"memory at --tp {tp_size}, and {available / 1e9:.0f} GB are available: "
            "stop other programs, or use a smaller --tp."
        )


def measure(name: str, tp_size: int, folder: Path) -> dict[str, Any]:
    """Start a server with one class, time its requests, and measure its memory.

    Args:
        name: One of ``live_report.CLASSES``.
        tp_size: T.
        folder: Folder for the log and for a fresh vLLM cache.

    Raises:
        UserError: The server failed, or runs the wrong class.
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
                "The plugin is live although VLLM_PLUGINS excludes it, so there is "
                f"nothing to compare with: see {server.log_path}."
            )
        workers = worker_processes(group_members(server.process_group))
        ready = [memory(worker.pid) for worker in workers]
        for worker in workers:
            # From here on, VmHWM is the peak while serving.
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
    """Seconds per denoising step, from each pair of request times."""
    pairs = zip(short, long, strict=True)
    return [(more - less) / (LONG - SHORT) for less, more in pairs]


def spread(name: str, values: list[float]) -> dict[str, Any]:
    """``values`` with their median, minimum and maximum, under keys from ``name``."""
    return {
        name: values,
        f"{name}_median": median(values),
        f"{name}_min": min(values),
        f"{name}_max": max(values),
    }


def seconds_of_request(server: Server, num_steps: int) -> float:
    """Time one request of one canvas and ``num_steps`` denoising steps over HTTP.

    With random weights a canvas never converges, so none ends early.

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
    """The processes that hold the model, by rank, found by vLLM's process titles.

    At T = 1 that is the engine core itself.
    """
    titles = {process: " ".join(process.cmdline()) for process in members}
    for kind in ("Worker", "EngineCore"):
        found = [member for member in members if f"::{kind}" in titles[member]]
        if found:
            return sorted(found, key=lambda process: titles[process])
    raise RuntimeError(f"no worker among {sorted(titles.values())}")
