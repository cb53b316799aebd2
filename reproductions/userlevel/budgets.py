"""Whether the group size should be chosen by the compute budget: speakers, and writers of digits.

Every cell trains with the noise that its sampling calls for, from public seeds.
"""

from __future__ import annotations

import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import yaml
from rich.console import Console
from scipy import stats

from dpfl_jax.config import load_config
from dpfl_jax.mesh import make_mesh
from dpfl_jax.planning import Option, Planner, Users, estimate_sensitivities, median_group_size
from dpfl_jax.planning.proxy import Trial, run_trials
from dpfl_jax.training.central_run import read_data
from dpfl_jax.training.start import starting_params
from reproductions._plots import panel
from reproductions.registry import Claim, Outcome, Settings

TITLE = "the best group size by compute budget, on speakers and on writers"
SOURCE = "Charles et al. 2024, section 6 and Appendix F (users first, then examples of each)"
OPTIONS = ("seeds",)

GROUPS = (1, 4, 16)
BUDGETS = (64, 256, 1024)
EPSILON, DELTA = 2.0, 1e-4
ROOM = 0.01  # of the loss: what is called near the best
Losses = Mapping[tuple[str, int, int], np.ndarray]  # (kind, group, budget) -> [seeds]


def run(settings: Settings) -> Outcome:
    """Trains each cell at each seed; finished runs are kept beside the figure."""
    seeds = settings.seeds or 3
    claims: list[Claim] = []
    rows: list[dict[str, Any]] = []
    drawn = {}
    notes = [
        f"epsilon {EPSILON:g}, delta {DELTA:g}, {seeds} seed(s) of sampling and noise, public: the "
        "runs protect nobody; one learning rate; intervals of 90 % over seeds (Student's t)"
    ]
    if seeds < 2:
        notes.append("with one seed there are no intervals: nothing is shown to differ")
    for name, content, note in _sets(settings):
        planner, losses = _losses(settings, name, content, seeds)
        picks = {b: min(_cells(planner, b), key=lambda o: o.noise) for b in BUDGETS}
        claims += _claims(name, losses, picks)
        rows += _rows(name, losses, picks)
        drawn[f"{name}, {planner.users.num_users:,} users"] = (losses, picks)
        notes.append(note)
    file = settings.out / "userlevel-budgets.png"
    _draw(drawn, file)
    return Outcome(claims, [file], rows, notes)


def _sets(settings: Settings) -> list[tuple[str, dict[str, Any], str]]:
    """(name, configuration, what it is) of what there is."""
    steps, folder = 8 if settings.quick else 16, settings.data_dir
    shared = {
        "privacy": {"epsilon": EPSILON, "delta": DELTA},
        "train": {"steps": steps},
        "mechanism": {"kind": "uls", "cohort_size": 64, "group_size": 1, "clip_norm": 0.5,
                      "clipping": "normalized"},
    }  # fmt: skip
    plays = None if folder is None else folder / "shakespeare_plays"
    found = [(
        "Shakespeare",
        {
            **shared,
            "data": {
                "source": "shakespeare",
                "path": str(plays) if plays and plays.is_dir() else None,
                "tokenizer": "checkpoint",
                "seq_len": 24 if settings.quick else 48,
                "max_examples_per_user": 64,
                "validation_fraction": 0.1,
                "test_fraction": 0.0,
            },
            "model": {"checkpoint": "bundled:quickstart",
                      "overrides": {"remat": "none", "scan_layers": False}},
            "optimizer": {"name": "adam", "learning_rate": 1e-2, "schedule": "cosine"},
            "execution": {"microbatch_size": 32, "strategy": "vmap"},
            "eval": {"max_examples_per_user": 4},
        },
        "Shakespeare by speaking role: a small model of Python's documentation is fine-tuned",
    )]  # fmt: skip
    data, note = _writers(folder)
    if data is not None:
        images = {
            **shared,
            "data": {**data, "validation_fraction": 0.15},
            "model": {"kind": "mlp", "options": {"hidden": [64]}},
            "optimizer": {"name": "adam", "learning_rate": 1e-2, "schedule": "cosine"},
            "execution": {"microbatch_size": 64, "strategy": "vmap"},
            "eval": {"max_examples_per_user": 20},
        }
        found.append(("writers", images, note))
    return found


