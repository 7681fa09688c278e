"""The objects of a run that steps use: models, optimizers and loaders, their checks, and the report."""
