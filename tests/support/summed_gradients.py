"""A Keras model whose reference numbers tables can equal."""

from __future__ import annotations

from typing import Any

import keras


class SummedGradients(keras.Model):  # type: ignore[misc]  # Keras has no types
    """Keras, with the gradients of equal ids summed before its rule, as every rule means them."""

    def train_step(self, data: Any) -> Any:
        import tensorflow as tf

        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x=x, y=y, y_pred=self(x, training=True))
        variables = self.trainable_variables
        gradients = map(tf.convert_to_tensor, tape.gradient(loss, variables))
        self.optimizer.apply(list(gradients), variables)
        return {"loss": loss}
