# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""``vllm-diffgemma-tp doctor``: find out what is wrong and say how to fix it."""

from __future__ import annotations

import argparse
import importlib.util
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial

from vllm_diffgemma_tp.cpu import cpu_engine
from vllm_diffgemma_tp.tools.doctor import deployment_checks as deployment
from vllm_diffgemma_tp.tools.doctor import environment_checks as checks
from vllm_diffgemma_tp.tools.shared.arguments import positive_int
from vllm_diffgemma_tp.tools.shared.environment import quiet_vllm
from vllm_diffgemma_tp.tools.shared.errors import UserError

Check = tuple[str, Callable[[], str]]


@dataclass(frozen=True)
class Finding:
    """Result of one check: what was found or, if not ``ok``, how to fix it."""

    check: str
    ok: bool
    detail: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", help="checkpoint folder, or the name of a model on the hub"
    )
    parser.add_argument(
        "--tp", type=positive_int, default=1, help="tensor-parallel size (default: 1)"
    )
    parser.add_argument("--enable-expert-parallel", action="store_true")
    parser.add_argument("--pipeline-parallel-size", type=positive_int, default=1)
    parser.add_argument("--attention-backend", help="the one you will pass to vLLM")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Print every finding; return 0 if all checks pass, else 1."""
    # stdout is for the findings only.
    with quiet_vllm():
        findings = examine(args)
    ok = all(finding.ok for finding in findings)
    if args.json:
        print(json.dumps({"ok": ok, "checks": [asdict(f) for f in findings]}, indent=2))
    else:
        for finding in findings:
            mark = "ok  " if finding.ok else "FAIL"
            print(f"{mark}  {finding.check:<12}  {finding.detail}")
        wrong = sum(not finding.ok for finding in findings)
        print(f"doctor: {'nothing in the way' if ok else f'{wrong} to fix'}")
    return 0 if ok else 1


def examine(args: argparse.Namespace) -> list[Finding]:
    """Run the checks in order; skip those that need vLLM if it cannot be imported."""
    arrange: Check = ("CPU engine", _arrange)
    vllm: Check = ("vllm", checks.vllm)
    findings = _findings(
        [
            ("python", checks.python),
            ("versions", checks.versions),
            ("plugin", checks.plugin),
            ("environment", checks.environment),
            ("attention", partial(deployment.attention, args.attention_backend)),
            ("pipeline", partial(deployment.pipeline, args.pipeline_parallel_size)),
            arrange,
            vllm,
        ]
    )
    if not findings[-1].ok:
        return findings
    more: list[Check] = [
        ("torch", checks.torch_pair),
        ("registered", checks.registered),
        ("runner", checks.runner),
        ("processor", checks.processor),
        ("devices", partial(deployment.devices, args.tp)),
    ]
    if args.model:
        asked = (args.model, args.tp, args.enable_expert_parallel)
        more.append(("model", partial(deployment.model, *asked)))
        more.append(("memory", partial(deployment.memory, *asked)))
    return findings + _findings(more)


def _findings(asked: list[Check]) -> list[Finding]:
    return [_examine(check, examination) for check, examination in asked]


def _examine(check: str, examination: Callable[[], str]) -> Finding:
    """Run one check, which returns what it found or raises UserError with the fix."""
    try:
        return Finding(check, True, examination())
    except UserError as error:
        return Finding(check, False, str(error))
    except Exception as error:
        # A damaged installation can raise anything.
        return Finding(
            check,
            False,
            f"The check itself failed ({type(error).__name__}: {error}): fix the "
            "failures above first, then reinstall the package that it names.",
        )


def _arrange() -> str:
    """Set up vLLM's CPU build as `serve` does, so that later checks see the same."""
    cpu_engine.arrange()
    if importlib.util.find_spec("vllm") is None:
        return "not needed: vLLM is not installed"
    if not cpu_engine.is_cpu_build():
        return "not needed: this vLLM is not a CPU build"
    return "set up as `vllm-diffgemma-tp serve` does"
