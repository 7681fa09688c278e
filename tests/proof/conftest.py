import importlib.util

#: Where the sources are not, in the default environment, only what writes the page is tested.
collect_ignore = [] if importlib.util.find_spec("expecttest") else ["test_sources.py"]