def _writers(folder: pathlib.Path | None) -> tuple[dict[str, Any] | None, str]:
    if folder is not None and (folder / "femnist").is_dir():
        return {"source": "femnist", "path": str(folder / "femnist")}, "FEMNIST by writer"
    if folder is not None and (folder / "mnist").is_dir():
        made = {"source": "mnist", "path": str(folder / "mnist"), "records_per_user": 40}
        return made, (
            "DPFL_DATA_DIR holds no femnist: writers are made up of 40 images of MNIST each, at "
            "random, so that their images are no more alike than those of others"
        )
    return None, ""


def _losses(
    settings: Settings, name: str, content: dict[str, Any], seeds: int
) -> tuple[Planner, Losses]:
    file = settings.out / f"userlevel-budgets-{name}.yaml"
    file.write_text(yaml.safe_dump({"name": "budgets", **content}, sort_keys=False))
    config: Any = load_config(file, [])
    quiet = Console(quiet=True)
    data, model = read_data(config, quiet)
    sizes = np.diff(data.train.user_offsets)
    params, _ = starting_params(config, data, model, make_mesh(), quiet)
    norms = estimate_sensitivities(model.loss, params, data.train, GROUPS)
    planner = Planner(
        Users(len(sizes), sizes=sizes),
        norms,
        epsilon=EPSILON,
        delta=DELTA,
        steps=config.train.steps,
    )
    median = median_group_size(sizes)
    keys, trials = [], []
    for budget in BUDGETS:
        arms = [*_cells(planner, budget), planner.els(median, budget)]
        for option in arms:
            for seed in range(seeds):
                keys.append((option.kind, option.group_size, budget))
                trials.append(
                    Trial(option.kind, option.group_size, option.size, planner.steps,
                          option.noise_multiplier / option.size, seed=seed)
                )  # fmt: skip
    done = settings.out / f"userlevel-budgets-{name}.jsonl"

    def told(count: int, row: dict[str, Any]) -> None:
        settings.console.print(f"{name}: {count} of {len(trials)} runs, loss {row['loss']}")

    found = run_trials(file, [], trials, done, done=told)
    losses: dict[tuple[str, int, int], list[float]] = {key: [] for key in keys}
    for key, row in zip(keys, found, strict=True):
        losses[key].append(math.inf if row["loss"] is None else row["loss"])
    return planner, {key: np.asarray(values) for key, values in losses.items()}


