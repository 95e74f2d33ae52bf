"""DeepFM in one process by plain Keras 3: `fit` on a tf.data.Dataset of the files."""

from __future__ import annotations

import keras

from scripts.benchmarks.reference.deepfm_fit import train

if __name__ == "__main__":
    train(keras, keras.optimizers)
