# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""`vllm-diffgemma-tp serve`: checks first, then runs `vllm serve`."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm_diffgemma_tp.cpu import cpu_engine
from vllm_diffgemma_tp.patches import async_llm_shutdown
from vllm_diffgemma_tp.tools.shared import preflight
from vllm_diffgemma_tp.tools.shared.errors import UserError


def run(flags: Sequence[str]) -> int:
    """Serve until stopped. `flags` go to `vllm serve` unchanged.

    Returns:
        0 once the server was stopped. For wrong flags vLLM's parser exits with
        status 2.

    Raises:
        UserError: A check failed, or the server did.
    """
    preflight.check_plugin()
    args = read_flags(flags)
    if not args.help:
        preflight.check_shape(args.pipeline_parallel_size, args.enable_lora)
        if args.model is not None:
            preflight.check_model(args.model, args.tensor_parallel_size)
        if args.uds is None and not args.headless:
            preflight.check_port(args.host, args.port)
    # By default Ray prints the live line of one worker and only counts the others.
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")
    sized = args.kv_cache_memory_bytes or args.gpu_memory_utilization
    replicas = args.data_parallel_size_local or args.data_parallel_size
    cpu_engine.arrange(args.tensor_parallel_size * replicas, size_kv_cache=not sized)
    # The last check, because it imports vLLM, which takes seconds.
    preflight.check_vllm()

    from vllm.entrypoints.cli.main import main
    from vllm.logger import init_logger

    sys.argv = ["vllm", "serve", *flags]
    engine_died = async_llm_shutdown.apply()
    try:
        main()
    except Exception as error:
        init_logger("vllm.plugins.vllm_diffgemma_tp").debug("", exc_info=True)
        reason = " ".join(str(error).split())
        raise UserError(
            f"The server failed ({reason}): see the log above for the cause, or set "
            "VLLM_LOGGING_LEVEL=DEBUG for the traceback."
        ) from error
    if engine_died():
        raise UserError(
            "The engine core died while serving: see the log above for the cause, and "
            "restart the server."
        )
    return 0


def read_flags(flags: Sequence[str]) -> argparse.Namespace:
    """Read the few `vllm serve` flags that are checked or needed before vLLM starts.

    Importing vLLM's own parser takes many seconds, and mistakes should be reported at
    once. As in vLLM, a value comes from the command line, else from the YAML file given
    with `--config`, else from the default; `_` and `-` are equivalent.
    """
    parser = argparse.ArgumentParser(prog="vllm-diffgemma-tp serve", add_help=False)
    parser.add_argument("-h", "--help", nargs="?", const=True, default=False)
    parser.add_argument("--config")
    parser.add_argument("--model")
    parser.add_argument("--tensor-parallel-size", "-tp", type=int, default=1)
    parser.add_argument("--pipeline-parallel-size", "-pp", type=int, default=1)
    parser.add_argument("--data-parallel-size", "-dp", type=int, default=1)
    parser.add_argument("--data-parallel-size-local", "-dpl", type=int)
    parser.add_argument("--host")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--uds")
    parser.add_argument("--headless", action="store_true")
    parser.add_argument(
        "--enable-lora", action=argparse.BooleanOptionalAction, default=False
    )
    parser.add_argument("--kv-cache-memory-bytes")
    parser.add_argument("--gpu-memory-utilization")

    dashed = [_dashed(flag) for flag in flags]
    config = parser.parse_known_args(dashed)[0].config
    if config is not None:
        parser.set_defaults(**_read_config(config))
    if dashed and not dashed[0].startswith("-"):
        parser.set_defaults(model=dashed[0])
    args = parser.parse_known_args(dashed)[0]
    if args.tensor_parallel_size < 1:
        parser.error("--tensor-parallel-size must be at least 1")
    return args


def _dashed(flag: str) -> str:
    if not flag.startswith("--"):
        return flag
    name, equals, value = flag.partition("=")
    return name.replace("_", "-") + equals + value


def _read_config(path: str) -> dict[str, Any]:
    import yaml

    try:
        config = yaml.safe_load(Path(path).read_text())
    except (OSError, yaml.YAMLError) as error:
        raise UserError(
            f"--config {path} cannot be read as YAML ({error}): give the path of a "
            "file with `flag: value` lines."
        ) from error
    return {name.replace("-", "_"): value for name, value in (config or {}).items()}