def _cells(planner: Planner, budget: int) -> list[Option]:
    most = planner.users.num_users
    return [planner.uls(g, budget // g) for g in GROUPS if 1 <= budget // g <= most]


# ---- verdicts -----------------------------------------------------------------------------------


def _interval(values: np.ndarray) -> tuple[float, float, float]:
    """Mean, and its 90 % interval over seeds; without an end where there is one seed."""
    mean, n = float(values.mean()), len(values)
    if n < 2:
        return mean, -math.inf, math.inf
    half = float(stats.t.ppf(0.95, n - 1) * values.std(ddof=1) / math.sqrt(n))
    return mean, mean - half, mean + half


def _told(values: np.ndarray) -> str:
    return "{:+.3f} ({:+.3f} to {:+.3f})".format(*_interval(values))


def _uls(losses: Losses, budget: int) -> dict[int, np.ndarray]:
    return {g: v for (kind, g, b), v in losses.items() if kind == "uls" and b == budget}


def _claims(name: str, losses: Losses, picks: Mapping[int, Option]) -> list[Claim]:
    small, large = BUDGETS[0], BUDGETS[-1]
    both = sorted(set(_uls(losses, small)) & set(_uls(losses, large)))
    few, many = both[0], both[-1]
    by = {b: losses["uls", many, b] - losses["uls", few, b] for b in (small, large)}
    change = by[large] - by[small]
    best = {b: min(_uls(losses, b), key=lambda g: _uls(losses, b)[g].mean()) for b in BUDGETS}

    def regret(choose: Mapping[int, int]) -> float:
        """Largest over budgets, of mean losses; a size that cannot be run is no choice."""
        return max(
            float(_uls(losses, b)[g].mean() / _uls(losses, b)[best[b]].mean() - 1)
            if g in _uls(losses, b)
            else math.inf
            for b, g in choose.items()
        )

    kept = best[small] if best[small] in both else few  # too few users for it at the largest
    better = losses["uls", best[large], large] - losses["uls", kept, large]
    planned = regret({b: picks[b].group_size for b in BUDGETS})
    fixed = {g: regret(dict.fromkeys(BUDGETS, g)) for g in GROUPS}
    text = ", ".join(f"always G = {g}: {r:.1%}" for g, r in fixed.items())
    els = {b: next(v for (k, _, c), v in losses.items() if (k, c) == ("els", b)) for b in BUDGETS}
    uls = {b: losses["uls", picks[b].group_size, b] for b in BUDGETS}
    gain = (uls[small] - uls[large]) - (els[small] - els[large])
    return [
        Claim(
            f"{name}: examples of a user are worth more, against users, as compute grows",
            _told(change),
            "below 0",
            _interval(change)[2] < 0,
            f"change from B = {small} to {large} of: loss at G = {many} less that at G = {few}",
            source="paper",
        ),
        Claim(
            f"{name}: the best group size is larger at a larger budget",
            ", ".join(f"B = {b}: G = {g}" for b, g in best.items()),
            f"more than at B = {small}",
            best[large] > best[small] and _interval(better)[2] < 0,
            f"and there its loss is {_told(better)} from that of the smallest budget's choice",
            source="paper",
        ),
        Claim(
            f"{name}: choosing G by budget (least noise) loses less than any G for all budgets",
            f"{planned:.1%}; {text}",
            "first is least",
            planned < min(fixed.values()),
            "largest excess over the best cell of a budget, means over seeds",
            source="ours",
        ),
        Claim(
            f"{name}: the choice of least noise is near the best at every budget",
            f"{planned:.1%} above at most",
            f"within {ROOM:.0%}",
            planned <= ROOM,
            source="ours",
        ),
        Claim(
            f"{name}: ULS gains more from compute than ELS (median group size)",
            _told(gain),
            "above 0",
            _interval(gain)[1] > 0,
            f"fall of the loss from B = {small} to {large}, ULS of least noise less ELS",
            source="paper",
        ),
    ]


def _rows(name: str, losses: Losses, picks: Mapping[int, Option]) -> list[dict[str, Any]]:
    rows = []
    for (kind, group, budget), values in losses.items():
        mean, low, high = _interval(values)
        planned = kind == "uls" and picks[budget].group_size == group
        row = {"set": name, "budget": budget, "kind": kind, "group_size": group, "planned": planned}
        rows.append({**row, "loss": mean, "low": low, "high": high, "seeds": values.tolist()})
    return rows


def _draw(drawn: Mapping[str, tuple[Losses, Mapping[int, Option]]], file: pathlib.Path) -> None:
    with panel(file, 1, len(drawn), size=(5 * len(drawn), 4), squeeze=False) as grid:
        for ax, (title, (losses, picks)) in zip(grid[0], drawn.items(), strict=True):
            arms = sorted({(kind, group) for kind, group, _ in losses}, reverse=True)
            for kind, group in arms:
                _line(ax, losses, kind, group)
            chosen = [losses["uls", picks[b].group_size, b].mean() for b in BUDGETS]
            ax.plot(BUDGETS, chosen, "o", ms=13, mfc="none", mec="black", label="least noise")
            ax.set_xscale("log", base=2)
            ax.set_xticks(BUDGETS, [str(b) for b in BUDGETS])
            ax.set(xlabel="compute budget B", ylabel="held-out loss", title=title)
            ax.legend(fontsize=8)


def _line(ax: Any, losses: Losses, kind: str, group: int) -> None:
    x: Sequence[int] = [b for b in BUDGETS if (kind, group, b) in losses]
    found = [_interval(losses[kind, group, b]) for b in x]
    y = [mean for mean, _, _ in found]
    bars = [[m - low for m, low, _ in found], [high - m for m, _, high in found]]
    style = {"uls": "o-", "els": "s--"}[kind]
    finite = bars if np.isfinite(bars).all() else None
    ax.errorbar(x, y, finite, fmt=style, capsize=3, label=f"{kind.upper()}, G = {group}")
