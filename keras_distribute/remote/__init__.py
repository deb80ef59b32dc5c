"""Messages with arrays between the tasks of a cluster; knows bytes, not meanings."""
