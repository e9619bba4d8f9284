# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""What goes wrong in a worker is told to the clients it concerns, and to no others."""

from __future__ import annotations

import json
import socket
import time
import urllib.error
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import psutil
import pytest
from completions import PROMPT, complete, events, post
from conftest import LiveServers
from plugin_folder import install

from vllm_diffgemma_tp.tools.shared.preflight import LOCALHOST
from vllm_diffgemma_tp.tools.shared.server import Server, group_members

# A request that asks for this temperature gets a NaN: in its logits on one rank, or in
# all that it is encoded from.
NAN_LOGITS, NAN_INPUT = 1.75, 1.5
PLANT_NANS = f"""
def register():
    import torch
    from vllm_diffgemma_tp.worker import model_state
    from vllm_diffgemma_tp.worker import sampler

    denoise = sampler.DiffusionSampler._denoise

    def denoise_with_nan(self, scores, batch, *outputs):
        states, rank = self.states, self.vocab_step.shard.rank
        for slot in batch.slots_np.tolist():
            chosen = states.options[slot].temperature == {NAN_LOGITS}
            if chosen and rank == 1 and int(states.step[slot]) == 2:
                scores.hidden_states[batch.row_slots == slot] = torch.nan
        return denoise(self, scores, batch, *outputs)

    sampler.DiffusionSampler._denoise = denoise_with_nan

    State = model_state.VocabShardedModelState
    prepare = State.prepare_inputs

    def prepare_with_nan(self, batch, req_states):
        inputs = prepare(self, batch, req_states)
        starts = batch.query_start_loc_np.tolist()
        slots = batch.idx_mapping_np[: batch.num_reqs].tolist()
        for slot, first, end in zip(slots, starts, starts[1:]):
            options = self.diffusion_states.options.get(slot)
            if options and options.temperature == {NAN_INPUT}:
                inputs["inputs_embeds"][first:end] = torch.nan
        return inputs

    State.prepare_inputs = prepare_with_nan
"""
CAUSE = "not finite on rank 1, at denoising step 2 of canvas 0"
# No canvas of it is ever confident, so it takes all steps, and many canvases.
ENDLESS: dict[str, Any] = {"max_tokens": 900, "ignore_eos": True, "temperature": 2.0}

pytestmark = [pytest.mark.live, pytest.mark.own_server]


@pytest.fixture(scope="module")
def faulty_server(
    live_servers: LiveServers, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("plugin")
    # So few blocks that a request gets those of the one before.
    flags = ["--max-model-len", "1024", "--block-size", "32"]
    flags += ["--num-gpu-blocks-override", "110"]
    with live_servers.own(2, flags, install(PLANT_NANS, folder)) as server:
        yield server


def failing_request() -> dict[str, Any]:
    return {
        "prompt": PROMPT,
        "max_tokens": 64,
        "seed": 1,
        "temperature": NAN_LOGITS,
    }


def test_a_nan_ends_its_request_with_the_rank_and_step_and_no_other(
    faulty_server: Server,
) -> None:
    neighbours: list[dict[str, Any]] = [
        {"prompt": PROMPT, "max_tokens": 64, "seed": seed} for seed in range(4)
    ]
    alone = [complete(faulty_server, **each) for each in neighbours]
    with ThreadPoolExecutor(5) as pool:
        failing = pool.submit(complete, faulty_server, **failing_request())
        others = [pool.submit(complete, faulty_server, **each) for each in neighbours]
    with pytest.raises(urllib.error.HTTPError) as failed:
        failing.result()
    assert failed.value.code == 500
    assert CAUSE in json.load(failed.value)["error"]["message"]
    assert [other.result() for other in others] == alone
    # What it had cached is not taken up again.
    assert [complete(faulty_server, **each) for each in neighbours] == alone


def test_a_nan_in_a_stream_is_an_event_that_says_so(faulty_server: Server) -> None:
    found = list(events(faulty_server, **failing_request()))
    assert CAUSE in found[-1]["error"]["message"]


def test_a_nan_of_one_of_n_answers_ends_the_request(faulty_server: Server) -> None:
    with pytest.raises(urllib.error.HTTPError) as failed:
        post(faulty_server, n=2, **failing_request())
    assert CAUSE in json.load(failed.value)["error"]["message"]


@pytest.mark.full
def test_a_nan_of_the_backbone_reaches_no_later_request(faulty_server: Server) -> None:
    # With up to three examples, so that they end anywhere in a block, and all within
    # the sliding window: a block that has left it is given back before the NaN is seen.
    prompts = [f"{PROMPT} 19\n\n" * k + PROMPT for k in range(4)]

    def answer(k: int) -> list[int]:
        ids: list[int] = complete(
            faulty_server,
            prompts[k],
            max_tokens=40,
            seed=k,
            ignore_eos=True,
            return_token_ids=True,
        )["token_ids"]
        return ids

    alone = [answer(k) for k in range(4)]
    for turn in range(4):
        with ThreadPoolExecutor(8) as pool:
            failing = [
                pool.submit(
                    complete,
                    faulty_server,
                    # No prefix of a neighbour's, which would have its blocks too.
                    f"{turn} {prompt}",
                    temperature=NAN_INPUT,
                )
                for prompt in prompts
            ]
            beside = list(pool.map(answer, range(4)))
        for request in failing:
            assert isinstance(request.exception(), urllib.error.HTTPError)
        assert beside == alone
        assert [answer(k) for k in range(4)] == alone


def in_flight(server: Server, pool: ThreadPoolExecutor) -> list[Future[Any]]:
    """Three requests that are being denoised and far from their end."""
    requests = [pool.submit(complete, server, PROMPT, **ENDLESS) for _ in range(3)]
    time.sleep(3)
    assert not any(request.done() for request in requests)
    return requests


def assert_nothing_is_left(server: Server) -> None:
    assert group_members(server.process_group) == []
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((LOCALHOST, server.port))


def test_a_killed_worker_ends_the_server_with_an_error(faulty_server: Server) -> None:
    """The last test of its server."""
    (worker,) = (
        process
        for process in group_members(faulty_server.process_group)
        if process.name() == "VLLM::Worker_TP1"
    )
    with ThreadPoolExecutor(3) as pool:
        requests = in_flight(faulty_server, pool)
        worker.kill()
        killed = time.monotonic()
        for request in requests:
            # An answer of the dying server, or a closed connection.
            assert isinstance(request.exception(timeout=30), OSError)
        assert time.monotonic() - killed < 30
    assert faulty_server.wait(60) not in (0, None)
    psutil.wait_procs(group_members(faulty_server.process_group), timeout=30)
    assert_nothing_is_left(faulty_server)


@pytest.mark.full
def test_a_server_told_to_stop_in_mid_request_stops(live_servers: LiveServers) -> None:
    with live_servers.own(1, ["--max-model-len", "1024"]) as server:
        with ThreadPoolExecutor(3) as pool:
            requests = in_flight(server, pool)
            psutil.Process(server.process_group).terminate()
            for request in requests:
                # Ended early: what there was of the answer, or an error.
                request.exception(timeout=60)
        assert server.wait(60) is not None
        psutil.wait_procs(group_members(server.process_group), timeout=30)
        assert_nothing_is_left(server)
