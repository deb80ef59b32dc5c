"""Who trains together: one file for each place that says so."""
