# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""The `vllm-diffgemma-tp` command.

Exit status: 0 for success, 1 for failure, 2 for wrong usage. A user error is reported
as one sentence on stderr.
"""

import argparse
import importlib
import sys
from collections.abc import Sequence

from vllm_diffgemma_tp import __version__
from vllm_diffgemma_tp.tools.shared.errors import UserError

# Each module has `add_arguments(parser)` and `run(args) -> int`, and is imported only
# when its command is run.
_COMMANDS = {
    "eval": ("vllm_diffgemma_tp.tools.evals.command", "run GSM8K through lm-eval"),
    "demo": (
        "vllm_diffgemma_tp.tools.evals.demo",
        "serve and evaluate the tiny checkpoint",
    ),
    "bench": ("vllm_diffgemma_tp.tools.bench.command", "measure one sampler step"),
    "plan": (
        "vllm_diffgemma_tp.tools.plan.command",
        "show what fits and what it costs",
    ),
    "verify": (
        "vllm_diffgemma_tp.tools.verify.command",
        "check every claim on this machine",
    ),
    "doctor": (
        "vllm_diffgemma_tp.tools.doctor.command",
        "show what is installed and what is wrong",
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    argv = list(sys.argv[1:] if argv is None else argv)
    try:
        # Before argparse, which would parse vLLM's flags.
        if argv[:1] == ["serve"]:
            from vllm_diffgemma_tp.tools.serve import command as serve

            return serve.run(argv[1:])
        return _run_command(argv)
    except UserError as error:
        return _fail(str(error))
    except ModuleNotFoundError as error:
        # Commands import optional dependencies only when they use them.
        if (error.name or "").startswith(__package__):
            raise
        return _fail(
            f"{error.name} is not installed, which this command needs: install vLLM "
            "or, for eval and demo, run `pip install '.[eval]'`; see "
            "`vllm-diffgemma-tp doctor`."
        )
    except KeyboardInterrupt:
        return 130


def _fail(sentence: str) -> int:
    print(f"vllm-diffgemma-tp: {sentence}", file=sys.stderr)
    return 1


def _run_command(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="vllm-diffgemma-tp",
        description="DiffusionGemma under tensor parallelism on vLLM.",
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    commands.add_parser("serve", help="`vllm serve MODEL [any flag]` with the plugin")
    for name, (module, summary) in _COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=summary)
        if argv[:1] == [name]:
            implementation = importlib.import_module(module)
            implementation.add_arguments(command)
            command.set_defaults(run=implementation.run)
    args = parser.parse_args(argv)
    return args.run(args)


if __name__ == "__main__":
    sys.exit(main())
