"""DeepFM in one process by tf-keras, Keras 2, whose legacy optimizers update rows alone."""

from __future__ import annotations

import tf_keras

from scripts.benchmarks.reference.deepfm_fit import train

if __name__ == "__main__":
    train(tf_keras, tf_keras.optimizers.legacy)
