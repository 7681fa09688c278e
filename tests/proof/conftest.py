import importlib.util

#: If the sources are not installed, as in the default environment, only the page is tested.
collect_ignore = [] if importlib.util.find_spec("expecttest") else ["test_sources.py"]
