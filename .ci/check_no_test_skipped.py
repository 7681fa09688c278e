"""Fails when a test was run in none of the environments, because each one skipped it or did not have it.

    python .ci/check_no_test_skipped.py default.xml ipex.xml

Each argument is the JUnit XML file that pytest has written in one environment (`--junitxml`).
"""

import sys
import xml.etree.ElementTree as ElementTree


def outcomes(file):
    """Return two sets of names: of the tests that ran, and of those that were skipped."""
    ran, skipped = set(), set()
    for case in ElementTree.parse(file).iter("testcase"):
        reasons = [each.get("type") for each in case.findall("skipped")]
        # An expected failure has run. A file that skips itself as a whole has no class, and its own name.
        name = f"{case.get('classname')}::{case.get('name')}"
        (skipped if "pytest.skip" in reasons else ran).add(name)
    return ran, skipped


def never_run(files):
    """Return the names of tests that are skipped in one of the files and run in none, sorted."""
    ran, skipped = (set().union(*each) for each in zip(*map(outcomes, files), strict=True))
    return sorted(skipped - ran)


def main(files):
    """Print what was never run, and return the exit status."""
    if not files:
        print("name the JUnit XML files of all environments", file=sys.stderr)
        return 2
    missed = never_run(files)
    for name in missed:
        print(f"skipped in every environment: {name}", file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
