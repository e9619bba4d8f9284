# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""Train the tiny checkpoint: `python configs/tiny/train.py`.

Everything is made from seeds: problems, tokenizer, configuration, weights. Two
processes of one thread each share every batch and average their gradients, which on
two cores is faster than one process of two threads. The weights that are saved are an
exponential moving average of the trained ones.
"""

import argparse
import math
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from denoising import batches, denoising_loss
from model import CANVAS_LENGTH, generation_config, model_config
from problems import main as write_problems
from tokenizer import build_tokenizer, training_corpus
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from transformers import DiffusionGemmaForBlockDiffusion

CHECKPOINT = Path(__file__).parent / "checkpoint"
SCORE = Path(__file__).parent / "score.py"
SEED = 1
STEPS = 4000
PROCESSES = 2
BATCH_SIZE = 64
PEAK_LEARNING_RATE = 3e-3
WARMUP_STEPS = 100
WEIGHT_DECAY = 0.01
AVERAGE_DECAY = 0.995
PROGRESS_EVERY = 25
SAVE_EVERY = 250


def learning_rate(step: int, steps: int) -> float:
    """Linear warm-up, then a cosine down to zero."""
    warm = min(1.0, (step + 1) / WARMUP_STEPS)
    return PEAK_LEARNING_RATE * warm * 0.5 * (1 + math.cos(math.pi * step / steps))


def train(rank: int, steps: int, rendezvous: str, output: Path) -> None:
    """One process of the training: `rank` of `PROCESSES`."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=rendezvous, rank=rank, world_size=PROCESSES
    )
    torch.manual_seed(SEED)
    tokenizer = build_tokenizer(training_corpus())
    model = DiffusionGemmaForBlockDiffusion(model_config(tokenizer))
    model.generation_config = generation_config(tokenizer)
    for layer in model.model.decoder.layers:
        layer.self_attn.q_norm.weight.data.fill_(layer.self_attn.head_dim**-0.5)
    model.set_experts_implementation("grouped_mm")
    model.model.encoder.vision_tower.requires_grad_(False)
    model.model.encoder.embed_vision.requires_grad_(False)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(
        trained, betas=(0.9, 0.98), weight_decay=WEIGHT_DECAY, fused=True
    )
    average = parameters_to_vector(trained).detach().clone()
    torch.manual_seed(SEED + 1 + rank)
    size = BATCH_SIZE // PROCESSES
    stream = batches(tokenizer, CANVAS_LENGTH, size, SEED * PROCESSES + rank)

    start = time.monotonic()
    recent = torch.zeros(())
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps)
        optimizer.zero_grad()
        loss = denoising_loss(model, next(stream))
        loss.backward()
        # An expert that no token chose has no gradient on this process.
        gradient = torch.cat(
            [torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten()
             for p in trained]
        )
        dist.all_reduce(gradient)
        shares = (gradient / PROCESSES).split([p.numel() for p in trained])
        for parameter, share in zip(trained, shares, strict=True):
            parameter.grad = share.view_as(parameter)
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        # The average looks back over less at the start, when the weights move fastest.
        decay = min(AVERAGE_DECAY, (1 + step) / (10 + step))
        average.lerp_(parameters_to_vector(trained).detach(), 1 - decay)
        recent += loss.detach()
        if (step + 1) % PROGRESS_EVERY == 0 and rank == 0:
            elapsed = time.monotonic() - start
            print(
                f"step {step + 1}/{steps}  loss {recent / PROGRESS_EVERY:.4f}  "
                f"elapsed {elapsed:.0f} s",
                flush=True,
            )
            recent.zero_()
        if rank == 0 and ((step + 1) % SAVE_EVERY == 0 or step + 1 == steps):
            latest = parameters_to_vector(trained).detach().clone()
            vector_to_parameters(average.clone(), trained)
            model.save_pretrained(output)
            tokenizer.save_pretrained(output)
            vector_to_parameters(latest, trained)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--output", type=Path, default=CHECKPOINT)
    arguments = parser.parse_args()
    # Waiting threads that spin steal the core the other process computes on.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    write_problems()
    with tempfile.TemporaryDirectory() as folder:
        rendezvous = f"file://{folder}/rendezvous"
        mp.spawn(
            train,
            args=(arguments.steps, rendezvous, arguments.output),
            nprocs=PROCESSES,
        )
    for flags in ([], ["--zero-soft-embedding"]):
        subprocess.run(
            [sys.executable, SCORE, "--checkpoint", arguments.output, *flags],
            check=True,
        )


if __name__ == "__main__":
    main()
