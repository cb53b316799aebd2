"""MNIST by image with Opacus or JAX-Privacy: model, sampling, clip norm and steps of our small CNN.

Run by ``dpfl bench quality --peers PYTHON``, where PYTHON has opacus, torch and jax-privacy. Only
the other library and NumPy are imported, so it is none of ours that computes here.

    PYTHON benchmarks/_quality_peers.py opacus EPSILON SEED RATE train.steps=STEPS --json
"""

from __future__ import annotations

import gzip
import json
import os
import pathlib
import sys
from typing import Any

import numpy as np

BATCH, PHYSICAL, CLIP, DELTA, MOMENTUM = 4096, 512, 1.0, 1e-5, 0.9


def mnist(folder: pathlib.Path, part: str) -> tuple[np.ndarray, np.ndarray]:
    """Images [n, 1, 28, 28] in -1..1, and labels."""
    read = [gzip.decompress((folder / f"{part}-{kind}-ubyte.gz").read_bytes())
            for kind in ("images-idx3", "labels-idx1")]  # fmt: skip
    images = np.frombuffer(read[0], np.uint8, offset=16).reshape(-1, 1, 28, 28)
    labels = np.frombuffer(read[1], np.uint8, offset=8).astype(np.int64)
    return 2 * images.astype(np.float32) / 255 - 1, labels


def opacus(data: dict[str, Any], epsilon: float, seed: int, rate: float, steps: int) -> Any:
    """Returns (accuracy, epsilon) of the tutorial's loop."""
    import torch
    from opacus import PrivacyEngine
    from opacus.accountants.utils import get_noise_multiplier
    from opacus.utils.batch_memory_manager import BatchMemoryManager
    from torch import nn

    torch.manual_seed(seed)
    x, y = (torch.from_numpy(part) for part in data["train"])
    model: Any = nn.Sequential(
        nn.Conv2d(1, 16, 8, 2, padding=3), nn.ReLU(), nn.MaxPool2d(2, 1),
        nn.Conv2d(16, 32, 4, 2), nn.ReLU(), nn.MaxPool2d(2, 1),
        nn.Flatten(), nn.Linear(32 * 4 * 4, 32), nn.ReLU(), nn.Linear(32, 10),
    )  # fmt: skip
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=rate, momentum=MOMENTUM)
    loader: Any = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(x, y), batch_size=BATCH
    )
    noise = get_noise_multiplier(
        target_epsilon=epsilon, target_delta=DELTA, sample_rate=BATCH / len(x), steps=steps
    )
    engine = PrivacyEngine()
    model, optimizer, loader = engine.make_private(
        module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=noise,
        max_grad_norm=CLIP,
    )  # fmt: skip
    done = 0
    while done < steps:
        with BatchMemoryManager(
            data_loader=loader, max_physical_batch_size=PHYSICAL, optimizer=optimizer
        ) as parts:
            for images, labels in parts:
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(images), labels).backward()
                last = not optimizer._check_skip_next_step(pop_next=False)
                optimizer.step()
                done += last
                if done == steps:
                    break
    with torch.no_grad():
        images, labels = (torch.from_numpy(part) for part in data["t10k"])
        right = (model(images).argmax(1) == labels).float().mean()
    return float(right), engine.get_epsilon(DELTA)


