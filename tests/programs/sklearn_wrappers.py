"""Keras models as scikit-learn's estimators: in a pipeline, validated, searched."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
from keras import layers

pytest.importorskip("sklearn")


def classifier(X: Any, y: Any, width: int = 6) -> keras.Model:
    """A model for these rows."""
    model = keras.Sequential(
        [keras.Input((X.shape[1],)), layers.Dense(width, activation="tanh")]
    )
    model.add(layers.Dense(y.shape[1], activation="softmax"))
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "categorical_crossentropy")
    return model


def regressor(X: Any, y: Any) -> keras.Model:
    """A model for one number."""
    model = keras.Sequential(
        [
            keras.Input((X.shape[1],)),
            layers.Dense(5, activation="tanh"),
            layers.Dense(1),
        ]
    )
    model.compile(keras.optimizers.SGD(0.05), "mse")
    return model


def program() -> Any:
    from keras.wrappers import SKLearnClassifier, SKLearnRegressor
    from sklearn.model_selection import GridSearchCV, cross_val_score
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    rng = np.random.default_rng(23)
    x = rng.normal(3.0, 2.0, size=(37, 4))
    labels = np.array(["low", "middle", "high"])[np.digitize(x.sum(axis=1), [10, 14])]
    fit = {"epochs": 2, "batch_size": 15, "verbose": 0}

    pipeline = make_pipeline(
        StandardScaler(), SKLearnClassifier(classifier, fit_kwargs=fit)
    )
    pipeline.fit(x, labels)
    scores = cross_val_score(pipeline, x, labels, cv=2)
    estimator = SKLearnClassifier(classifier, model_kwargs={"width": 6}, fit_kwargs=fit)
    search = GridSearchCV(
        estimator, {"model_kwargs": [{"width": 3}, {"width": 7}]}, cv=2
    ).fit(x, labels)
    regression = SKLearnRegressor(regressor, fit_kwargs=fit).fit(x, x.sum(axis=1))
    return {
        "predictions": pipeline.predict(x) == labels,
        "scores": scores,
        "searched": search.cv_results_["mean_test_score"],
        "best": search.best_params_["model_kwargs"]["width"],
        "regression": [regression.predict(x), regression.score(x, x.sum(axis=1))],
        "history": regression.history_,
        "models": [pipeline[-1].model_, regression.model_],
    }
