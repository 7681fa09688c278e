"""Each example imports nano_loop only where it accelerates, so its plain loop does not need it."""

import subprocess
import sys

from .running import EXAMPLES, REFUSING, environment

SCRIPTS = {
    "digits.py": "--width 8 --epochs 1",
    "char_gpt.py": "--layers 1 --heads 2 --width 32 --context 32 --batch-size 4 --steps 2",
    "load_forecast.py": "--epochs 1 --width 16",
    "tabular_transformer.py": "--epochs 1 --width 32",
    "cartpole_ppo.py": "--updates 1 --carts 16 --width 32",
}
ALL = """
for name, arguments in SCRIPTS.items():
    sys.argv = [f"{FOLDER}/{name}", *arguments.split()]
    sys.path[0] = FOLDER
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except ModuleNotFoundError as error:
        print(f"{name}: {error}", file=sys.stderr)
"""


def test_accelerated_runs_with_nano_loop_alone(tmp_path):
    program = f"{REFUSING}\nSCRIPTS, FOLDER = {SCRIPTS}, {str(EXAMPLES)!r}\n{ALL}"
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment(), cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    found = [line for line in done.stderr.splitlines() if "nano_loop was imported" in line]
    assert found == [f"{name}: nano_loop was imported" for name in SCRIPTS]