def jax_privacy(data: dict[str, Any], epsilon: float, seed: int, rate: float, steps: int) -> Any:
    """Returns (accuracy, epsilon) of a loop as in its documentation."""
    import jax
    import jax.numpy as jnp
    import jax_privacy
    import optax
    from jax_privacy import accounting, batch_selection

    x, y = data["train"]
    keys = jax.random.split(jax.random.key(seed), 4)
    shapes = ((16, 1, 8, 8), (32, 16, 4, 4), (32 * 4 * 4, 32), (32, 10))
    fans = (64, 256, 512, 32)
    init = [
        (
            jax.random.normal(key, shape) / np.sqrt(fan),
            jnp.zeros(shape[-1 if len(shape) == 2 else 0]),
        )
        for key, shape, fan in zip(keys, shapes, fans, strict=True)
    ]

    def pooled(z: Any) -> Any:
        return jax.lax.reduce_window(z, -jnp.inf, jax.lax.max, (1, 1, 2, 2), (1,) * 4, "VALID")

    def logits(params: Any, images: Any) -> Any:
        z = images
        for (kernel, bias), pad in zip(params[:2], (3, 0), strict=True):
            z = jax.lax.conv_general_dilated(z, kernel, (2, 2), [(pad, pad)] * 2)
            z = pooled(jax.nn.relu(z + bias[:, None, None]))
        z = z.reshape(len(z), -1)
        z = jax.nn.relu(z @ params[2][0] + params[2][1])
        return z @ params[3][0] + params[3][1]

    def loss(params: Any, images: Any, labels: Any) -> Any:
        return optax.softmax_cross_entropy_with_integer_labels(logits(params, images), labels).sum()

    accountant = accounting.analysis.DpsgdTrainingAccountant(
        accounting.accountants.PldAccountantConfig()
    )
    facts = {"num_samples": len(x), "batch_sizes": BATCH, "num_updates": steps}
    noise = accounting.calibrate.calibrate_noise_multiplier(
        target_epsilon=epsilon, accountant=accountant, target_delta=DELTA, tol=1e-3, **facts
    )
    spent = accountant.compute_epsilon(
        steps,
        accounting.analysis.DpParams(
            noise_multipliers=noise, batch_size=BATCH, num_samples=len(x), delta=DELTA
        ),
    )
    clipped = jax_privacy.clipped_grad(loss, l2_clip_norm=CLIP, batch_argnums=(1, 2))
    optimizer = optax.sgd(rate, momentum=MOMENTUM)

    @jax.jit
    def add(total: Any, params: Any, images: Any, labels: Any, padding: Any) -> Any:
        some = clipped(params, images, labels, is_padding_example=padding)
        return jax.tree.map(jnp.add, total, some)

    @jax.jit
    def update(params: Any, state: Any, total: Any, key: Any) -> Any:
        leaves, tree = jax.tree.flatten(total)
        drawn = [
            (leaf + CLIP * noise * jax.random.normal(k, leaf.shape)) / BATCH
            for leaf, k in zip(leaves, jax.random.split(key, len(leaves)), strict=True)
        ]
        updates, state = optimizer.update(jax.tree.unflatten(tree, drawn), state)
        return optax.apply_updates(params, updates), state

    params, state = init, optimizer.init(init)
    strategy = batch_selection.CyclicPoissonSampling(BATCH / len(x), steps)
    for step, batch in enumerate(strategy.batch_iterator(len(x), seed)):
        total = jax.tree.map(jnp.zeros_like, params)
        for part in batch_selection.split_and_pad_global_batch(batch, PHYSICAL):
            total = add(total, params, x[part], y[part], part == -1)
        params, state = update(params, state, total, jax.random.fold_in(keys[0], 1000 + step))
    images, labels = data["t10k"]
    right = np.mean(np.asarray(jax.jit(logits)(params, images).argmax(1)) == labels)
    return float(right), float(spent)


if __name__ == "__main__":
    name, epsilon, seed, rate, steps, _ = sys.argv[1:]
    folder = pathlib.Path(os.environ["DPFL_DATA_DIR"]) / "mnist"
    sets = {part: mnist(folder, part) for part in ("train", "t10k")}
    library = {"opacus": opacus, "jax-privacy": jax_privacy}[name]
    value, spent = library(
        sets, float(epsilon), int(seed), float(rate), int(steps.removeprefix("train.steps="))
    )
    sys.stdout.write(json.dumps({"value": value, "epsilon": spent}) + "\n")
