# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""The report as one self-contained HTML page."""

import shlex
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from vllm_diffgemma_tp.tools.evals import gate, plots, report
from vllm_diffgemma_tp.tools.evals.config import EvalConfig
from vllm_diffgemma_tp.tools.evals.paired import pairs_of
from vllm_diffgemma_tp.tools.evals.results import TpRun

#: Maximum number of changed questions shown; results.json lists all of them.
MOST_SHOWN = 50


def as_html(config: EvalConfig, runs: list[TpRun], results: dict[str, Any]) -> str:
    """Render the page; ``results`` is ``report.as_json(config, runs)``."""
    environment = Environment(
        loader=PackageLoader("vllm_diffgemma_tp.tools.evals"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    pairs = pairs_of(runs)
    return environment.get_template("report.html.j2").render(
        title=report.title(config),
        results=results,
        checks=gate.checks(config, runs),
        rows=report.rows(runs),
        accuracy_plot=plots.accuracy(config, runs),
        steps_plot=plots.steps(runs),
        pairs=[(pair, report.comparison(pair)) for pair in pairs],
        most_shown=MOST_SHOWN,
        threshold_source=config.threshold_source or "source not stated",
        versions={**results["versions"], "model": results["model_version"]},
        commands=[shlex.join(run.server_command) for run in runs],
    )
