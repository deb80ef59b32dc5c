"""The dry run: what a training step would take on hardware that need not be there."""

from keras_distribute.dry_run.api import dry_run as dry_run
from keras_distribute.dry_run.comparing import DryRunComparison as DryRunComparison
from keras_distribute.dry_run.comparing import compare_dry_runs as compare_dry_runs
from keras_distribute.dry_run.report import DryRunReport as DryRunReport
