"""Train a small, compiled GPT-2 of transformers with AdamW.

    python -m examples.train_gpt2

The model learns to continue sequences that count upwards modulo the vocabulary, so that its loss must fall
well below that of guessing. Its weights are random, and nothing is downloaded.
"""

from __future__ import annotations

import math

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import fusion_compiler as fc


def counting_batch(batch: int, length: int, vocabulary: int, device: str) -> torch.Tensor:
    """Return int64 [batch, length], whose rows count upwards from a random start."""
    start = torch.randint(vocabulary, (batch, 1), device=device)
    return (start + torch.arange(length, device=device)) % vocabulary


def main(steps: int = 60, backend: str = "auto") -> float:
    """Train and return the mean loss of the last five steps, in nats a token."""
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    vocabulary, length, batch = 61, 32, 8
    config = GPT2Config(
        vocab_size=vocabulary, n_positions=length, n_embd=64, n_layer=2, n_head=4,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model = GPT2LMHeadModel(config).to(device)
    model.loss_type = "ForCausalLM"  # transformers cannot tell from the class name, and would warn
    fast = fc.compile(model, backend=backend)
    optimizer = torch.optim.AdamW(fast.parameters(), lr=3e-3)
    losses: list[float] = []
    for step in range(steps):
        tokens = counting_batch(batch, length, vocabulary, device)
        loss = fast(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step % 10 == 0:
            print(f"step {step:3d}  loss {losses[-1]:.3f}")
    last = sum(losses[-5:]) / 5
    print(f"last five steps {last:.3f}; guessing would be {math.log(vocabulary):.3f}")
    return last


if __name__ == "__main__":
    main()
