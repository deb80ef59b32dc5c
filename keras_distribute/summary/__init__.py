"""What a strategy and its variables look like: the numbers, and how they are shown."""

from keras_distribute.summary.report import StrategySummary as StrategySummary
