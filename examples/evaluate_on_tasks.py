"""Scores a model that `dpfl export` wrote on public tasks, with EleutherAI's evaluation harness.

    pip install lm-eval torch transformers
    python examples/evaluate_on_tasks.py exported --tasks lambada_openai hellaswag --limit 200

The model was released with its guarantee, and the tasks hold nobody's data, so the scores are
covered by the guarantee, unlike a loss on held-out people.
"""

import argparse
import json
import pathlib


def scores(folder, tasks, limit=None):
    """The main numbers of each task: a dict of dicts."""
    import lm_eval

    found = lm_eval.simple_evaluate(
        model="hf", model_args=f"pretrained={folder}", tasks=tasks, limit=limit
    )
    return {
        task: {name: value for name, value in numbers.items() if isinstance(value, float)}
        for task, numbers in found["results"].items()
    }


def main(argv=None):
    """Prints and returns the scores, with the guarantee that the model comes with."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--tasks", nargs="+", default=["lambada_openai"])
    parser.add_argument("--limit", type=int, help="examples of each task")
    args = parser.parse_args(argv)
    stated = json.loads((args.folder / "guarantee.json").read_text())
    result = {
        "privacy": {name: stated["privacy"][name] for name in ("epsilon", "delta", "unit")},
        "tasks": scores(args.folder, args.tasks, args.limit),
    }
    print(json.dumps(result, indent=2))
    return result


if __name__ == "__main__":
    main()
