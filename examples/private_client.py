"""Federated averaging of one's own, without a framework: each clinic's whole update is protected.

    python examples/private_client.py DIR       DIR: the clinics' folders, each on its own disk

With NVFlare, ``release`` is what a filter of a client's results does (DXOFilter.process_dxo).
"""

import pathlib
import sys

import numpy as np

import dpfl_jax as dpfl
from dpfl_jax.federation import PrivateClient

ROUNDS = 5


def train(model, x, y):
    """What a clinic does, in any way it likes: here ten steps of linear regression."""
    w = model["w"]
    for _ in range(10):
        w = w - 0.1 * x.T @ (x @ w - y) / len(y)
    return {"w": w - model["w"]}


def main(folder, clinics=30):
    """Runs all rounds, and one too many; returns the model, and a clinic's guarantee."""
    rng, truth = np.random.default_rng(0), np.array([1.0, -0.5])
    tables = [rng.normal(size=(200, 2)) for _ in range(clinics)]
    data = [(x, x @ truth + rng.normal(0, 0.1, 200)) for x in tables]
    clients = [
        PrivateClient(
            pathlib.Path(folder) / f"clinic-{i}",
            epsilon=8.0,
            delta=1e-5,
            rounds=ROUNDS,
            clip_norm=0.5,
        )
        for i in range(clinics)
    ]
    model = {"w": np.zeros(2)}
    for number in range(ROUNDS + 1):
        try:
            sent = [
                client.release(train(model, x, y), request=f"study 1, round {number}")
                for client, (x, y) in zip(clients, data)
            ]
        except dpfl.BadInputError as error:
            print(f"round {number + 1}: {error}")
            break
        model = {"w": model["w"] + np.mean([update["w"] for update in sent], axis=0)}
        print(f"round {number + 1}: model {model['w'].round(2)}, the truth is {truth}")
    print(clients[0].guarantee)
    return model, clients[0].guarantee


if __name__ == "__main__":
    main(sys.argv[1])
