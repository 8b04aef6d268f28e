"""One model in four processes: on a laptop, over links of 100 Mbit/s, or on the GPUs of a host.

    python -m examples.machines
    torchrun --nproc-per-node 4 -m examples.machines

The second line uses NCCL where there is a GPU for each process. Stop a process, and the others end with an
error that names it; start them again, and training goes on from the last checkpoint.
"""

from __future__ import annotations

import os
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn import functional as F

import fusion_compiler as fc

LINK = fc.Link(bytes_per_s=12.5e6, latency_us=200.0)
WORDS, LENGTH, WIDTH, LAYERS = 64, 16, 128, 8
MICROBATCHES, ROWS, STEPS = 8, 4, 20


class Model(nn.Module):
    """Residual layers over words. The embedding's weight is the head's too: on the first and last machine."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.1))
            for _ in range(LAYERS)
        )
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embedding.weight
        nn.init.normal_(self.head.weight, std=0.1)

    def forward(self, words: Tensor) -> Tensor:
        x = self.embedding(words)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


def loss_of(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def data(step: int, device: torch.device) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    words = torch.randint(0, WORDS, (MICROBATCHES * ROWS, LENGTH), generator=generator).to(device)
    return words, (7 * words + 3) % WORDS


def train(rank: int, world: int, address: str, folder: str) -> None:
    gpus = torch.cuda.device_count() >= world
    device = torch.device("cuda", rank) if gpus else torch.device("cpu")
    if gpus:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    dist.init_process_group("nccl" if gpus else "gloo", address, rank=rank, world_size=world)

    torch.manual_seed(0)
    model = Model().to(device)
    machines = [fc.Machine(f"machine {i}") for i in range(world)]
    example = data(0, device)[0][:ROWS]
    plan = fc.partition(model, (example,), machines=machines, links=LINK, microbatches=MICROBATCHES)
    if rank == 0:
        print(plan)

    runner = fc.PipelineRunner(
        plan,
        loss=loss_of,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=3e-3),
        throttle=None if gpus else LINK,
    )
    runner.resume(folder)
    losses: list[float] = []
    while runner.steps < STEPS:
        loss = runner.step(*data(runner.steps, device))
        if loss is not None:  # the process of the last stage
            losses.append(float(loss))
        if runner.steps % 10 == 0:
            runner.save(folder)
    print(runner)
    if losses:
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f} in {len(losses)} steps")
    runner.close()
    dist.destroy_process_group()


def main(processes: int = 4, folder: str | None = None) -> None:
    if "RANK" in os.environ:  # a process of torchrun
        train(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), "env://", folder or "checkpoints")
        return
    with tempfile.TemporaryDirectory() as temporary:
        address = f"file://{temporary}/rendezvous"
        mp.spawn(train, (processes, address, folder or temporary), processes)


if __name__ == "__main__":
    main()
