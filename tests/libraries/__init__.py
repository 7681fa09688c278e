"""Runs programs of libraries in the environments that have them: `make test-libraries`."""
