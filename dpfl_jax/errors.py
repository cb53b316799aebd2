"""The errors a user can cause and mend.

Every message is one sentence that says what is wrong, where, and what to do about it.
The command line turns these into exit code 2 without a traceback.
"""


class BadInputError(ValueError):
    """Something the user gave (a config key, a file, an argument) cannot be used as it is."""


class StoppedError(Exception):
    """Work stopped before its end at the user's wish, with everything done so far saved."""
