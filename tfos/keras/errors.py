"""What the Keras binding raises, ordered by who must act.

SettingsError
├── NotCompiled          distribute() before compile()                  → compile first
├── VariablesChanged     layers or `trainable` changed afterwards       → distribute last
└── UnsupportedError
    ├── UnsupportedOptimizer   the servers have no such rule            → choose another
    └── UnsupportedModel       the step cannot be split                 → change train_step

FeedEndedWarning             fit() asked for more epochs than were fed
"""

from __future__ import annotations

from tfos.errors import SettingsError, UnsupportedError


class NotCompiled(SettingsError):
    """The model has no optimizer yet."""


class VariablesChanged(SettingsError):
    """The model's variables are not the ones that were distributed."""


class UnsupportedOptimizer(UnsupportedError):
    """The servers have no update rule for this optimizer or for one of its settings."""


class UnsupportedModel(UnsupportedError):
    """The model's training step cannot be split into gradients here and an update there."""


class FeedEndedWarning(UserWarning):
    """The feed ended before `fit` had run all its epochs."""
