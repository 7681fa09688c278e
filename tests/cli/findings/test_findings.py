"""A machine without faults has no findings, and those that hurt come first."""

from nano_loop.cli.findings import FINDINGS


def test_clean_machine_has_no_findings(found):
    assert found() == []


def test_whole_machine_by_its_affinity_mask_is_clean(found):
    assert found(affinity=frozenset(range(32))) == []


def test_what_hurts_comes_first(found):
    several = found(environ={"MALLOC_ARENA_MAX": "1", "MKL_VERBOSE": "1"}, packages={})
    assert [finding.hurts for finding in several] == [True, True, False]


def test_every_function_of_a_module_is_listed():
    names = {(each.__module__, each.__name__) for each in FINDINGS}
    modules = {each.__module__: each.__globals__ for each in FINDINGS}
    for module, found in modules.items():
        public = {
            name
            for name, each in found.items()
            if callable(each) and getattr(each, "__module__", "") == module and not name.startswith("_")
        }
        listed = {name for of, name in names if of == module}
        assert {name for name in public if "Iterator[Finding]" in str(found[name].__annotations__)} == listed
