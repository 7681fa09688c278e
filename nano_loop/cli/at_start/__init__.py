"""The folder that `nano-loop run` puts first in ``PYTHONPATH``, for the start of one Python."""
