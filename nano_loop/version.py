"""The version of the package. setuptools reads it without importing anything."""

__version__ = "0.1.0"
