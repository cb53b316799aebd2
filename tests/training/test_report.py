"""What a run says of itself."""

import functools
import io
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fitting import fit_given as fit
from rich.console import Console
from runs import DiedError

import dpfl_jax as dpfl
from dpfl_jax.data import ArrayStore, Schema
from dpfl_jax.mechanisms import els
from dpfl_jax.mesh import data_parallel_mesh
from dpfl_jax.run.report import build_report, render_markdown


@pytest.mark.nightly
@pytest.mark.parametrize("shown", [True, False])
def test_a_run_says_how_norms_are_computed(shown):
    """A large weight that meets a mask before data is copied for each unit."""
    rng = np.random.default_rng(0)
    store = ArrayStore.from_users(
        ((f"u{u}", {"x": rng.normal(size=(2, 300)).astype("f4")}) for u in range(10)),
        Schema.arrays({"x": np.zeros(300, "f4")}),
    )

    def masked(params, example):
        return jnp.sum(jnp.tanh(example["x"] @ (params["w"] * jnp.tri(300, 900)) + params["b"]))

    console = Console(record=True, width=500, file=io.StringIO()) if shown else None
    run = functools.partial(
        fit,
        loss_fn=masked,
        params={"w": np.ones((300, 900), "f4"), "b": np.zeros(900, "f4")},
        data=store,
        mechanism=els(group_size=2, batch_size=4),
        optimizer=optax.sgd(0.1),
        steps=1,
        noise_multiplier=1.0,
        microbatch_size=4,
        mesh=data_parallel_mesh(jax.devices()[:1]),
        strategy="ghost",
        console=console,
    )
    if shown:
        result = run()
        last = console.export_text(clear=False).rstrip().splitlines()[-1]
        assert last == result.guarantee.summary()
        printed = console.export_text()
        assert result.clipping["warning"] in printed
        assert result.clipping["summary"] not in printed  # for whoever asks: it is in the report
    else:
        with pytest.warns(UserWarning, match="'w' .* is copied for each unit"):
            result = run()
    report = build_report("run", result, result.guarantee)
    assert report["clipping"]["norms"] == {"per-unit copies": 2}
    summary = "ghost clipping: norms of 0 of 2 parameters by book-keeping"
    assert report["clipping"]["summary"].startswith(summary)
    assert report["summary"] == result.guarantee.summary()
    # First what counts, below it the whole.
    lines = render_markdown(report).splitlines()
    assert lines[2] == f"**{report['summary']}**"
    assert lines.index(report["guarantee"]) > 2


def test_what_others_wrote_is_text_in_a_report():
    """Names, columns and texts of a configuration or a model: no links, pictures, HTML, cells."""
    odd = "[x](javascript:alert(1)) <script>1</script> `a` | b\n# c"
    shown = r"\[x](javascript:alert(1)) \<script>1\</script> \`a\` \| b # c"
    written = "hello\n```\n![](https://evil.example/b.png)"
    report = {
        "name": odd,
        "status": "finished",
        "steps": 1,
        "planned_steps": 1,
        "best_step": None,
        "summary": odd,
        "guarantee": odd,
        "privacy": {"public_inputs": [odd]},
        "eval": {"final": {odd: odd}},
        "samples": {"after": written},
        "model": {odd: odd},
    }
    text = render_markdown(report)
    outside, inside, rest = text.split("\n````\n")
    assert inside == written
    text = outside + rest
    assert text.count(shown) == 8
    for bad in ("[x]", "<script", "`a`", "| b", "\n# c"):
        assert re.search(rf"(?<!\\){re.escape(bad)}", text) is None


def test_a_resumed_fit_keeps_the_caveats_of_before(tmp_path):
    """Validation on people who are trained on was looked at, though the resume leaves it out."""
    store = dpfl.from_arrays({"x": np.ones((64, 1), "float32")}, users=np.arange(64))
    plan = dpfl.uls(group_size=1, cohort_size=16).plan(store, steps=6, epsilon=8.0, delta=1e-3)

    def loss(params, example):
        return jnp.sum(example["x"] * params)

    def trained(**options):
        options["loop"] = dpfl.LoopConfig(checkpoint_every=1)
        run = tmp_path / "run"
        return dpfl.fit(loss, jnp.zeros(1), plan, optax.sgd(0.1), run_dir=run, **options)

    def dies(step):
        if step == 3:
            raise DiedError

    with pytest.raises(DiedError):
        trained(validation=store, hooks=dpfl.Hooks(on_checkpoint=dies))
    caveats = trained().guarantee.caveats
    assert any("people in validation are trained on" in caveat for caveat in caveats)
