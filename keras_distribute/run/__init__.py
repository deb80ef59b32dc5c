"""`Strategy.run`: from a function of one replica to a compiled program over all."""
