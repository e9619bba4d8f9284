# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""A request whose logits were not finite ends with an error; its neighbours go on.

The sampler reports a fault in the integer vLLM keeps for NaNs, by request, and vLLM's
scheduler only counts it. Here the scheduler ends the request and has its KV blocks
cleared, and the API process hands its client the sentence that names rank
and step: a 500 over HTTP, an error event of a stream, and ``finish_reason`` "error"
with the sentence as ``stop_reason`` from ``LLM.generate``.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from vllm_diffgemma_tp import kv_clearing
from vllm_diffgemma_tp.compat.requests import generation_error
from vllm_diffgemma_tp.faults import Fault


def install() -> None:
    """Make vLLM's scheduler and output processor heed faults; re-entrant."""
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.async_llm import InputStreamError
    from vllm.v1.engine.output_processor import RequestState

    update = Scheduler.update_from_output
    if getattr(update, "heeds_faults", False):
        return

    @functools.wraps(update)
    def update_and_end_broken(
        self: Scheduler, scheduler_output: Any, model_runner_output: Any
    ) -> Any:
        outputs = update(self, scheduler_output, model_runner_output)
        codes = model_runner_output.num_nans_in_logits or {}
        faults = {req: Fault.decode(code) for req, code in codes.items() if code > 0}
        if faults and self.vllm_config.model_config.is_diffusion:
            _end(self, faults, outputs)
        return outputs

    update_and_end_broken.heeds_faults = True  # type: ignore[attr-defined]
    Scheduler.update_from_output = update_and_end_broken  # type: ignore[method-assign]

    kv_clearing.install_in_scheduler()
    make_output = RequestState.make_request_output

    @functools.wraps(make_output)
    def make_output_or_error(
        self: RequestState,
        new_token_ids: Any,
        pooling_output: Any,
        finish_reason: Any,
        stop_reason: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        failed = finish_reason is not None and str(finish_reason) == "error"
        if failed and isinstance(stop_reason, str) and self.queue is not None:
            # The wrapper in which the engine client passes on an error as it is.
            self.queue.put(InputStreamError(generation_error(stop_reason)))
            return None
        return make_output(
            self,
            new_token_ids,
            pooling_output,
            finish_reason,
            stop_reason,
            *args,
            **kwargs,
        )

    RequestState.make_request_output = make_output_or_error  # type: ignore


def _end(scheduler: Any, faults: Mapping[str, Fault], outputs: Any) -> None:
    """Finish the requests with an error, and add it to the step's outputs."""
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
    from vllm.v1.request import RequestStatus

    broken = [scheduler.requests[req] for req in faults if req in scheduler.requests]
    kv_clearing.set_aside(scheduler, [request.request_id for request in broken])
    scheduler.finish_requests(list(faults), RequestStatus.FINISHED_ERROR)
    for request in broken:
        step = outputs.setdefault(request.client_index, EngineCoreOutputs())
        step.outputs.append(
            EngineCoreOutput(
                request_id=request.request_id,
                new_token_ids=[],
                finish_reason=request.get_finished_reason(),
                stop_reason=str(faults[request.request_id]),
                events=request.take_events(),
                trace_headers=request.trace_headers,
            )
        )
