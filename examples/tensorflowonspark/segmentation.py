r"""Segmentation: a small U-Net says of which digit each pixel of two digits side by side is.

    spark-submit --master local-cluster[2,1,1024] examples/tensorflowonspark/segmentation.py \
        --images_labels data/csv

Reads the lines of mnist_data_setup.py. The mask of a picture is made of its digits' labels: class 0
is the paper, class n + 1 the ink of an n.
"""

from __future__ import annotations

import sys

import shared


def pictures(pattern, share=slice(None)):
    """Pairs of digits as images float32 [n, 28, 56, 1] in 0..1 and masks int64 [n, 28, 56]."""
    import numpy as np

    pixels, labels = shared.read_lines(pattern, share)
    pairs = len(labels) // 2
    digits = pixels[: 2 * pairs].reshape(pairs, 2, 28, 28)
    labels = labels[: 2 * pairs].reshape(pairs, 2, 1, 1)
    masks = np.where(digits > 64, labels + 1, 0)
    beside = (0, 2, 1, 3)
    images = digits.transpose(beside).reshape(pairs, 28, 56, 1).astype(np.float32) / 255
    return images, masks.transpose(beside).reshape(pairs, 28, 56)


def build_unet():
    """Down to a quarter and up again, with the finer picture beside the coarser one; compiled."""
    import keras
    from keras import layers

    def convolved(x, filters):
        return layers.Conv2D(filters, 3, padding="same", activation="relu")(x)

    image = keras.Input((28, 56, 1), name="image")
    fine = convolved(image, 16)
    middle = convolved(layers.MaxPooling2D()(fine), 32)
    coarse = convolved(convolved(layers.MaxPooling2D()(middle), 64), 64)
    x = layers.Concatenate()([layers.UpSampling2D()(coarse), middle])
    x = layers.Concatenate()([layers.UpSampling2D()(convolved(x, 32)), fine])
    mask = layers.Conv2D(11, 3, padding="same", activation="softmax", name="mask")(x)
    model = keras.Model(image, mask)
    model.compile(
        keras.optimizers.Adam(3e-3), "sparse_categorical_crossentropy", metrics=["accuracy"]
    )
    return model


def main_fun(args, ctx):
    from tensorflowonspark import compat

    share = slice(ctx.worker_num, None, ctx.num_workers)
    model = build_unet()
    ctx.distribute(model)
    images, masks = pictures(f"{args.images_labels}/train/part-*", share)
    model.fit(images, masks, batch_size=args.batch_size, epochs=args.epochs, verbose=0)
    compat.export_saved_model(model, args.export_dir, ctx.job_name == "chief")
    if not ctx.is_chief:
        return None
    images, masks = pictures(f"{args.images_labels}/test/part-*")
    is_ink = masks > 0
    return float((model.predict(images, verbose=0).argmax(axis=-1) == masks)[is_ink].mean())


def main():
    parser = shared.arguments(__doc__)
    parser.set_defaults(batch_size=32, epochs=4, export_dir="segmentation_export")
    args = parser.parse_args()
    args.export_dir = shared.absolute(args.export_dir)
    from tensorflowonspark import TFCluster

    cluster = TFCluster.run(
        shared.spark_context(),
        main_fun,
        args,
        args.cluster_size,
        args.num_ps,
        tensorboard=args.tensorboard,
        input_mode=TFCluster.InputMode.TENSORFLOW,
        master_node="chief",
    )
    cluster.shutdown()
    print(f"ink of held-out digits that is of the right digit: {cluster.results()[0]:.3f}")


if __name__ == "__main__":
    sys.exit(main())
