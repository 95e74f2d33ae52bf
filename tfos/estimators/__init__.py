"""Estimators' core: a fit of a Keras model on a DataFrame, from checked columns to a model's bytes.

Covers: columns, the recipe of a model, what runs in workers, slots that fits share, evaluation.
Does not: have an interface of its own: users call tfos.ml or tfos.orca.
"""
