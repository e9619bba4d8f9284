# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""What the configurations ask of the server, asked of vLLM's own parser and checks."""

import argparse
import contextlib
import io
from pathlib import Path
from typing import Any

import pytest

from vllm_diffgemma_tp.cpu import cpu_engine
from vllm_diffgemma_tp.patches import sampling_params_verify
from vllm_diffgemma_tp.tools.evals.config import EvalConfig, load_config

cpu_engine.arrange()
from vllm.config import AttentionConfig  # noqa: E402
from vllm.engine.arg_utils import AsyncEngineArgs  # noqa: E402
from vllm.entrypoints.cli.serve import ServeSubcommand  # noqa: E402
from vllm.exceptions import VLLMValidationError  # noqa: E402
from vllm.sampling_params import SamplingParams  # noqa: E402
from vllm.utils.argparse_utils import FlexibleArgumentParser  # noqa: E402

CONFIGS = sorted((Path(__file__).parents[1] / "configs" / "gsm8k").glob("*.yaml"))


@pytest.fixture(scope="module")
def parser() -> FlexibleArgumentParser:
    commands = FlexibleArgumentParser().add_subparsers()
    return ServeSubcommand().subparser_init(commands)


def refusal(parser: FlexibleArgumentParser, config: EvalConfig) -> str | None:
    """Why vLLM would not take the flags, or the settings of a request; None if it
    would."""
    flags = io.StringIO()
    try:
        with contextlib.redirect_stderr(flags):
            args: argparse.Namespace = parser.parse_args(
                ["serve", config.model_name, *config.server_arguments][1:]
            )
        AttentionConfig(backend=AsyncEngineArgs.from_cli_args(args).attention_backend)
        params = SamplingParams(
            temperature=config.temperature,
            seed=config.seed,
            max_tokens=config.max_tokens,
        )
        sampling_params_verify.refuse(params, vocab_size=262_144, tokenizer=None)
    except SystemExit:
        return flags.getvalue()
    except (ValueError, VLLMValidationError) as error:
        return str(error)
    return None


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_the_server_takes_a_shipped_configuration(
    parser: FlexibleArgumentParser, path: Path
) -> None:
    assert refusal(parser, load_config(path)) is None


@pytest.mark.parametrize(
    "changes",
    [
        {"server_args": "--no-such-flag"},
        {"server_args": "--max-model-len many"},
        {"server_args": "--attention-backend NO_SUCH"},
        {"temperature": -1.0},
        {"seed": 2**70},
    ],
    ids=lambda changes: str(changes),
)
def test_what_the_server_would_refuse_is_noticed(
    parser: FlexibleArgumentParser, changes: dict[str, Any]
) -> None:
    config = load_config(CONFIGS[0]).model_copy(update=changes)
    assert refusal(parser, config)
