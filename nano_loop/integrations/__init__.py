"""Foreign libraries, one folder each."""
