"""`ctx.distribute`: epochs, callbacks, validation and scalars of a fit."""
