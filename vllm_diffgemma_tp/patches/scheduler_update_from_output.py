# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""Ends a request whose logits were not finite with an error; other requests continue.

The sampler encodes where it saw them in vLLM's NaN count of the request, which vLLM's
scheduler only records. Here the scheduler ends the request and clears its KV blocks;
``request_state_make_request_output`` tells the client. Can go when vLLM's scheduler
ends a request whose logits are not finite.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from vllm_diffgemma_tp.patches.scheduler_schedule import clear_before_reuse
from vllm_diffgemma_tp.patches.wrapping import wrap
from vllm_diffgemma_tp.sampler.non_finite import NonFiniteLogits

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler

SYMBOLS = ("vllm.v1.core.sched.scheduler.Scheduler.update_from_output",)


def apply() -> None:
    from vllm.v1.core.sched.scheduler import Scheduler

    wrap(Scheduler, "update_from_output", _and_end_failed)


def _and_end_failed(update: Callable[..., Any]) -> Callable[..., Any]:
    def update_and_end_failed(
        self: Scheduler, scheduler_output: Any, model_runner_output: Any
    ) -> Any:
        outputs = update(self, scheduler_output, model_runner_output)
        codes = model_runner_output.num_nans_in_logits or {}
        reports = {
            req: NonFiniteLogits.decode(code) for req, code in codes.items() if code > 0
        }
        if reports and self.vllm_config.model_config.is_diffusion:
            _end(self, reports, outputs)
        return outputs

    return update_and_end_failed


def _end(scheduler: Any, reports: Mapping[str, NonFiniteLogits], outputs: Any) -> None:
    """Finish the requests with an error, and add it to the step's outputs."""
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
    from vllm.v1.request import RequestStatus

    failed = [scheduler.requests[req] for req in reports if req in scheduler.requests]
    clear_before_reuse(scheduler, [request.request_id for request in failed])
    scheduler.finish_requests(list(reports), RequestStatus.FINISHED_ERROR)
    for request in failed:
        step = outputs.setdefault(request.client_index, EngineCoreOutputs())
        step.outputs.append(
            EngineCoreOutput(
                request_id=request.request_id,
                new_token_ids=[],
                finish_reason=request.get_finished_reason(),
                stop_reason=str(reports[request.request_id]),
                events=request.take_events(),
                trace_headers=request.trace_headers,
            )
        )
