"""What a strategy and the variables on it look like: numbers, and how they are shown."""

from keras_distribute.summary.report import StrategySummary as StrategySummary
