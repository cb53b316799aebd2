"""Makes the small public checkpoint that ``configs/quickstart.yaml`` starts from.

    python examples/pretrain_quickstart.py NEW_FOLDER

A Llama of 319,000 parameters, trained from nothing on what the running Python's standard library
says in English: its help topics (``pydoc_data``) and the documentation strings of its modules,
classes and functions (PSF License). Nothing is fetched. The bundled one, ``bundled:quickstart``,
was made with Python 3.11.7 on a CPU; another Python has other documentation.
"""

from __future__ import annotations

import ast
import inspect
import json
import pathlib
import platform
import sys
import tempfile
from collections.abc import Iterator
from pydoc_data.topics import topics

import jax
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

import dpfl_jax as dpfl
from dpfl_jax.config.schema import OptimizerConfig
from dpfl_jax.data import load_tokenizer
from dpfl_jax.data.documents import store_from_documents
from dpfl_jax.data.sets import standard_library_files
from dpfl_jax.mesh import make_mesh
from dpfl_jax.models.checkpoint import save_checkpoint
from dpfl_jax.run.console import RunConsole
from dpfl_jax.training.optimizers import make_optimizer
from dpfl_jax.training.start import pretrain

SEQ_LEN, VOCABULARY, STEPS, BATCH = 64, 1024, 1600, 32
CARD = """\
# A small public base for dpfl_jax's quickstart

A Llama of {parameters:,} parameters, {layers} blocks {width} wide, that reads at most {length}
tokens of a byte-level BPE of {vocabulary}. Made by `examples/pretrain_quickstart.py` with Python
{python}: {steps:,} steps of {batch} sequences
of {trained}, from random parameters.

Trained on {characters:,} characters: the help topics (`pydoc_data.topics`) and the documentation
strings of modules, classes and functions of Python {python}'s standard library. Copyright Python
Software Foundation, PSF License Version 2 (https://docs.python.org/3/license.html). Nothing else,
and in particular no line of Shakespeare, went into weights or tokeniser.

It writes something that looks like documentation. It is good for nothing but to start from.
"""


def documents() -> Iterator[tuple[str, str]]:
    """Yields (name, text): each help topic, and each module's documentation strings together."""
    seen = set()
    for name, text in sorted(topics.items()):
        yield f"topic {name}", inspect.cleandoc(text)
    for name, source in sorted(standard_library_files().items()):
        try:
            tree = ast.parse(source)
        except SyntaxError:
            continue
        found = []
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node) or ""
                if len(text) >= 40 and text not in seen:
                    seen.add(text)
                    found.append(text)
        if found:
            yield name, "\n\n".join(found)


def make_tokenizer(texts: list[str]) -> tokenizers.Tokenizer:
    """A byte-level BPE; a sequence begins with ``<s>`` and ends with ``</s>``."""
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=VOCABULARY,
            special_tokens=["<s>", "</s>"],
            initial_alphabet=sorted(alphabet),
            show_progress=False,
        ),
    )
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", made.token_to_id("<s>"))]
    )
    return made


def main(out: pathlib.Path) -> None:
    """Trains and writes the folder."""
    texts = list(documents())
    library = make_tokenizer([text for _, text in texts])
    tokenizer = load_tokenizer(library)
    store = store_from_documents(texts, tokenizer, SEQ_LEN)
    model = dpfl.LanguageModel(
        dpfl.transformer_config(
            "tiny",
            vocab_size=tokenizer.vocab_size,
            bos_id=tokenizer.bos_id,
            max_seq_len=2 * SEQ_LEN,
            activation="swiglu",
            remat="none",
            scan_layers=False,
        )
    )
    section = OptimizerConfig(name="adamw", learning_rate=4e-3, schedule="cosine", warmup_steps=100)
    optimizer = make_optimizer(section, STEPS)
    with tempfile.TemporaryDirectory() as cache:
        made = pretrain(
            loss_fn=model.loss,
            params=model.init(jax.random.key(0)),
            public=store,
            optimizer=optimizer,
            steps=STEPS,
            batch_size=BATCH,
            seed=0,
            identity={},
            mesh=make_mesh(devices=jax.devices()[:1]),
            cache_dir=pathlib.Path(cache),
            console=RunConsole(),
        )
        save_checkpoint(out, model.config, made.params, dtype="bfloat16")
    config = out / "config.json"
    written = json.loads(config.read_text()) | {"eos_token_id": tokenizer.eos_id}
    config.write_text(json.dumps(written, indent=2, sort_keys=True) + "\n")
    library.save(str(out / "tokenizer.json"))
    kept = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "clean_up_tokenization_spaces": False,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(kept, indent=2) + "\n")
    card = CARD.format(
        parameters=model.num_params,
        layers=model.config.num_layers,
        width=model.config.embed_dim,
        length=2 * SEQ_LEN,
        vocabulary=tokenizer.vocab_size,
        python=platform.python_version(),
        steps=STEPS,
        batch=BATCH,
        trained=SEQ_LEN,
        characters=sum(len(text) for _, text in texts),
    )
    (out / "README.md").write_text(card)


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
