"""Fails if a test ran in none of the environments, because each one skipped it or did not have it.

Tests that this processor cannot run are counted by their reasons, and are not failures.

    python .ci/check_no_test_skipped.py default.xml ipex.xml

Each argument is the JUnit XML file that pytest wrote in one environment (`--junitxml`).
"""

import re
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter

#: The prefix of skip reasons that refer to this processor.
OF_THE_PROCESSOR = re.compile("(the|this) CPU has |torch cannot .* on this CPU$")


def outcomes(file):
    """Return the names of the tests that ran, and the reasons of the skipped ones by name."""
    ran, skipped = set(), {}
    for case in ElementTree.parse(file).iter("testcase"):
        reasons = {each.get("type"): each.get("message") or "" for each in case.findall("skipped")}
        # An expected failure counts as run. A file that skips itself entirely has no class, and only its own name.
        name = f"{case.get('classname')}::{case.get('name')}"
        if "pytest.skip" in reasons:
            skipped[name] = reasons["pytest.skip"]
        else:
            ran.add(name)
    return ran, skipped


def never_run(files):
    """Return the tests that are skipped in one of the files and run in none, by name, with all their reasons."""
    found = [outcomes(file) for file in files]
    ran = set().union(*(ran for ran, _ in found))
    names = sorted(set().union(*(skipped for _, skipped in found)) - ran)
    return {name: {skipped[name] for _, skipped in found if name in skipped} for name in names}


def main(files):
    """Print the tests that never ran, and return the exit status."""
    if not files:
        print("name the JUnit XML files of all environments", file=sys.stderr)
        return 2
    missed, impossible = [], Counter()
    for name, reasons in never_run(files).items():
        of_processor = [reason for reason in reasons if OF_THE_PROCESSOR.match(reason)]
        impossible.update(of_processor[:1])
        missed += [name] * (not of_processor)
    for reason, count in impossible.items():
        print(f"{count} tests did not run: {reason}")
    for name in missed:
        print(f"skipped in every environment: {name}", file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
