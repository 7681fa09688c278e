"""In which dtypes a model computes."""
