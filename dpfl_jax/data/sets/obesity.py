"""Obesity levels (Palechor and de la Hoz 2019): 16 habits of 2,111 people, seven levels."""

from __future__ import annotations

import csv
import io
import pathlib
from collections.abc import Iterator

import numpy as np

from dpfl_jax.data.rows import open_binary
from dpfl_jax.errors import BadInputError

FILE = "ObesityDataSet_raw_and_data_sinthetic.csv"
LEVELS = (
    "Insufficient_Weight",
    "Normal_Weight",
    "Overweight_Level_I",
    "Overweight_Level_II",
    "Obesity_Type_I",
    "Obesity_Type_II",
    "Obesity_Type_III",
)
# Columns by name (public copies order them differently); words count by alphabetical place.
_OFTEN = ("Always", "Frequently", "Sometimes", "no")
_YES = ("no", "yes")
_CODES = {
    "Gender": ("Female", "Male"),
    "CALC": _OFTEN,
    "FAVC": _YES,
    "SCC": _YES,
    "SMOKE": _YES,
    "family_history_with_overweight": _YES,
    "CAEC": _OFTEN,
    "MTRANS": ("Automobile", "Bike", "Motorbike", "Public_Transportation", "Walking"),
}
COLUMNS = (
    *("Gender", "Age", "Height", "Weight", "family_history_with_overweight", "FAVC", "FCVC"),
    *("NCP", "CAEC", "SMOKE", "CH2O", "SCC", "FAF", "TUE", "CALC", "MTRANS"),
)


def read_obesity(path: pathlib.Path) -> Iterator[tuple[str, dict[str, np.ndarray]]]:
    """Yields ``x`` float32 [1, 16] and ``label`` int32 [1], place in ``LEVELS``; a row is a person.

    Raises:
      BadInputError: the file or a column is missing, or a row cannot be read.
    """
    file = path if path.is_file() else path / FILE
    if not file.is_file():
        raise BadInputError(f"{path} holds no {FILE}: put the obesity levels file there")
    with open_binary(file) as binary:
        text = binary.read().decode(errors="replace")
    reader = csv.DictReader(io.StringIO(text))
    missing = {*COLUMNS, "NObeyesdad"} - set(reader.fieldnames or ())
    if missing:
        raise BadInputError(f"{file}: the columns {sorted(missing)} are missing")
    for number, row in enumerate(reader, start=2):
        try:
            x = [float(_CODES[c].index(row[c])) if c in _CODES else float(row[c]) for c in COLUMNS]
            label = LEVELS.index(row["NObeyesdad"])
        except (ValueError, TypeError) as error:
            raise BadInputError(f"{file}, line {number}: {error}") from error
        yield (
            f"person {number - 1:05d}",
            {"x": np.array([x], np.float32), "label": np.array([label], np.int32)},
        )
