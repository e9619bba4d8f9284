# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""`plan`: what it reads, what it predicts, what it says when it cannot."""

from __future__ import annotations

import json
import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from huggingface_hub import close_session, set_client_factory

from vllm_diffgemma_tp.cpu import cpu_engine
from vllm_diffgemma_tp.tools import cli
from vllm_diffgemma_tp.tools.plan.times import HARDWARE, vocab_time
from vllm_diffgemma_tp.tools.shared.checkpoint import PRESETS, Checkpoint, preset
from vllm_diffgemma_tp.tools.shared.checkpoint_reader import read
from vllm_diffgemma_tp.tools.shared.errors import UserError
from vllm_diffgemma_tp.tools.shared.kv_cache import kv_cache_of
from vllm_diffgemma_tp.tools.shared.memory import (
    Serving,
    default_batched_tokens,
    fit,
    rank_memory,
    workspace_bytes,
)
from vllm_diffgemma_tp.tools.shared.tensors import Tensor, tensors_of
from vllm_diffgemma_tp.tools.shared.weights import CLASSES, Sharding, rank_weight_bytes

ROOT = Path(__file__).parents[1]
TINY = ROOT / "configs" / "tiny" / "checkpoint"
REAL_SHAPE = ROOT / "configs" / "real-shape"


def total(checkpoint: Checkpoint, sharding: Sharding) -> int:
    found = rank_weight_bytes(checkpoint.architecture, checkpoint.tensors, sharding)
    return sum(found.values())


# What the tensors are ---------------------------------------------------------------


def test_the_list_of_tensors_is_the_shipped_checkpoints_header() -> None:
    tiny = read(str(TINY))
    assert tensors_of(tiny.architecture) == tiny.tensors


@pytest.mark.slow
def test_the_presets_tensors_are_those_of_transformers_model() -> None:
    cpu_engine.arrange()
    import torch
    from transformers import DiffusionGemmaConfig, DiffusionGemmaForBlockDiffusion

    from vllm_diffgemma_tp.tools.shared.checkpoint import _RELEASED_CONFIG

    config = json.loads(json.dumps(_RELEASED_CONFIG))
    config["vision_config"]["model_type"] = "gemma4_vision"
    with torch.device("meta"):
        model = DiffusionGemmaForBlockDiffusion(DiffusionGemmaConfig(**config))
    theirs = {tensor.data_ptr: tensor for tensor in model.parameters()}
    counted = sum(tensor.numel() for tensor in theirs.values())
    buffers = {"std_bias", "std_scale", "layer_scalar"}
    ours = sum(
        tensor.num_elements
        for name, tensor in preset("bf16").tensors.items()
        if name.rsplit(".", 1)[-1] not in buffers
    )
    assert ours == counted


def test_the_released_models_parameters_are_the_published_ones() -> None:
    released = preset("bf16")
    vision = sum(t.num_elements for n, t in released.tensors.items() if "vision" in n)
    own = sum(
        t.num_elements for n, t in released.tensors.items() if "self_conditioning" in n
    )
    # 25.2 B is the Gemma 4 backbone's: no vision tower, no self-conditioning.
    assert round((released.num_parameters - vision - own) / 1e9, 1) == 25.2
    assert round((released.num_parameters - vision) / 1e9, 2) == 25.25
    assert 0.5e9 < vision < 0.6e9


def test_every_preset_counts_the_same_parameters_in_fewer_bytes() -> None:
    sizes = {}
    for name in PRESETS:
        checkpoint = preset(name)
        assert checkpoint.num_parameters == preset("bf16").num_parameters
        sizes[name] = total(checkpoint, Sharding(1))
    assert sizes["bf16"] > sizes["fp8"] == sizes["int8"] > sizes["nvfp4"]
    # Half a byte and a sixteenth, against two bytes.
    layers = {
        name: rank_weight_bytes(
            preset(name).architecture, preset(name).tensors, Sharding(1)
        )["experts"]
        for name in ("bf16", "nvfp4")
    }
    assert layers["nvfp4"] / layers["bf16"] == pytest.approx(0.5625 / 2, rel=1e-3)


# How they are laid over ranks -------------------------------------------------------


