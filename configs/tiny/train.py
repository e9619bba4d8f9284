# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""Train the tiny checkpoint: `python configs/tiny/train.py`.

Problems, tokenizer, configuration and weights are all generated from seeds. Two
single-threaded processes share every batch and average their gradients, which on two
cores is faster than one process with two threads. The saved weights are an exponential
moving average of the trained weights.
"""

import argparse
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from denoising import batches, denoising_loss
from model import (
    CANVAS_LENGTH,
    generation_config,
    model_config,
    processor,
    write_as_older_transformers,
)
from muon import Muon
from problems import EVEN_MIX, TWO_STEP_MIX
from problems import main as write_problems
from tokenizer import build_tokenizer, training_corpus
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from transformers import DiffusionGemmaForBlockDiffusion, PreTrainedTokenizerFast

CHECKPOINT = Path(__file__).parent / "checkpoint"
SCORE = Path(__file__).parent / "score.py"
SEED = 1
PROCESSES = 2
BATCH_SIZE = 64
WARMUP_STEPS = 100
WEIGHT_DECAY = 0.01
AVERAGE_DECAY = 0.995
PROGRESS_EVERY = 25


@dataclass(frozen=True)
class Phase:
    """`steps` optimizer steps on training problems, chains weighted by `mix`."""

    steps: int
    peak_learning_rate: float
    mix: Mapping[str, int]

    def learning_rate(self, step: int) -> float:
        """Linear warm-up, then cosine decay to zero at the last step."""
        warm = min(1.0, step / WARMUP_STEPS)
        cosine = 0.5 * (1 + math.cos(math.pi * step / self.steps))
        return self.peak_learning_rate * warm * cosine


# The first phase has mostly two-step chains, which need the most training. The second
# starts from the averaged weights of the first and gives every chain the same share.
PHASES = (
    Phase(2500, 6e-3, TWO_STEP_MIX),
    Phase(900, 3e-3, EVEN_MIX),
)


def build_model(
    tokenizer: PreTrainedTokenizerFast,
) -> DiffusionGemmaForBlockDiffusion:
    """A new model with weights drawn from torch's current random state."""
    model = DiffusionGemmaForBlockDiffusion(model_config(tokenizer))
    model.generation_config = generation_config(tokenizer)
    # This attention has no 1 / sqrt(head_dim) scale: with an initial query norm of one,
    # every head would attend to a single random token, and training would stall.
    for layer in model.model.decoder.layers:
        torch.nn.init.constant_(
            layer.self_attn.q_norm.weight, layer.self_attn.head_dim**-0.5
        )
    model.set_experts_implementation("grouped_mm")
    model.model.encoder.vision_tower.requires_grad_(False)
    model.model.encoder.embed_vision.requires_grad_(False)
    return model


def build_optimizers(
    model: DiffusionGemmaForBlockDiffusion, trained: list[torch.nn.Parameter]
) -> list[torch.optim.Optimizer]:
    """Muon for the matrices, AdamW for the embedding and everything one-dimensional."""
    embedding = model.get_input_embeddings().weight
    matrices = [p for p in trained if p.ndim > 1 and p is not embedding]
    others = [p for p in trained if p.ndim == 1 or p is embedding]
    return [
        Muon(matrices, weight_decay=WEIGHT_DECAY),
        torch.optim.AdamW(others, betas=(0.9, 0.98), weight_decay=0.0, fused=True),
    ]


def train(rank: int, rendezvous: str, output: Path) -> None:
    """Main function of one training process: `rank` of `PROCESSES`."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=rendezvous, rank=rank, world_size=PROCESSES
    )
    torch.manual_seed(SEED)
    tokenizer = build_tokenizer(training_corpus())
    model = build_model(tokenizer)
    # From here on each process draws its own noise and problems.
    torch.manual_seed(SEED + 1 + rank)
    start = time.monotonic()
    for number, phase in enumerate(PHASES, start=1):
        for step, loss in run_phase(model, tokenizer, phase, seed=10 * number + rank):
            if rank == 0:
                elapsed = time.monotonic() - start
                print(
                    f"phase {number}/{len(PHASES)}  step {step}/{phase.steps}  "
                    f"loss {loss:.4f}  elapsed {elapsed:.0f} s",
                    flush=True,
                )
        if rank == 0:
            model.save_pretrained(output)
            write_as_older_transformers(output)
            processor(tokenizer).save_pretrained(output)
    dist.destroy_process_group()


def run_phase(
    model: DiffusionGemmaForBlockDiffusion,
    tokenizer: PreTrainedTokenizerFast,
    phase: Phase,
    seed: int,
) -> Iterator[tuple[int, float]]:
    """Train `model` in place; every `PROGRESS_EVERY` steps yield (step, mean loss).

    At the end the model has the moving average of the weights.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizers = build_optimizers(model, trained)
    average = parameters_to_vector(trained).detach().clone()
    stream = batches(tokenizer, CANVAS_LENGTH, BATCH_SIZE // PROCESSES, seed, phase.mix)
    recent = 0.0
    for step in range(1, phase.steps + 1):
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] = phase.learning_rate(step)
            optimizer.zero_grad()
        loss = denoising_loss(model, next(stream))
        loss.backward()
        _average_gradients(trained)
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        for optimizer in optimizers:
            optimizer.step()
        # The average covers fewer steps at the start, when the weights change fastest.
        decay = min(AVERAGE_DECAY, step / (step + 9))
        average.lerp_(parameters_to_vector(trained).detach(), 1 - decay)
        recent += loss.item() / PROGRESS_EVERY
        if step % PROGRESS_EVERY == 0:
            yield step, recent
            recent = 0.0
    vector_to_parameters(average, trained)


def _average_gradients(parameters: list[torch.nn.Parameter]) -> None:
    """Replace every gradient by its mean over the processes, with one all-reduce."""
    gradients = [p.grad for p in parameters]
    flat = torch.cat([g.flatten() for g in gradients if g is not None])
    dist.all_reduce(flat)
    vector_to_parameters(flat / PROCESSES, [g for g in gradients if g is not None])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=CHECKPOINT)
    arguments = parser.parse_args()
    # Spinning threads would take CPU time from the other process.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    write_problems()
    with tempfile.TemporaryDirectory() as folder:
        rendezvous = f"file://{folder}/rendezvous"
        mp.spawn(
            train,
            args=(rendezvous, arguments.output),
            nprocs=PROCESSES,
        )
    for flags in ([], ["--zero-soft-embedding"]):
        subprocess.run(
            [sys.executable, SCORE, "--checkpoint", arguments.output, *flags],
            check=True,
        )


if __name__ == "__main__":
    main()
