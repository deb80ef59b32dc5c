"""Object detection: padded boxes, a loss that leaves the padding out, a recall."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from keras import layers, ops

SIZE, CELLS, KINDS, MOST = 12, 3, 2, 3


def data(num_images: int) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Images with up to `MOST` bright boxes, and those; the others are -1."""
    rng = np.random.default_rng(20)
    images = 0.1 * rng.normal(size=(num_images, SIZE, SIZE, 1)).astype("float32")
    boxes = np.full((num_images, MOST, 4), -1.0, "float32")
    kinds = np.full((num_images, MOST), -1, "int32")
    for row in range(num_images):
        for place in range(rng.integers(0, MOST + 1)):
            (x, y), (w, h), kind = (
                rng.integers(0, SIZE - 4, 2),
                rng.integers(2, 5, 2),
                rng.integers(KINDS),
            )
            images[row, y : y + h, x : x + w] += 1 + kind
            boxes[row, place], kinds[row, place] = (x, y, x + w, y + h), kind
    boxes = keras.utils.bounding_boxes.convert_format(boxes, "xyxy", "center_xywh")
    return images, {
        "boxes": np.where(kinds[..., None] < 0, -1.0, boxes).astype("float32"),
        "kinds": kinds,
    }


def assigned(boxes: Any, kinds: Any) -> Any:
    """For each cell the box whose centre it has, its kind, and whether there is one."""
    step = SIZE / CELLS
    places = ops.cast(ops.floor(boxes[..., :2] / step), "int32")
    cells = ops.where(kinds >= 0, places[..., 1] * CELLS + places[..., 0], -1)
    hit = ops.cast(
        cells[:, None, :] == ops.arange(CELLS * CELLS)[None, :, None], "float32"
    )
    hit = hit * ops.cast(ops.cumsum(hit, axis=-1) <= 1, "float32")
    here = ops.sum(hit, axis=-1)
    kind = ops.sum(hit * ops.cast(kinds, "float32")[:, None], axis=-1)
    return ops.matmul(hit, boxes / SIZE), ops.cast(kind, "int32"), here


class DetectionLoss(keras.losses.Loss):
    """Focal for whether there is a box; kind and place of those that there are."""

    def call(self, y_true: Any, y_pred: Any) -> Any:
        boxes, kinds, here = assigned(
            y_true[..., :4], ops.cast(y_true[..., 4], "int32")
        )
        there = keras.losses.binary_focal_crossentropy(
            here[..., None], y_pred[..., :1], from_logits=True
        )
        kind = keras.losses.sparse_categorical_crossentropy(
            kinds, y_pred[..., 1 : 1 + KINDS], from_logits=True
        )
        place = keras.losses.huber(boxes, y_pred[..., 1 + KINDS :], delta=0.1)
        # Over the whole batch, as detectors do.
        count = ops.maximum(ops.sum(here), 1.0)
        return (
            ops.mean(there, axis=-1)
            + ops.sum(here * (kind + place), axis=-1) * ops.shape(here)[0] / count
        )


class Recall(keras.metrics.Metric):
    """How many of the boxes are found with an overlap of at least a tenth."""

    def __init__(self, name: str = "recall") -> None:
        super().__init__(name=name)
        self.found = self.add_weight(name="found", initializer="zeros")
        self.boxes = self.add_weight(name="boxes", initializer="zeros")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        boxes, _, here = assigned(y_true[..., :4], ops.cast(y_true[..., 4], "int32"))
        ours = y_pred[..., 1 + KINDS :]
        low = ops.maximum(
            boxes[..., :2] - boxes[..., 2:] / 2, ours[..., :2] - ours[..., 2:] / 2
        )
        high = ops.minimum(
            boxes[..., :2] + boxes[..., 2:] / 2, ours[..., :2] + ours[..., 2:] / 2
        )
        common = ops.prod(ops.maximum(high - low, 0.0), axis=-1)
        union = (
            ops.prod(boxes[..., 2:], axis=-1)
            + ops.prod(ops.abs(ours[..., 2:]), axis=-1)
            - common
        )
        self.found.assign_add(ops.sum(here * ops.cast(common > 0.1 * union, "float32")))
        self.boxes.assign_add(ops.sum(here))

    def result(self) -> Any:
        return self.found / ops.maximum(self.boxes, 1.0)


def program() -> Any:
    images, targets = data(38)
    y = np.concatenate([targets["boxes"], targets["kinds"][..., None]], axis=-1).astype(
        "float32"
    )

    inputs = keras.Input((SIZE, SIZE, 1))
    x = layers.Conv2D(6, 3, strides=2, padding="same", activation="relu")(inputs)
    x = layers.Conv2D(8, 3, strides=2, padding="same", activation="relu")(x)
    x = layers.Reshape((CELLS * CELLS, 8))(x)
    there_and_kind = layers.Dense(1 + KINDS)(x)
    model = keras.Model(
        inputs,
        layers.Concatenate()(
            [there_and_kind, layers.Dense(4, activation="sigmoid")(x)]
        ),
    )
    model.compile(
        keras.optimizers.SGD(0.1, momentum=0.9, global_clipnorm=1.0),
        DetectionLoss(),
        metrics=[Recall()],
    )
    history = model.fit(images, y, batch_size=14, epochs=2, verbose=0)
    predictions = model.predict(images, batch_size=38, verbose=0)
    overlap = keras.utils.bounding_boxes.compute_iou(
        predictions[:5, :, 1 + KINDS :], targets["boxes"][:5] / SIZE, "center_xywh"
    )
    evaluation = model.evaluate(images, y, batch_size=38, return_dict=True, verbose=0)
    return {
        "history": history,
        "evaluation": evaluation,
        "overlap": overlap,
        "model": model,
    }
