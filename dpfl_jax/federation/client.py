"""Privacy for a client of any other federation: Flower, NVFlare, or your own loop.

A client's whole update is clipped to a norm, and gets Gaussian noise before it leaves, so that
neither the server nor anybody behind it need be trusted. Every update that is sent is a Gaussian
mechanism: replacing all of the client's data moves the clipped update by at most twice the clip
norm. Nothing is gained from a server's choice of clients, because it is not secret.

A client's folder holds its ledger, a line for each update, and its guarantee. An update is counted
on the disk before its noise is drawn, so that a crash can only count too many. Each gets noise from
the operating system's entropy, and no key is kept: two updates never have the same noise.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import fcntl
import hashlib
import io
import json
import logging
import math
import os
import pathlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from dpfl_jax import accounting
from dpfl_jax.accounting import statement
from dpfl_jax.accounting.statement import Statement, whole_number
from dpfl_jax.accounting.versions import this_version
from dpfl_jax.errors import BadInputError, at_least, one_of, positive, probability
from dpfl_jax.files import on_disk
from dpfl_jax.mechanisms.calibrated import check_noise_multiplier
from dpfl_jax.noise import Noise
from dpfl_jax.randomness import RootKey
from dpfl_jax.run.directory import private_folder, write_atomically

PyTree = Any
UNITS = ("silo", "device")
LEDGER, ROUNDS = "ledger.jsonl", "rounds.jsonl"
_RUN = "all updates"
# An update's norm after it was rounded to float32 is still at most the clip norm.
_ROUNDED = 1.0 - 2.0**-20
_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class _Budget:
    """What a client may send, ever. ``basis`` of its guarantee.json holds these fields."""

    unit: str
    epsilon: float
    delta: float
    rounds: int
    clip_norm: float
    noise_multiplier: float

    def __post_init__(self) -> None:
        one_of("unit", str(self.unit), UNITS)
        positive("epsilon", self.epsilon)
        probability("delta", self.delta, zero=False, one=False)
        at_least("rounds", self.rounds, 1, whole=True)
        at_least("clip_norm", self.clip_norm, 1e-12, most=1e12)
        check_noise_multiplier(self.noise_multiplier)

    @property
    def event(self) -> Any:
        """All rounds, each a Gaussian of which ``noise_multiplier`` is the noise over the norm."""
        # proof: client-event-1
        return accounting.events.gaussian(self.noise_multiplier, self.rounds)

    @property
    def adjacency(self) -> str:
        """What neighbours are: one client's data are replaced as a whole."""
        return f"replace one {self.unit}: all of its data, by any other data"

    @property
    def account(self) -> accounting.Account:
        """The ledger's account of everything this client sends."""
        return accounting.Account("all data of this client", self.unit, self.adjacency)

    def statement(self) -> Statement:
        """Returns the guarantee of all rounds, for guarantee.json."""
        unit, rounds = self.unit, self.rounds
        epsilon = accounting.epsilon(self.event, self.delta, relation=accounting.REPLACE)
        guarantee = accounting.Guarantee(
            unit=unit,
            adjacency=self.adjacency,
            trust="local",
            epsilon=epsilon,
            delta=self.delta,
            noise_multiplier=self.noise_multiplier,
            steps=rounds,
            accountant="PLD",
            sampling=f"none: the {unit}'s whole update, clipped to norm {self.clip_norm:g}, counts "
            f"in each of at most {rounds} rounds",
            assumptions=(
                f"the {unit} runs this code: whoever decides which program it runs must be trusted",
                f"nothing that depends on the {unit}'s data leaves it, but these updates",
                f"the folder with the {unit}'s ledger is never emptied, or restored from a copy, "
                "and no other folder is used for the same data",
                "the root key of an update, drawn from the operating system's entropy, is secret",
                *accounting.noise_assumptions("exact", epsilon, self.delta, rounds),
            ),
            caveats=(
                f"in which rounds a {unit} answers, after how long, and whether it fails are not "
                "protected",
                f"a person with data in several {unit}s is protected in each of them apart: the "
                "epsilons add up",
                "the clip norm and the other settings must not be chosen by looking at the data",
            ),
            released=f"every update that the {unit} sends, and all that a server makes of them",
            unit_key="its whole update",
            public_inputs=(
                f"bounds: clip norm {self.clip_norm:g}, at most {rounds} rounds",
                "the server's models, and the shapes of their arrays",
            ),
        )
        basis = {"system": "client", **dataclasses.asdict(self)}
        return Statement.of(guarantee, basis, [[self.event]])


def restate(basis: dict[str, Any]) -> Statement:
    """Returns the statement of a client with this basis, for ``dpfl verify``.

    Raises:
      BadInputError: the basis does not describe a client.
    """
    whole_number(basis, "rounds", 1)
    names = [field.name for field in dataclasses.fields(_Budget)]
    made = _Budget(**{name: basis[name] for name in names}).statement()
    if not made.privacy.epsilon <= basis["epsilon"] * (1 + 1e-6):
        raise BadInputError(
            f"basis.epsilon is {basis['epsilon']:g}, but its rounds cost {made.privacy.epsilon:g}"
        )
    return made


