"""Bad input of any command is refused in one line on standard error with exit code 2, before anything is run."""

import os

import pytest

from nano_loop.cli import script
from nano_loop.cli.main import main
from nano_loop.config.environment import EXPORTS

SEVERAL_TIMES = "the script is started several times"
#: Arguments, of which train.py and pipe.py exist, and words of the error.
REFUSED = [
    (["frob"], ["No such command 'frob'"]),
    (["tun"], ["No such command 'tun'. Did you mean 'tune'? See"]),
    (["--frob"], ["No such option"]),
    (["doctor", "--frob"], ["`nano-loop doctor --help`"]),
    (["doctor", "frob"], ["frob"]),
    (["env", "--jemalloc", "--tcmalloc"], ["a process can use only one allocator"]),
    (["env", "--undo", "--jemalloc"], ["--undo restores everything"]),
    (["env", "--shell", "fish"], ["--shell: it was removed: the lines are for POSIX shells. Omit it"]),
    (["run", "no_such_script.py"], ["no_such_script.py: there is no such file. Check the path of the script"]),
    (["run", "-m", "no_such_module.train"], ["-m no_such_module.train: there is no such module. Check its name"]),
    (["run", "-m", ""], ["-m : there is no such module"]),
    (["run", "--precison", "bf16"], ["No such option '--precison'. Did you mean '--precision'? See"]),
    (["run", "--precision", "fp8", "train.py"], ['--precision=fp8: it must be 32, 64, 16, "bf16"']),
    (["run", "--channels-last=maybe", "train.py"], ['=maybe: it must be "auto", True or False. Pass one of']),
    (["run", "--verbose=", "train.py"], ['--verbose=: it must be True, False or "all"']),
    (["run", "--exact=auto", "train.py"], ["--exact=auto: it must be True or False"]),
    (["run", "--no-exact=1", "train.py"], ["No such option '--no-exact'"]),
    (["run", "--channels-last", "auto", "train.py"], ["auto: there is no such file", "with =: --channels-last=auto"]),
    (["run", "--timeout", "9" * 400, "train.py"], ["it must be a positive number of seconds"]),
    (["run", "--image-cache", "9" * 400 + " GB", "train.py"], ['a size such as "8 GB"']),
    (["run", "--precision", "\x1b[31m\nred", "train.py"], ["--precision=\\x1b[31m\\nred: it must"]),
    (["run", "--precision", "x" * 5000, "train.py"], ["xxx...xxx", ": it must be 32"]),
    (["run", "--frob\x1b[31m" + "x" * 5000, "train.py"], ["No such option '--frob\\x1b[31mxxx", "x...x"]),
    (["run", "\x1b[31m\udcff" + "x" * 5000], ["\\x1b[31m\\udcffxxx", "x...x"]),
    (["run", "--precision"], ["--precision", "requires an argument"]),
    (["run"], ["Missing argument 'SCRIPT'"]),
    (["run", "-j", "-t", "train.py"], ["a process can use only one allocator"]),
    (["run", "--exact", "--precision", "bf16", "train.py"], ["--precision=bf16 with --exact=True"]),
    (["profile", "--trace=no/such/trace.json", "train.py"], ["its folder does not exist"]),
    (["tune", "missing.py"], ["missing.py: there is no such file"]),
    (["tune", "-"], [f"tune -: {SEVERAL_TIMES}, and standard input can be read only once"]),
    (["tune", "pipe.py"], [f"tune pipe.py: {SEVERAL_TIMES}"]),
    *((["tune", f"--seconds={seconds}", "train.py"], ["--seconds"]) for seconds in ("nan", "0")),
    (["tune", "--precison=32", "train.py"], ["No such option"]),
    (
        ["tune", "--plot=tune.xyz", "train.py"],
        ["(xyz is not a format that matplotlib supports). Name a file such as tune.png"],
    ),
    (["tune", "--plot=no/such/tune.png", "train.py"], ["(the folder does not exist, or is not writable). Name a file"]),
    (["tune", "--precision=8", "train.py"], ["--precision=8"]),
]


@pytest.fixture
def refusal(tmp_path, monkeypatch, capsys):
    """Return a function that returns the error of a command in a folder with a script and a pipe."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(script.os, "execve", None)
    (tmp_path / "train.py").touch()
    os.mkfifo(tmp_path / "pipe.py")

    def refusal(arguments):
        assert main(arguments) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith("nano-loop: ")
        assert err.count("\n") == 1
        assert err[:-1].isprintable()
        assert len(err) < 1500
        return err

    return refusal


@pytest.mark.parametrize(("arguments", "words"), REFUSED, ids=lambda each: ascii(each)[:60])
def test_bad_input_is_refused_in_one_line(refusal, arguments, words):
    error = refusal(arguments)
    assert [each for each in words if each not in error] == [], error


@pytest.mark.parametrize("arguments", [["env"], ["env", "--undo"]], ids=str)
def test_damaged_record_of_exports_is_refused_in_one_line(refusal, monkeypatch, arguments):
    monkeypatch.setenv(EXPORTS, "nonsense")
    assert refusal(arguments).startswith(f"nano-loop: {EXPORTS} is damaged: ")
