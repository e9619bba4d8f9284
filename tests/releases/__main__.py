# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""Check vLLM releases: `make compat VLLM=0.30.0`, `make compat-all`.

For each release this builds an environment of its own, looks in its source for all of
the API that the plugin uses, runs the live tests below with our class, and asks its
own class the same requests. The results go to `configs/releases/results.json` and into
`configs/releases/README.md`.
"""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import results as results_file
from packaging.version import Version
from release_environments import ROOT, Release, build, environment, releases

from vllm_diffgemma_tp.compat.api_check import missing_api
from vllm_diffgemma_tp.compat.inspection import Source

LIVE_TESTS = (
    "tests/test_live_release.py",
    "tests/test_live_requests.py",
    "tests/test_live_faults.py",
    "tests/test_live_invariance.py::test_trained_weights_give_one_ranks_answers[2]",
    "tests/test_live_invariance.py::test_expert_parallel_ranks_give_one_ranks_answers",
)
# Longer than a slow machine takes for one test, as a release that hangs must end.
LONGEST_SECONDS = 3600


def main() -> int:
    """Check what is asked for; 1 if anything failed."""
    parser = argparse.ArgumentParser(prog="make compat", description=__doc__)
    known = releases()
    parser.add_argument("releases", nargs="*", metavar="VLLM", help=", ".join(known))
    chosen = parser.parse_args().releases or list(known)
    for version in chosen:
        if version not in known:
            parser.error(f"vLLM {version} is not in releases.toml: {', '.join(known)}")
    checked = {}
    for number, version in enumerate(chosen, start=1):
        say(f"vLLM {version}, {number} of {len(chosen)}")
        try:
            build(known[version])
            checked[version] = check(known[version])
        except subprocess.CalledProcessError as error:
            say(f"vLLM {version}: {error}")
            return 1
        # On file at once: the next release may take long, or be interrupted.
        results_file.store(results_file.load() | checked, known)
    print(results_file.as_markdown(checked))
    return 0 if all(map(results_file.passed, checked.values())) else 1


def check(release: Release) -> dict[str, Any]:
    """All that can be checked of one release."""
    start = time.monotonic()
    packages = next((release.folder / "lib").glob("python*/site-packages"), None)
    source = Source(packages or release.folder / "source")
    result: dict[str, Any] = {
        "torch": release.torch,
        "date": datetime.date.today().isoformat(),
        # An engine that runs here is the CPU build's.
        "moved": missing_api(source, Version(release.vllm), packages is not None),
        "passed": None,
        "skipped": 0,
        "failed": [],
        "in_tree": {},
    }
    say(f"API: {'; '.join(result['moved']) or 'all there'}")
    if packages is not None:
        with tempfile.TemporaryDirectory() as folder:
            result |= run_tests(release, Path(folder) / "junit.xml")
            result |= probe(release, Path(folder) / "probes.json")
    result["seconds"] = round(time.monotonic() - start)
    return result


def run_tests(release: Release, junit: Path) -> dict[str, Any]:
    """How many of the live tests passed, and which failed."""
    selection = [*LIVE_TESTS, "--largest-tp=2"]
    command = [str(release.python), "-m", "pytest", *selection, f"--junitxml={junit}"]
    run = subprocess.run(command, cwd=ROOT, env=environment(), timeout=LONGEST_SECONDS)
    if run.returncode > 1:
        # No test failed, as none was run.
        raise subprocess.CalledProcessError(run.returncode, command)
    cases = list(ElementTree.parse(junit).iter("testcase"))

    def having(*outcomes: str) -> list[ElementTree.Element]:
        return [c for c in cases if any(c.find(o) is not None for o in outcomes)]

    failed, skipped = having("failure", "error"), having("skipped")
    return {
        "passed": len(cases) - len(failed) - len(skipped),
        "skipped": len(skipped),
        "failed": [case.get("name") for case in failed],
    }


def probe(release: Release, path: Path) -> dict[str, Any]:
    """What the release's own class does by request, and what ours says at T = 2."""
    script = str(Path(__file__).with_name("probes.py"))
    subprocess.run(
        [str(release.python), script, str(path)],
        cwd=ROOT,
        env=environment(),
        check=True,
        timeout=LONGEST_SECONDS,
    )
    found: dict[str, Any] = json.loads(path.read_text())
    for name, each in found["in_tree"].items():
        say(f"its own class, {name}: {each['outcome']} {each['line']}")
    return found


def say(line: str) -> None:
    print(f"compat: {line}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
