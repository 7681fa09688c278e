"""CI's check that every test runs in at least one environment."""

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / ".ci/check_no_test_skipped.py"

#: What is in a test's element, by its outcome.
OUTCOMES = {
    "run": "",
    "failed": "<failure/>",
    "skipped": "<skipped type='pytest.skip'/>",
    "impossible": "<skipped type='pytest.skip' message='the CPU has no arms'/>",
    "expected": "<skipped type='pytest.xfail'/>",
}
MAIN = runpy.run_path(str(SCRIPT))["main"]


@pytest.fixture
def check(tmp_path, capsys):
    """Run the script on one file per environment, given as outcomes by test; return its status and its output."""

    def run(*environments):
        files = [tmp_path / f"{number}.xml" for number in range(len(environments))]
        for file, cases in zip(files, environments, strict=True):
            text = "".join(
                f"<testcase classname='t' name='{name}'>{OUTCOMES[cases[name]]}</testcase>" for name in cases
            )
            file.write_text(f"<testsuites><testsuite>{text}</testsuite></testsuites>")
        return MAIN(files), *capsys.readouterr()

    return run


SKIPPED = "skipped in every environment: t::a\n"


@pytest.mark.parametrize(
    ("environments", "status", "out", "err"),
    [
        *(
            ([*({"a": outcome} for outcome in outcomes.split()), {}], 0, "", "")
            for outcomes in ("run", "run run", "skipped run", "run skipped", "skipped failed", "expected skipped")
        ),
        *(([*each, {"b": "run"}], 1, "", SKIPPED) for each in ([{"a": "skipped"}], [{"a": "skipped"}] * 2)),
        ([{"a": "skipped", "b": "run"}], 1, "", SKIPPED),
        (
            [{"a": "impossible", "b": "impossible", "c": "run"}, {"a": "skipped"}],
            *(0, "2 tests did not run: the CPU has no arms\n", ""),
        ),
        ([{"a": "skipped", "b": "impossible"}], 1, "1 tests did not run: the CPU has no arms\n", SKIPPED),
    ],
)
def test_what_is_skipped_everywhere_is_named_and_what_the_processor_cannot_run_is_counted(
    check, environments, status, out, err
):
    assert check(*environments) == (status, out, err)


def test_no_file_is_an_error(check):
    assert check()[0] == 2


@pytest.mark.slow
def test_pytest_writes_what_is_read(tmp_path):
    test = tmp_path / "test_one.py"
    skipped, expected = "@pytest.mark.skip\ndef test_a(): pass\n", "@pytest.mark.xfail\ndef test_b(): assert 0\n"
    test.write_text(f"import pytest\n{skipped}{expected}")
    file = tmp_path / "results.xml"
    pytest_run = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", test, f"--junitxml={file}"]
    subprocess.run(pytest_run, check=True, capture_output=True, cwd=tmp_path)
    done = subprocess.run([sys.executable, SCRIPT, file], capture_output=True, text=True)
    assert done.stderr == "skipped in every environment: test_one::test_a\n"
