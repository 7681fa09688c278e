"""The objects of a run that steps see: models, optimizers and loaders, their checks, and the report."""
