r"""A residual network on the digits of a CSV file, with flags that only the workers read.

    spark-submit --master local-cluster[3,1,1024] examples/tensorflowonspark/resnet.py \
        --cluster_size 3 --data_dir data/csv --train_epochs 4 --blocks 2

The driver knows --cluster_size and --num_ps. It hands all other flags to main_fun as a list, which
becomes `sys.argv` there, so a script with a parser of its own runs as it is.
"""

from __future__ import annotations

import argparse
import sys

import shared


def build_resnet(blocks):
    """Two stages of `blocks` residual blocks each, compiled."""
    import keras
    from keras import layers

    def normalized(x, filters, strides=1):
        x = layers.Conv2D(filters, 3, strides=strides, padding="same", use_bias=False)(x)
        return layers.GroupNormalization(8)(x)  # a batch's statistics would be each worker's own

    image = keras.Input((784,), name="image")
    x = layers.Reshape((28, 28, 1))(layers.Rescaling(1 / 255.0)(image))
    x = layers.ReLU()(normalized(x, 16, strides=2))
    for filters in (16, 32):
        for block in range(blocks):
            strides = 2 if filters == 32 and block == 0 else 1
            short = x if strides == 1 else layers.Conv2D(filters, 1, strides=strides)(x)
            x = layers.ReLU()(normalized(x, filters, strides))
            x = layers.ReLU()(layers.Add()([short, normalized(x, filters)]))
    x = layers.GlobalAveragePooling2D()(x)
    model = keras.Model(image, layers.Dense(10, activation="softmax", name="digit")(x))
    model.compile(
        keras.optimizers.Adam(3e-3), "sparse_categorical_crossentropy", metrics=["accuracy"]
    )
    return model


def main_fun(argv, ctx):
    parser = argparse.ArgumentParser()
    parser.add_argument("--data_dir", type=shared.absolute)
    parser.add_argument("--train_epochs", type=int, default=4)
    parser.add_argument("--blocks", type=int, default=1)
    parser.add_argument("--batch_size", type=int, default=64)
    flags = parser.parse_args(argv[1:])
    mine = slice(ctx.worker_num, None, ctx.num_workers)
    images, labels = shared.read_lines(f"{flags.data_dir}/train/part-*", mine)
    model = build_resnet(flags.blocks)
    ctx.distribute(model)
    model.fit(
        images,
        labels,
        batch_size=flags.batch_size,
        epochs=flags.train_epochs,
        verbose=0,
    )
    held_out = shared.read_lines(f"{flags.data_dir}/test/part-*")
    return model.evaluate(*held_out, batch_size=500, verbose=0)[1] if ctx.is_chief else None


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cluster_size", type=int, default=2)
    parser.add_argument("--num_ps", type=int, default=1)
    args, others = parser.parse_known_args()
    from tensorflowonspark import TFCluster

    cluster = TFCluster.run(
        shared.spark_context(),
        main_fun,
        [sys.argv[0], *others],
        args.cluster_size,
        args.num_ps,
        input_mode=TFCluster.InputMode.TENSORFLOW,
        master_node="chief",
    )
    cluster.shutdown()
    print(f"test accuracy: {cluster.results()[0]:.3f}")


if __name__ == "__main__":
    sys.exit(main())
