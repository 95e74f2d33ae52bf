"""What the Keras binding raises, ordered by who must act.

TFOSError
├── SettingsError
│   ├── NotCompiled          distribute() before compile()              → compile first
│   ├── VariablesChanged     layers or `trainable` changed afterwards   → distribute last
│   └── UnsupportedError
│       ├── UnsupportedOptimizer   the servers have no such rule        → choose another
│       └── UnsupportedModel       the step cannot be split             → change train_step
└── NonFiniteGradient        NaN or infinity in a gradient              → fix the model, or "skip"

FeedEndedWarning             fit() asked for more epochs than were fed
"""

from __future__ import annotations

import ps.errors
from tfos.errors import SettingsError, TFOSError, UnsupportedError


class NotCompiled(SettingsError):
    """The model has no optimizer yet."""


class VariablesChanged(SettingsError):
    """The model's variables are not the ones that were distributed."""


class UnsupportedOptimizer(UnsupportedError):
    """The servers have no update rule for this optimizer or for one of its settings."""


class UnsupportedModel(UnsupportedError):
    """The model's training step cannot be split into gradients here and an update there."""


class NonFiniteGradient(TFOSError, ps.errors.NonFiniteGradient):
    """A gradient held NaN or infinity; nothing of the step was sent.

    The servers raise the same class of `ps.errors` for what reaches them.
    """


class FeedEndedWarning(UserWarning):
    """The feed ended before `fit` had run all its epochs."""
