"""Direction of metrics by their names, as Keras names them: whether larger values are better. Pure.

Covers: the metrics and losses of Keras 3.15, with the prefixes `val_` and of an output, and the
numbers that Keras appends to equal names.
Does not: know metrics that a program has named itself.
"""

from __future__ import annotations

import re

_HIGHER = (
    *("accuracy", "acc", "auc", "precision", "recall", "f1_score", "fbeta_score", "r2_score"),
    *("io_u", "iou", "cosine_similarity", "concordance_correlation", "pearson_correlation"),
    *("precision_at_recall", "recall_at_precision"),
    *("sensitivity_at_specificity", "specificity_at_sensitivity"),
    *("true_positives", "true_negatives"),
)
_LOWER = (
    *("loss", "hinge", "crossentropy", "kl_divergence", "poisson", "logcosh", "error", "mse"),
    *("mae", "rmse", "mape", "msle", "false_positives", "false_negatives"),
)
_NUMBER = re.compile(r"_[0-9]+\Z")


def higher_is_better(metric: str) -> bool | None:
    """Return whether larger values of a metric are better; None: its name does not say it.

    Args:
        metric: a name in Keras's logs: `val_loss`, `digit_accuracy`, `val_auc_1`.
    """
    name = _NUMBER.sub("", metric)
    for endings, answer in ((_HIGHER, True), (_LOWER, False)):
        if any(name == each or name.endswith(f"_{each}") for each in endings):
            return answer
    return None
