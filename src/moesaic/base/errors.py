"""The errors of moesaic, told apart by who can mend them.

`UserError` and its kin are the user's to mend: the command line prints their one sentence and
exits 2. Anything else that reaches the command line is our bug: it prints a traceback and exits 1.
"""

from __future__ import annotations


class MoesaicError(Exception):
    """Root of every error that moesaic raises on purpose."""


class UserError(MoesaicError):
    """Something the user can mend: the message names key, value and remedy."""


class ConfigError(UserError, ValueError):
    """A job, flag or file of settings says something impossible."""


class DivergedError(UserError):
    """Training has left the numbers: the state was not changed by the step that shows it."""


class DataError(UserError):
    """Training text, a tokenizer or a dataset directory cannot be used as asked."""


class StoreError(UserError):
    """Bytes at rest are missing, half-written or not what was written."""


class WeightsError(StoreError):
    """A model directory holds a missing, unused or mis-shaped tensor."""
