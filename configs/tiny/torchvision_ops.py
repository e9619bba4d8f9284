# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""Import this before transformers: its vision classes import torchvision.

A CPU build of torch and the installed torchvision may not match. The project's import
hooks make such a torchvision importable, and do nothing otherwise.
"""

from vllm_diffgemma_tp.cpu.cpu_engine import install_hooks

install_hooks()