class PrivateClient:
    """Clips a client's updates, adds noise, and counts what it sent, up to a fixed budget.

    Examples:
      >>> import tempfile
      >>> import numpy as np
      >>> from dpfl_jax.federation import PrivateClient
      >>> client = PrivateClient(
      ...     tempfile.mkdtemp() + "/dp", epsilon=8.0, delta=1e-5, rounds=20, clip_norm=1.0
      ... )
      >>> sent = client.release({"w": np.ones(3)}, request="study 1, round 1")
      >>> sent["w"].shape, client.rounds_left, client.guarantee.epsilon <= 8.0
      ((3,), 19, True)
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        epsilon: float,
        delta: float,
        rounds: int,
        clip_norm: float,
        unit: str = "silo",
    ) -> None:
        """Opens the folder, or makes it and chooses the noise.

        Args:
          folder: the client's, on its own disk, and for all that it ever does with these data.
          epsilon: epsilon of all rounds together.
          delta: delta of all rounds together.
          rounds: most updates that the client sends, over all studies and runs.
          clip_norm: L2 norm to which an update is clipped, over all of its arrays together.
          unit: what the client is, and what is protected as a whole: "silo" or "device".

        Raises:
          BadInputError: the folder was begun with other settings, or misses a file.
        """
        self.folder = on_disk(folder).absolute()
        given = _Budget(unit, float(epsilon), float(delta), rounds, float(clip_norm), 1.0)
        self._budget, versions = self._settled(given)
        budget = self._budget
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        private_folder(self.folder)
        rows, ledger = self.folder / ROUNDS, accounting.Ledger(self.folder / LEDGER)
        begun = (self.folder / statement.NAME).exists()  # it was written after the others
        if (begun or ledger.runs(budget.account)) and not rows.exists():
            raise self._missing(ROUNDS)
        if (begun or _lines(rows)) and not ledger.runs(budget.account):
            raise self._missing(LEDGER)
        known = rows.read_text(errors="replace") if rows.exists() else ""
        if any(path.stem not in known for path in self.folder.glob("sent-*.safetensors")):
            raise BadInputError(
                f"{rows} has lost lines, so that it is not known what this {budget.unit} has sent: "
                "bring them back"
            )
        self._reserved: str | None = None
        os.close(os.open(rows, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o600))
        ledger.reserve(budget.account, _RUN, budget.event, budget.delta, budget.epsilon)
        stated = budget.statement().made_by([*dict.fromkeys([*versions, this_version()])])
        write_atomically(self.folder / statement.NAME, stated.dumps())
        self.guarantee = stated.privacy
        norm, sigma = budget.clip_norm, budget.noise_multiplier
        # proof: client-noise-1
        self._add = jax.jit(Noise(stddev=sigma * norm, sensitivity=2.0 * norm).add)

    def _settled(self, given: _Budget) -> tuple[_Budget, list[str]]:
        """The budget with its noise, and versions that used it: the folder's, if it has one."""
        path = self.folder / statement.NAME
        if not path.exists():
            sigma = accounting.calibrate_noise_multiplier(
                lambda sigma: dataclasses.replace(given, noise_multiplier=sigma).event,
                given.epsilon,
                given.delta,
                relation=accounting.REPLACE,
            )
            return dataclasses.replace(given, noise_multiplier=sigma), []
        stated = statement.read(path)
        basis = stated.basis
        if basis.get("system") != "client":
            raise BadInputError(f"{path} is the guarantee of something else: choose another folder")
        settled = dataclasses.replace(given, noise_multiplier=basis["noise_multiplier"])
        for name, value in dataclasses.asdict(settled).items():
            if basis.get(name) != value:
                raise BadInputError(
                    f"{path} was begun with {name}={basis.get(name)}, but {name}={value} is given: "
                    "keep to the first, as a budget that changes after results were seen bounds "
                    "nothing"
                )
        return settled, stated.library.removeprefix("dpfl_jax ").split(", ")

    def _missing(self, name: str) -> BadInputError:
        return BadInputError(
            f"{self.folder / name} is missing, so that it is not known what this "
            f"{self._budget.unit} has sent: bring the file back"
        )

    @property
    def rounds_left(self) -> int:
        """How many more updates the budget allows."""
        return max(self._budget.rounds - _lines(self.folder / ROUNDS), 0)

    def reserve(self, request: str) -> None:
        """Uses up the round of a request before its update is made.

        Then an update that is never made costs a round, too: that it failed may be seen.

        Args:
          request: as for ``release``, which does not count it again.

        Raises:
          BudgetExceededError: the budget is used up.
        """
        with self._locked_rounds() as rounds:
            self._count(rounds, self._place(request).stem)
        self._reserved = request

    def answered(self, request: str) -> bool:
        """Whether this is the last request that was answered, so that its answer is repeated."""
        return self._place(request).exists()

    def release(self, update: PyTree, request: str) -> PyTree:
        """Returns the clipped update with noise, which may be sent to anybody.

        It uses up one round, except if the last request is repeated, which gets the same arrays
        again, whatever the update. An update with a number that is not finite counts as 0.

        Args:
          update: pytree of floating-point arrays: the new parameters minus those that the server
            sent, or a gradient.
          request: what the server asked for, so that a retry is recognised, as "job 7, round 3".

        Returns:
          A pytree of NumPy arrays of the same shapes, float32.

        Raises:
          BudgetExceededError: the budget is used up.
          BadInputError: an array is not of floating-point numbers, or a file is missing.
        """
        leaves, treedef = jax.tree.flatten(update)
        leaves = [np.asarray(leaf) for leaf in leaves]
        if not leaves or not all(jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in leaves):
            raise BadInputError(
                "an update must be arrays of floating-point numbers, as only these get noise: "
                "leave out counters and other arrays, which must not be sent"
            )
        # Locked to the end: a message that two processes answer is counted once, and sent once.
        with self._locked_rounds() as rounds:
            answer = self._sent(request)
            if answer is None:
                if self._reserved != request:
                    self._count(rounds, self._place(request).stem)
                self._reserved = None
                key = jnp.asarray(RootKey.generate().words("noise"))
                noised = self._add(key, clipped(leaves, self._budget.clip_norm))
                answer = [np.asarray(leaf) for leaf in noised]
                self._keep(request, answer)
        if [leaf.shape for leaf in answer] != [leaf.shape for leaf in leaves]:
            raise BadInputError(
                f"the request {request[:60]!r} was answered with arrays of other shapes: give "
                "another request another name"
            )
        return jax.tree.unflatten(treedef, answer)

    def _place(self, request: str) -> pathlib.Path:
        return self.folder / f"sent-{hashlib.sha256(request.encode()).hexdigest()[:32]}.safetensors"

    def _sent(self, request: str) -> list[np.ndarray] | None:
        """What was sent if this is the last request; None: it is new, or nothing is known of it."""
        try:
            arrays = load(self._place(request).read_bytes())
        except (FileNotFoundError, SafetensorError):
            return None
        return [arrays[str(i)] for i in range(len(arrays))]

    def _keep(self, request: str, answer: list[np.ndarray]) -> None:
        """Keeps the last answer alone, as a model may be large."""
        path = self._place(request)
        content = save({str(i): leaf for i, leaf in enumerate(answer)})
        write_atomically(path, content, mode=0o600)
        for other in self.folder.glob("sent-*.safetensors"):
            if other != path:
                other.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _locked_rounds(self) -> Iterator[io.FileIO]:
        path = self.folder / ROUNDS
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_NOFOLLOW)
        except FileNotFoundError:
            raise self._missing(ROUNDS) from None
        with io.FileIO(descriptor, "r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield file

    def _count(self, rounds: io.FileIO, name: str) -> None:
        """Uses up a round, on the disk, before anything of it is computed."""
        # proof: client-rounds-1
        if not self.rounds_left:
            b = self._budget
            raise accounting.BudgetExceededError(
                f"this {b.unit} has sent the {b.rounds} updates of its budget, and one more would "
                f"exceed epsilon {b.epsilon:g} at delta {b.delta:g}: nothing was sent"
            )
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        torn = b"" if rounds.readall()[-1:] in (b"", b"\n") else b"\n"
        line = torn + json.dumps({"time": now, "sent": name}).encode() + b"\n"
        if rounds.write(line) != len(line):
            raise OSError(f"{self.folder / ROUNDS} could not be written in full: is the disk full?")
        os.fsync(rounds.fileno())


def clipped(leaves: list[np.ndarray], clip_norm: float) -> list[np.ndarray]:
    """Returns arrays scaled down to a joint L2 norm of at most ``clip_norm``, as float32.

    Arrays with a number that is not finite, or whose norm overflows, become 0.
    """
    wide = [np.asarray(leaf, np.float64) for leaf in leaves]
    with np.errstate(over="ignore", invalid="ignore"):
        norm = math.sqrt(sum(float(np.sum(np.square(leaf))) for leaf in wide))
    if not math.isfinite(norm):
        _log.warning(
            "the update is not finite, or too large: it counts as 0, and only noise is sent"
        )
        return [np.zeros(leaf.shape, np.float32) for leaf in wide]
    # proof: client-clip-1
    scale = _ROUNDED * clip_norm / max(norm, clip_norm)
    return [(leaf * scale).astype(np.float32) for leaf in wide]


def _lines(path: pathlib.Path) -> int:
    """The lines of a file; one that was cut off counts, and so does none of a missing file."""
    data = path.read_bytes() if path.exists() else b""
    return len([line for line in data.split(b"\n") if line])
