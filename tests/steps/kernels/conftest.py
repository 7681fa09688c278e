"""What the tests of these steps share with those of the kernels."""

from kernels.conftest import called, filled  # noqa: F401
