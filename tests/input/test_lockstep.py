"""A dataset that several processes read in lockstep; the others say what this one does."""

import numpy as np
import pytest

import keras_distribute as kd
from keras_distribute.cluster import agreement
from keras_distribute.input.kinds import source_of
from keras_distribute.input.lockstep import agreed
from keras_distribute.input.shares import Layout, RoundLayout, SplitLayout


@pytest.mark.parametrize("kind", ["each batch is split", "each batch is one replica's"])
def test_the_layout_of_several_processes_divides_as_that_of_one(monkeypatch, kind):
    monkeypatch.setattr(agreement, "exchange", lambda _, own, count: [own] * count)
    source = source_of(kd.ArrayDataset({"x": np.arange(12.0)}, batch_size=6))
    alone = RoundLayout([source], 2)
    if kind == "each batch is split":
        alone = SplitLayout(source, 2, (0, 2))
    layout = agreed(alone, 2)
    names = {name for name in vars(Layout) if not name.startswith("_")}
    assert names == {name for name in names if hasattr(layout, name)}
    batch = layout.peek()
    found = [
        (
            each.sample(batch)["x"].tolist(),
            each.grouped(batch, lambda _, parts: [list(part) for part in parts]),
            each.whole(batch)["x"].tolist(),
        )
        for each in (alone, layout)
    ]
    assert found[0] == found[1]