def test_ranks_hold_the_whole_checkpoint_between_them() -> None:
    released = preset("bf16")
    whole = {"router", "self-conditioning", "vision", "norms"}
    alone = rank_weight_bytes(released.architecture, released.tensors, Sharding(1))
    for tp_size in (2, 4, 8):
        for expert_parallel in (False, True):
            sharding = Sharding(tp_size, expert_parallel)
            a_rank = rank_weight_bytes(
                released.architecture, released.tensors, sharding
            )
            for kind in CLASSES:
                if kind in whole:
                    assert a_rank[kind] == alone[kind]
                elif kind != "attention":
                    assert tp_size * a_rank[kind] == alone[kind]
    # Two key-value heads of full layers are copied from T = 4 on.
    attention = {
        t: rank_weight_bytes(released.architecture, released.tensors, Sharding(t))[
            "attention"
        ]
        for t in (1, 2, 4)
    }
    assert 2 * attention[2] == attention[1]
    copied = 5 * 2 * (512 * 2816) * 2  # five layers, K and V, one more head, bf16
    assert 4 * attention[4] == attention[1] + 2 * copied


def test_experts_of_their_own_tensors_count_as_one_stacked_tensor_does() -> None:
    tiny = read(str(TINY))
    apart: dict[str, Tensor] = {}
    for name, tensor in tiny.tensors.items():
        if ".experts." not in name:
            apart[name] = tensor
            continue
        layer, _, kind = name.rpartition(".")
        experts, rows, columns = tensor.shape
        for index in range(experts):
            if kind == "down_proj":
                apart[f"{layer}.{index}.down_proj.weight"] = Tensor(
                    (rows, columns), tensor.dtype
                )
                continue
            for part in ("gate_proj", "up_proj"):
                apart[f"{layer}.{index}.{part}.weight"] = Tensor(
                    (rows // 2, columns), tensor.dtype
                )
    for sharding in (Sharding(1), Sharding(2), Sharding(4, expert_parallel=True)):
        assert rank_weight_bytes(
            tiny.architecture, apart, sharding
        ) == rank_weight_bytes(tiny.architecture, tiny.tensors, sharding)


def test_kv_cache_blocks_of_the_released_model() -> None:
    released = preset("bf16").architecture
    alone, shared = kv_cache_of(released, 1, 2), kv_cache_of(released, 4, 2)
    # Sliding: 8 heads of 256, 8 KiB a token; full: 2 of 512, 4 KiB, so longer blocks.
    assert sorted((g.full, g.block_tokens) for g in alone.groups) == [
        *[(False, 16)] * 5,
        (True, 32),
    ]
    assert alone.block_bytes == 5 * 16 * 8192
    # At T = 4 the two full heads are copied: 2 KiB a token in either kind.
    assert {g.block_tokens for g in shared.groups} == {16}
    assert alone.request_blocks(131072, 4096) == 131072 // 32 + 5 * (5119 // 16 + 2)


def test_less_concurrency_fits_longer_requests_and_more_ranks_fit_more() -> None:
    int8, usable = preset("int8"), int(0.92 * 16 * 2**30)
    found = {
        t: fit(int8, Sharding(t), Serving(4, 131072), usable) for t in (1, 2, 4, 8)
    }
    # The founding machine: four cards of 16 GiB served this; two do not.
    assert [found[t].fits for t in (1, 2, 4, 8)] == [False, False, True, True]
    assert 0 < found[2].max_model_len < 131072
    one = fit(int8, Sharding(2), Serving(4, found[2].max_model_len), usable)
    assert one.fits
    more = fit(int8, Sharding(2), Serving(4, found[2].max_model_len + 64), usable)
    assert not more.fits
    most = found[4].max_num_seqs
    enough = fit(int8, Sharding(4), Serving(most, 131072), usable)
    assert enough.full_requests >= most
    beyond = fit(int8, Sharding(4), Serving(most + 1, 131072), usable)
    assert beyond.full_requests < most + 1


def test_the_workspace_is_the_samplers_own() -> None:
    import torch

    from vllm_diffgemma_tp.sampler.workspace import TilePlan, Workspace
    from vllm_diffgemma_tp.vocab_shard import VocabShard

    tiny = read(str(TINY))
    shard = VocabShard(0, 128, 128, 245, 0, 2)
    plan = TilePlan.of(shard, max_rows=256, hidden_size=64, device_type="cpu")
    real = Workspace(plan, torch.float32, torch.device("cpu"))
    serving = Serving(8, 512, 4096, device_type="cpu")
    assert workspace_bytes(tiny, 2, serving) == real.num_bytes


# Estimates --------------------------------------------------------------------------


def test_sharding_is_estimated_to_save_time_and_the_gather_to_cost_it() -> None:
    released = preset("bf16")
    for card in HARDWARE.values():
        times = {
            design: vocab_time(released, 4, 256, card, design)
            for design in ("in tree", "replicated table", "ours")
        }
        assert times["ours"].total < times["in tree"].total
        assert times["replicated table"].wire == 0
    a4000 = vocab_time(released, 4, 256, HARDWARE["a4000"], "in tree")
    assert 3e-3 < a4000.wire < 4e-3  # 102.8 MB at 32 GB/s
    for design in ("in tree", "ours"):
        assert vocab_time(released, 1, 256, HARDWARE["h100"], design).wire == 0


# The command ------------------------------------------------------------------------


def plan(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, Any]:
    status = cli.main(["plan", "--json", *arguments])
    return status, json.loads(capsys.readouterr().out)


def test_the_command_answers_for_a_preset(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ("--preset", "int8", "--hardware", "a4000", "--max-model-len", "131072")
    status, found = plan(capsys, *argv, "--tp", "2,4")
    assert status == 0
    two, four = found["ranks"]
    assert (two["fit"]["fits"], four["fit"]["fits"]) == (False, True)
    assert four["flops"]["soft_embedding"] == 94_489_280_512
    assert four["wire"]["soft_embedding_ring"] == 2_162_688
    assert found["table_bytes"] == 1_476_395_008
    assert found["crossover_canvas_steps"] == 512


def test_the_status_says_whether_anything_fits(
    capsys: pytest.CaptureFixture[str],
) -> None:
    status, _ = plan(capsys, "--gpu-memory", "8", "--tp", "1")
    assert status == 1


def test_the_text_has_a_column_a_t_and_says_why_a_t_is_impossible(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["plan", "--tp", "3,4", "--gpu-memory", "24"]) == 0
    text = capsys.readouterr().out
    assert "T = 3 is not possible: 3 does not divide the 16 attention heads." in text
    assert "Cheapest that fits: T = 4" in text
    assert "ESTIMATE" not in text
    assert cli.main(["plan", "--hardware", "h100"]) == 0
    assert "ESTIMATE" in capsys.readouterr().out


def test_nvfp4_experts_that_cannot_be_sharded_are_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    argv = ["plan", "--preset", "nvfp4", "--tp", "2"]
    assert cli.main(argv) == 0
    assert "width 704 / 2 are reported to fail" in capsys.readouterr().out
    assert cli.main([*argv, "--enable-expert-parallel"]) == 0
    assert "reported to fail" not in capsys.readouterr().out


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_the_plot_is_drawn(
    ending: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / f"plan.{ending}"
    argv = ["plan", "--tp", "1,4", "--gpu-memory", "16", "--preset", "fp8"]
    assert cli.main([*argv, "--plot", str(file)]) == 0
    assert file.stat().st_size > 10_000
    if ending == "svg":
        assert "K N = 512" in file.read_text()


def test_a_folder_without_weights_is_planned_from_its_config(
    capsys: pytest.CaptureFixture[str],
) -> None:
    status, found = plan(capsys, "--model", str(REAL_SHAPE), "--tp", "2")
    assert status == 0
    assert found["table_bytes"] == 1_476_395_008


# Mistakes ---------------------------------------------------------------------------


def copy_of_tiny(folder: Path) -> Path:
    return Path(shutil.copytree(TINY, folder / "checkpoint"))


def without_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def broken_config(folder: Path) -> None:
    (folder / "config.json").write_text('{"architectures": [')


def other_model(folder: Path) -> None:
    (folder / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')


def config_without_layers(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    del config["text_config"]["num_hidden_layers"]
    (folder / "config.json").write_text(json.dumps(config))


def truncated_weights(folder: Path) -> None:
    file = folder / "model.safetensors"
    os.truncate(file, file.stat().st_size - 1)


def truncated_header(folder: Path) -> None:
    os.truncate(folder / "model.safetensors", 100)


def garbage(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"not a safetensors file at all")


def of_config(**changes: Any) -> Callable[[Path], None]:
    """Changes its config; names that begin with ``text_`` are the text model's."""

    def damage(folder: Path) -> None:
        file = folder / "config.json"
        config = json.loads(file.read_text())
        for name, value in changes.items():
            where = config["text_config"] if name.startswith("text_") else config
            where[name.removeprefix("text_")] = value
        file.write_text(json.dumps(config))

    return damage


def not_an_object(folder: Path) -> None:
    (folder / "config.json").write_text("[]")


def no_text_model(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"text_config": None}))


def missing_file(folder: Path) -> None:
    index = {"weight_map": {"one": "model.safetensors", "two": "absent.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def broken_index(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text("{}")


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (without_config, "no readable config.json"),
        (broken_config, "no readable config.json"),
        (other_model, "is not a DiffusionGemma checkpoint"),
        (config_without_layers, "'num_hidden_layers'"),
        (truncated_weights, "is truncated"),
        (truncated_header, "is truncated"),
        (garbage, "is truncated or not a safetensors file"),
        (not_an_object, "no readable config.json"),
        (no_text_model, "lacks what a DiffusionGemma needs"),
        (of_config(text_num_attention_heads="four"), "'four'"),
        (of_config(text_num_key_value_heads=0), "num_key_value_heads is 0"),
        (of_config(text_num_attention_heads=-4), "num_attention_heads is -4"),
        (of_config(text_vocab_size=0), "vocab_size is 0"),
        (
            of_config(text_num_hidden_layers=10**9, text_layer_types=None),
            "num_hidden_layers is 1000000000",
        ),
        (of_config(quantization_config="fp8"), "lacks what"),
        (of_config(text_vocab_size=999), "[245, 64], not [999, 64]"),
        (of_config(text_num_experts=64), "[8, 256, 64], not [64, 256, 64]"),
        (of_config(text_num_experts=None), "and no experts"),
        (
            of_config(
                text_num_hidden_layers=2, text_layer_types=["full_attention"] * 2
            ),
            "3 layers of weights, 2 configured",
        ),
        (missing_file, "absent.safetensors"),
        (broken_index, "is not a valid weight index"),
    ],
)
def test_a_checkpoint_that_cannot_be_read_is_one_sentence(
    damage: Callable[[Path], None],
    says: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = copy_of_tiny(tmp_path)
    damage(folder)
    assert cli.main(["plan", "--model", str(folder)]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert says in captured.err
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize(
    "argv",
    [
        ["--tp", "0"],
        ["--tp", "two"],
        ["--gpu-memory", "-1"],
        ["--gpu-memory", "1e300"],
        ["--gpu-memory", "16GiB"],
        ["--tflops", "1e-300"],
        ["--canvases", "99999999999999999999"],
        ["--gpu-memory", "nan"],
        ["--gpu-memory-utilization", "1.5"],
        ["--preset", "int3"],
        ["--preset", "fp8", "--model", "somewhere"],
        ["--hardware", "abacus"],
    ],
)
def test_wrong_usage_is_status_2(
    argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["plan", *argv])
    assert stopped.value.code == 2
    assert "usage:" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--model", "./nowhere"], "There is no checkpoint at ./nowhere"),
        (["--link-gbps", "32"], "--memory-gbps and --tflops"),
        (["--max-model-len", "999999"], "beyond the model's 262144"),
        (["--plot", "/nowhere/plan.png"], "in a folder that exists"),
        (["--plot", "plan"], "an ending such as .png"),
        (["--plot", "/tmp"], "an ending such as .png"),
        (["--plot", "plan.docx"], "was not written"),
        (["--device", "cpu", "--gpu-memory", "16"], "describe a GPU"),
        (["--model", ""], "no readable config.json"),
    ],
)
def test_what_cannot_be_done_is_one_sentence(
    argv: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["plan", *argv]) == 1
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1


# The hub, at the HTTP boundary ------------------------------------------------------


class Hub:
    """Answers as the hub does for one repository; remembers what was fetched."""

    def __init__(self, folder: Path, status: int = 200) -> None:
        self.folder, self.status = folder, status
        self.bytes_sent = 0

    def __call__(self, request: httpx.Request) -> httpx.Response:
        headers = {
            "x-repo-commit": "0" * 40,
            "etag": '"0"',
            "x-error-code": "RepoNotFound" if self.status == 404 else "",
        }
        if self.status != 200:
            return httpx.Response(self.status, headers=headers, request=request)
        if "/api/models/" in request.url.path:
            body: dict[str, Any] = {"id": "some/model", "siblings": [], "tags": []}
            return httpx.Response(200, json=body, request=request)
        file = self.folder / request.url.path.rsplit("/", 1)[-1]
        if not file.exists():
            headers["x-error-code"] = "EntryNotFound"
            return httpx.Response(404, headers=headers, request=request)
        content = file.read_bytes()
        status = 200
        if wanted := request.headers.get("range"):
            first, last = wanted.removeprefix("bytes=").split("-")
            content, status = content[int(first) : int(last) + 1], 206
        headers["content-length"] = str(len(content))
        if request.method == "HEAD":
            return httpx.Response(status, headers=headers, request=request)
        self.bytes_sent += len(content)
        return httpx.Response(status, headers=headers, content=content, request=request)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Puts a handler in the place of the network."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))

    def install(handler: Callable[[httpx.Request], httpx.Response]) -> None:
        close_session()
        set_client_factory(lambda: httpx.Client(transport=httpx.MockTransport(handler)))

    yield install
    close_session()
    set_client_factory(lambda: httpx.Client(follow_redirects=True))


def test_a_hub_model_is_read_by_its_headers_alone(hub: Any) -> None:
    answers = Hub(TINY)
    hub(answers)
    found = read("some/model")
    assert found.tensors == read(str(TINY)).tensors
    # Of 3.3 MB: at most the 100 kB with which huggingface_hub looks for the header.
    assert answers.bytes_sent < 120_000


@pytest.mark.parametrize(
    ("status", "says"),
    [(404, "no public model some/model"), (503, "request to the hub failed")],
)
def test_a_hub_that_refuses_is_one_sentence(hub: Any, status: int, says: str) -> None:
    hub(Hub(TINY, status))
    with pytest.raises(UserError, match=says) as refused:
        read("some/model")
    assert "--preset bf16" in str(refused.value)


def test_a_hub_that_cannot_be_reached_is_one_sentence(hub: Any) -> None:
    def unreachable(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("no route", request=request) from socket.gaierror()

    hub(unreachable)
    with pytest.raises(UserError, match="request to the hub failed") as refused:
        read("some/model")
    assert "--preset bf16" in str(refused.value)


def test_a_repository_without_safetensors_is_one_sentence(
    hub: Any, tmp_path: Path
) -> None:
    shutil.copyfile(TINY / "config.json", tmp_path / "config.json")
    hub(Hub(tmp_path))
    with pytest.raises(UserError, match="no readable safetensors headers"):
        read("some/model")


def test_batched_tokens_default_to_those_of_vllm_serve_on_the_card() -> None:
    gib = 2**30
    assert default_batched_tokens(None, None) == 2048
    assert default_batched_tokens(24 * gib, "3090") == 2048
    assert default_batched_tokens(80 * gib, "NVIDIA A100-SXM4-80GB") == 2048
    assert default_batched_tokens(141 * gib, "h200") == 8192
    assert default_batched_tokens(180 * gib, None) == 16_384


def test_memory_of_a_rank_adds_up() -> None:
    memory = rank_memory(preset("bf16"), Sharding(4), Serving(4, 4096))
    parts = memory.workspace + memory.soft_embeddings + memory.input_embeddings
    parts += memory.activations + memory.runtime
    assert memory.fixed == parts + sum(memory.weights.values())
