"""Starts the processes of a job: from the command line, a notebook, or a test."""

from keras_distribute.launch.command import LaunchOptions as LaunchOptions
from keras_distribute.launch.command import launch as launch
