"""Starts the processes of a job: from the command line, a notebook, or a test."""
