"""A program over all rows, made one of each replica's rows."""
