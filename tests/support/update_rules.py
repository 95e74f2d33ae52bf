"""One configuration of each update rule, and some with weight decay: for tests over all of them."""

from __future__ import annotations

import pytest

from ps.manifest.manifest import (
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    AMSGrad,
    Ftrl,
    Lion,
    Nadam,
    RMSprop,
    RuleConfig,
)
from ps.optim.rules import decays, rule_of

RULES: tuple[RuleConfig, ...] = (
    SGD(),
    SGD(momentum=0.9),
    SGD(momentum=0.9, nesterov=True),
    SGD(weight_decay=0.1),
    Adagrad(),
    RMSprop(),
    RMSprop(momentum=0.9),
    RMSprop(centered=True),
    RMSprop(centered=True, momentum=0.9),
    Adadelta(),
    Adam(),
    AdamW(),
    AMSGrad(),
    Adamax(),
    Nadam(),
    Ftrl(l1_regularization_strength=0.001, l2_regularization_strength=0.1, beta=0.1),
    Ftrl(learning_rate_power=-0.8, l2_shrinkage_regularization_strength=0.01),
    Lion(),
    Lion(weight_decay=0.1),
)


def rule_id(config: RuleConfig) -> str:
    """Name a configuration in a test's id."""
    return rule_of(config).name + "_decay" * decays(config)


WITH_DTYPES = [
    *(pytest.param(rule, "float32", id=f"{rule_id(rule)}-float32") for rule in RULES),
    *(
        pytest.param(rule, "float64", id=f"{rule_id(rule)}-float64", marks=pytest.mark.slow)
        for rule in (SGD(momentum=0.9, nesterov=True), AdamW(), Nadam(), Lion())
    ),
]
"""Every rule in float32, some in float64 too: each pair costs a compilation on a new machine."""
