"""Plain loops for every equation; independent of the package under test."""
