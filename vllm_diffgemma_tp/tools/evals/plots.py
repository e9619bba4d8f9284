# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""The plots of a report, as inline SVG."""

import io
from collections.abc import Callable

import matplotlib

matplotlib.use("svg")

import numpy as np  # noqa: E402
from matplotlib import pyplot as plt  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402
from matplotlib.ticker import ScalarFormatter  # noqa: E402

from vllm_diffgemma_tp.tools.evals.config import EvalConfig  # noqa: E402
from vllm_diffgemma_tp.tools.evals.results import TpRun  # noqa: E402
from vllm_diffgemma_tp.tools.evals.statistics import wilson_interval  # noqa: E402


def accuracy(config: EvalConfig, runs: list[TpRun]) -> str:
    """Share of right answers with Wilson's 95 % interval, by T."""

    def draw(axes: Axes) -> None:
        shares = np.array([run.accuracy() for run in runs])
        bounds = np.array(
            [wilson_interval(run.num_correct(), len(run.answers)) for run in runs]
        )
        positions = np.arange(len(runs))
        axes.errorbar(
            positions,
            shares,
            yerr=np.stack([shares - bounds[:, 0], bounds[:, 1] - shares]),
            fmt="o",
            capsize=6,
            color="tab:blue",
        )
        needed = config.accuracy_threshold - config.tolerance
        axes.axhline(needed, color="tab:red", linestyle="--", label="needed")
        axes.set_xticks(positions, [run.name for run in runs])
        axes.set_xlim(-0.5, len(runs) - 0.5)
        axes.set_ylim(min(needed, bounds.min()) - 0.05, 1.01)
        axes.set_ylabel("right answers")
        axes.legend(loc="lower right")

    return _svg(draw)


def steps(runs: list[TpRun]) -> str:
    """Histogram of denoising steps per canvas, by T."""

    def draw(axes: Axes) -> None:
        found = [run.canvas_steps() for run in runs]
        most = max((taken.max() for taken in found if len(taken)), default=1)
        axes.hist(
            # Given a list of one array, matplotlib would treat its values as data sets.
            found if len(found) > 1 else found[0],
            bins=np.linspace(0.5, most + 0.5, min(most, 48) + 1).tolist(),
            label=[run.name for run in runs],
        )
        axes.set_xlabel("denoising steps per canvas")
        axes.set_ylabel("canvases")
        axes.set_yscale("symlog", linthresh=10)
        top = axes.get_ylim()[1]
        axes.set_yticks([tick for tick in (0, 5, 10, 100, 1000, 10_000) if tick < top])
        axes.yaxis.set_major_formatter(ScalarFormatter())
        axes.legend()

    return _svg(draw)


def _svg(draw: Callable[[Axes], None]) -> str:
    figure, axes = plt.subplots(figsize=(5, 3.2), layout="constrained")
    draw(axes)
    axes.spines[["top", "right"]].set_visible(False)
    file = io.StringIO()
    figure.savefig(file, format="svg", metadata={"Date": None})
    plt.close(figure)
    text = file.getvalue()
    # Drop the XML declaration, which is invalid inside an HTML page.
    return text[text.index("<svg") :]
