"""Tables of people as CSV files: medical cost and obesity levels."""

from __future__ import annotations

import pathlib

import numpy as np

from dpfl_jax.data.rows import read_rows
from dpfl_jax.errors import BadInputError

Columns = dict[str, tuple[str, ...] | None]

_YES = ("no", "yes")
# Words count by their place in alphabetical order (Lowy & Razaviyayn 2023 encode them so).
COST: Columns = {
    "age": None,
    "sex": ("female", "male"),
    "bmi": None,
    "children": None,
    "smoker": _YES,
    "region": ("northeast", "northwest", "southeast", "southwest"),
    "charges": None,
}
_OFTEN = ("Always", "Frequently", "Sometimes", "no")
# By name (public copies order the columns differently): Palechor and de la Hoz 2019.
OBESITY: Columns = {
    "Gender": ("Female", "Male"),
    "Age": None,
    "Height": None,
    "Weight": None,
    "family_history_with_overweight": _YES,
    "FAVC": _YES,
    "FCVC": None,
    "NCP": None,
    "CAEC": _OFTEN,
    "SMOKE": _YES,
    "CH2O": None,
    "SCC": _YES,
    "FAF": None,
    "TUE": None,
    "CALC": _OFTEN,
    "MTRANS": ("Automobile", "Bike", "Motorbike", "Public_Transportation", "Walking"),
    "NObeyesdad": (
        "Insufficient_Weight",
        "Normal_Weight",
        "Overweight_Level_I",
        "Overweight_Level_II",
        "Obesity_Type_I",
        "Obesity_Type_II",
        "Obesity_Type_III",
    ),
}


def read_people(file: pathlib.Path, columns: Columns) -> tuple[np.ndarray, np.ndarray]:
    """``x`` float64 [n, columns - 1] and the last column, float64 [n]; words are their places.

    Raises:
      BadInputError: the file is not there, or a cell is neither a number nor a word of its column.
    """
    if not file.is_file():
        raise BadInputError(f"{file} is missing: put the file there")
    rows = []
    for where, row in read_rows(file, "csv", list(columns)):
        try:
            rows.append(
                [float(row[n]) if w is None else w.index(row[n]) for n, w in columns.items()]
            )
        except ValueError:
            raise BadInputError(f"{where}: a cell is no number, or no word of its column") from None
    # Features in 32 bits, as sets of the library hold them.
    table = np.array(rows).astype(np.float32).astype(np.float64)
    return table[:, :-1], table[:, -1]
