"""Removed names do not exist, and their errors suggest a replacement."""

import importlib

import pytest

from nano_loop.config.leftovers import REMOVED_OTHERS

# Names of Lightning's modules are tested where Lightning is imported.
NAMES = [name for name in REMOVED_OTHERS if name.startswith("nano_loop.") and "lightning" not in name]


@pytest.mark.parametrize("path", NAMES)
def test_removed_name_says_so_where_it_was(path):
    home, _, name = path.rpartition(".")
    module = importlib.import_module(home)
    with pytest.raises(AttributeError, match=rf"^module '{home}' has no attribute '{name}': .*was removed.*\. \w.*\.$"):
        getattr(module, name)
    assert not hasattr(module, name)
    assert name not in module.__all__
    with pytest.raises(AttributeError, match=rf"^module '{home}' has no attribute 'no_such_name'$"):
        _ = module.no_such_name
