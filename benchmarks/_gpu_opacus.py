"""What ``dpfl bench gpu`` measures of Opacus: its ghost mode, on models of the same sizes.

The head is a parameter of its own (Opacus refuses tied ones), so that these models are larger by
vocab_size x embed_dim; computed in bfloat16 with float32 parameters (autocast), by example.
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
from opacus.grad_sample import GradSampleModuleFastGradientClipping
from torch import nn
from torch.nn import functional

from benchmarks._gpu_cells import RANK, SIZES, TINY, Cell, Measuring, write


class Adapted(nn.Module):
    """A projection, with an adapter or without."""

    def __init__(self, width: int, out: int, adapted: bool) -> None:
        super().__init__()
        self.base = nn.Linear(width, out, bias=False)
        self.a = nn.Linear(width, RANK, bias=False) if adapted else None
        self.b = nn.Linear(RANK, out, bias=False) if adapted else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """X W, and x A B."""
        y = self.base(x)
        return y if self.a is None or self.b is None else y + self.b(self.a(x))


class Block(nn.Module):
    """Pre-norm attention and MLP of a configuration's widths."""

    def __init__(self, fields: dict[str, Any], adapted: bool) -> None:
        super().__init__()
        width, self.heads = fields["embed_dim"], fields["num_heads"]
        self.kv_heads = fields.get("num_kv_heads") or self.heads
        self.head = width // self.heads
        self.gated = fields.get("activation") == "swiglu"
        hidden = fields.get("mlp_dim") or 4 * width
        narrow = self.kv_heads * self.head
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.out = (Adapted(width, width, adapted) for _ in range(2))
        self.k, self.v = (Adapted(width, narrow, adapted) for _ in range(2))
        self.up, self.down = nn.Linear(width, hidden, bias=False), nn.Linear(hidden, width, False)
        self.gate = nn.Linear(width, hidden, bias=False) if self.gated else None

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """[n, length, width] -> the same."""
        y = self.norm1(x)

        def heads(z: torch.Tensor, count: int) -> torch.Tensor:
            return z.unflatten(-1, (count, self.head)).transpose(1, 2)

        def turned(z: torch.Tensor) -> torch.Tensor:
            a, b = z.chunk(2, -1)
            return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(z.dtype)

        q, k = turned(heads(self.q(y), self.heads)), turned(heads(self.k(y), self.kv_heads))
        v, times = heads(self.v(y), self.kv_heads), self.heads // self.kv_heads
        k, v = (z.repeat_interleave(times, 1) for z in (k, v))
        mixed = functional.scaled_dot_product_attention(q, k, v.to(q.dtype), is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        y = self.norm2(x)
        up = self.up(y)
        up = functional.silu(self.gate(y)) * up if self.gate is not None else functional.gelu(up)
        return x + self.down(up)


class Model(nn.Module):
    """Tokens [n, length] -> logits."""

    def __init__(self, fields: dict[str, Any], adapted: bool) -> None:
        super().__init__()
        width = fields["embed_dim"]
        self.width = width // fields["num_heads"]
        self.embedding = nn.Embedding(fields["vocab_size"], width)
        self.blocks = nn.ModuleList(Block(fields, adapted) for _ in range(fields["num_layers"]))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, fields["vocab_size"], bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Runs it."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        steps = torch.arange(0, self.width, 2, device=tokens.device)
        angles = places[:, None] * 10_000.0 ** (-steps / self.width)
        x, cos, sin = self.embedding(tokens), angles.cos(), angles.sin()
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.head(self.norm(x))


def rows(asked: Measuring) -> Iterator[dict[str, Any]]:
    """Non-private and ghost steps of the cells by example, by turns."""
    begun = time.perf_counter()
    for cell in (cell for cell in asked.cells if cell.unit == "els"):
        if time.perf_counter() - begun > 60 * asked.minutes:
            return
        yield from _measured(cell, asked)


def _measured(cell: Cell, asked: Measuring) -> Iterator[dict[str, Any]]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    adapted = cell.trains == "lora"
    with torch.device(device):
        model = Model((TINY if asked.tiny else SIZES)[cell.model], adapted)
    if adapted:
        for name, parameter in model.named_parameters():
            parameter.requires_grad = name.endswith((".a.weight", ".b.weight"))
    private = GradSampleModuleFastGradientClipping(model, max_grad_norm=1.0)
    trained = [p for p in model.parameters() if p.requires_grad]
    tokens = torch.randint(3, model.head.out_features, (cell.examples, cell.seq_len), device=device)
    targets = tokens.roll(-1, 1)

    def losses(run: nn.Module) -> torch.Tensor:
        with torch.autocast(device, torch.bfloat16):
            logits = run(tokens)
        each = functional.cross_entropy(logits.float().transpose(1, 2), targets, reduction="none")
        return each.mean(1)

    def plain() -> None:
        private.disable_hooks()
        losses(model).sum().backward()

    def ghost() -> None:
        private.enable_hooks()
        each = losses(private)
        each.mean().backward(retain_graph=True)  # hooks undo the mean
        private.zero_grad()
        weights = private.get_clipping_coef().detach()
        private.disable_hooks()
        (weights * each).sum().backward()

    shared = {
        **dataclasses.asdict(cell),
        "parameters": sum(p.numel() for p in model.parameters()),
        "trained": sum(p.numel() for p in trained),
    }
    variants = {"torch, non-private": plain, "opacus, ghost": ghost}
    made = {name: {**shared, "variant": name} for name in variants}
    times: dict[str, list[float]] = {name: [] for name in variants}
    for turn in range(asked.rounds + 1):
        for name, step in variants.items():
            if "error" in made[name]:
                continue
            private.zero_grad()
            if device == "cuda":
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
            wall = time.perf_counter()
            try:
                step()
                if device == "cuda":
                    torch.cuda.synchronize()
            except torch.OutOfMemoryError as error:
                made[name]["error"] = f"out of memory: {str(error).splitlines()[0][:200]}"
                continue
            if turn:  # the first does not count
                times[name].append(time.perf_counter() - wall)
            if device == "cuda":
                made[name]["peak_bytes"] = torch.cuda.max_memory_allocated()
    base = times["torch, non-private"]
    for name, row in made.items():
        if "error" not in row:
            row["seconds"] = statistics.median(times[name])
            row["spread"] = max(times[name]) / min(times[name]) - 1
            row["tokens_per_second"] = cell.examples * cell.seq_len / row["seconds"]
            if base:
                row["over_non_private"] = row["seconds"] / statistics.median(base)
        yield row


def main() -> None:
    """Reads what to measure, and writes a line of JSON for each row."""
    asked = Measuring.parse(sys.stdin.read())
    for row in rows(asked):
        write(row)


if __name__ == "__main__":
    main()
