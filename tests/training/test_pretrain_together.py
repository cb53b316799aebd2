"""Two programs that need one pre-trained base at once: one trains it, the other waits for it."""

import concurrent.futures
import threading
import time

import jax.numpy as jnp
import numpy as np
import optax

from dpfl_jax.mesh import make_mesh
from dpfl_jax.training.start import pretrain


class Public:
    """Eight examples; whoever reads them waits to be told to go on."""

    user_offsets = np.arange(9)

    def __init__(self):
        self.readers = set()
        self.reading, self.go_on = threading.Event(), threading.Event()

    def read(self, positions):
        self.readers.add(threading.get_ident())
        self.reading.set()
        self.go_on.wait(timeout=60)
        return {"x": np.asarray(positions, np.float32)}


def test_a_base_is_trained_once(tmp_path):
    public = Public()

    def run():
        return pretrain(
            loss_fn=lambda params, example: (params["w"] - example["x"]) ** 2,
            params={"w": jnp.zeros(())},
            public=public,
            optimizer=optax.sgd(0.1),
            steps=2,
            batch_size=4,
            seed=0,
            identity={},
            mesh=make_mesh(),
            cache_dir=tmp_path,
        )

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        first = pool.submit(run)
        assert public.reading.wait(timeout=60)
        second = pool.submit(run)
        time.sleep(0.2)  # the second asks for the base while the first one trains it
        public.go_on.set()
        found = [first.result(), second.result()]
    assert [f.cached for f in found] == [False, True]
    assert len(public.readers) == 1
    assert float(found[0].params["w"]) == float(found[1].params["w"])
