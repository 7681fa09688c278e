"""The command line: `nano-loop`, or `python -m nano_loop`. Each command has a module."""
