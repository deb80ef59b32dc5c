"""JPEG files in folders of classes, and pipelines that read them: tf.data, Grain and
torch's `DataLoader` with workers.

Each pipeline shuffles, decodes, cuts a random part out, flips half of them, and resizes
to batches of float32. Grain and torch decode with Pillow, tf.data by itself. Nothing
here imports JAX or Keras: torch's workers import this module.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

FILES, CLASSES, SIDE = 512, 4, 192  # The files; a side of each, in pixels.
PART, SIZE, BATCH_SIZE = 160, 64, 32  # A side of what is cut out; of what is trained.
WORKERS = 2
STEPS = FILES // BATCH_SIZE
PIPELINES = {
    "tf_data": "tf.data",
    "grain": f"Grain, {WORKERS} threads",
    "torch": f"torch's `DataLoader`, {WORKERS} workers",
}


def make_files(folder: Path) -> None:
    """Writes the files: parts of scikit-learn's photographs, all of them different."""
    import numpy as np
    from PIL import Image
    from sklearn.datasets import load_sample_images

    photographs = load_sample_images().images
    rng = np.random.default_rng(0)
    for number in range(FILES):
        photograph = photographs[number % len(photographs)]
        top, left = (int(rng.integers(0, n - SIDE)) for n in photograph.shape[:2])
        part = photograph[top : top + SIDE, left : left + SIDE]
        turned = np.rot90(part, number // len(photographs) % 4)
        own = folder / f"class_{number % CLASSES}"
        own.mkdir(exist_ok=True)
        Image.fromarray(turned).save(own / f"{number:04}.jpg", quality=90)


def listed(folder: Path) -> list[tuple[str, int]]:
    """The path and the class of each file."""
    paths = sorted(folder.glob("class_*/*.jpg"))
    return [(str(path), int(path.parent.name.removeprefix("class_"))) for path in paths]


def pipeline_of(name: str, folder: Path) -> Iterable[Any]:
    """A pipeline of batches; each pass over it reads all files."""
    pipelines = {"tf_data": _tf_data, "grain": _grain, "torch": _torch}
    return pipelines[name](listed(folder))


def _tf_data(files: list[tuple[str, int]]) -> Any:
    import tensorflow as tf

    def read(path: Any, label: Any) -> Any:
        image = tf.io.decode_jpeg(tf.io.read_file(path), channels=3)
        image = tf.image.random_crop(image, (PART, PART, 3))
        image = tf.image.random_flip_left_right(image)
        return tf.image.resize(image, (SIZE, SIZE)) / 255.0, label

    paths, labels = zip(*files, strict=True)
    dataset = tf.data.Dataset.from_tensor_slices((list(paths), list(labels)))
    dataset = dataset.shuffle(FILES, seed=0).map(read, tf.data.AUTOTUNE)
    return dataset.batch(BATCH_SIZE, drop_remainder=True).prefetch(tf.data.AUTOTUNE)


def _decoded(path: str, rng: Any) -> Any:
    """One image, by Pillow."""
    import numpy as np
    from PIL import Image

    left, top = (int(n) for n in rng.integers(0, SIDE - PART, 2))
    box = (left, top, left + PART, top + PART)
    with Image.open(path) as file:
        image = file.resize((SIZE, SIZE), Image.Resampling.BILINEAR, box)
    pixels = np.asarray(image, np.float32) / 255.0
    return np.ascontiguousarray(pixels[:, ::-1]) if rng.random() < 0.5 else pixels


def _read(item: tuple[str, int], rng: Any) -> Any:
    path, label = item
    return _decoded(path, rng), label


def _grain(files: list[tuple[str, int]]) -> Any:
    import grain

    dataset = grain.MapDataset.source(files).seed(0).shuffle().random_map(_read)
    dataset = dataset.batch(BATCH_SIZE, drop_remainder=True)
    return dataset.to_iter_dataset(grain.ReadOptions(num_threads=WORKERS))


class _Files:
    """The files as torch numbers them."""

    def __init__(self, files: list[tuple[str, int]]) -> None:
        self._files = files

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> Any:
        return _read(self._files[index], _worker_rng())


@functools.cache
def _worker_rng() -> Any:
    import numpy as np
    import torch

    return np.random.default_rng(torch.initial_seed())  # Another one in each worker.


def _torch(files: list[tuple[str, int]]) -> Any:
    from torch.utils.data import DataLoader

    dataset: Any = _Files(files)
    # A copy of a process with XLA's threads may hang, so workers are started anew.
    return DataLoader(
        dataset,
        BATCH_SIZE,
        shuffle=True,
        drop_last=True,
        num_workers=WORKERS,
        persistent_workers=True,
        multiprocessing_context="forkserver",
    )
