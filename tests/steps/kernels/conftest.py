"""Fixtures that these tests share with those of the kernels."""

from kernels.conftest import called, filled  # noqa: F401
