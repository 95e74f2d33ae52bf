"""The Keras binding: models that compute here and keep their parameters on the servers.

Covers: `distribute` (ctx.distribute), `dataset` (ctx.dataset), `callbacks`, `export`.
Does not: sharding, update rules, transport (ps), rows (feeding), processes (tfos.node).
Importing this package loads neither Keras nor TensorFlow; its modules load Keras, and TensorFlow in
the functions that need it.
"""
