"""The one place that says which version this is; setuptools reads it without importing anything."""

__version__ = "0.1.0"
