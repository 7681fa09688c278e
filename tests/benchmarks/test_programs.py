"""Each benchmark runs at a small size as a user would run it, and rejects invalid input in one line."""

import re
import shlex

import pytest
from command_line import OWN, run

TINY = "--layers 1 --heads 2 --width 16 --context 16 --batch-size 4 --accumulate 1 --steps 3 --sample 1"
PLAIN_SECONDS = r"(-?\d|\d\d)\.\d\d"  # of one round, in which a process of the other side may have been disturbed
#: Command lines, their exit codes, and the number of matches per pattern in the output or, after a failure, the error.
PROGRAMS = {
    "attention --rounds 1 --shapes 2,2,32,16,dropout 1,2,64,32": (0, {r"\n": 4, r"\| 2, 2, 32, 16, dropout \|": 1}),
    "attention --shapes 8,12,128": (2, {"8,12,128": ...}),
    "attention --shapes 8,12,128,64,random": (2, {"8,12,128,64,random": ...}),
    "losses --only OWNlinear --small --steps 20": (0, {r"\| OWNlinear \|": ...}),
    "losses --only mlp --small --steps 20": (0, {r"\| mlp \|": ...}),
    "losses --only OWNlinear --system OWNdrifting --steps 5": (
        1,
        {r"\Aoff by more than 1e-05 and than rounding explains: OWNlinear\n\Z": 1},
    ),
    "losses --only OWNlinear --system OWNfailing": (1, {"RuntimeError: this system is broken": ...}),
    "lockstep --only OWNlinear --systems plain,OWNfailing --seconds 1": (1, {"ended": ...}),
    "processes --only start --rounds 1": (
        0,
        {
            rf"start of two processes, over {what}: {PLAIN_SECONDS} s \(median of 1\)": 1
            for what in ("an import", "one process")
        },
    ),
    "processes --only calls --rounds 1 --rows 320 --epochs 2": (
        0,
        {
            "5 folds of 2 epochs over 320 rows, two processes, seconds": ...,
            **{rf"^  {way} .* (?!0+\.0+×)\d+\.\d+× \(": 1 for way in ("one call", "a call a fold", "a call an epoch")},
        },
    ),
    "averaging --rounds 1": (
        0,
        {rf"^  .*{way}.* \d+\.\d\d": 2 for way in ("shared memory", "process group", "gloo all_reduce")},
    ),
    "averaging --ranks 2,3 --rounds 1 --megabytes 8": (
        0,
        {rf"^\| {ranks} \| {name} \| .* \d+\.\d\d \(": 1 for ranks in (2, 3) for name in ("one tensor", "BERT-base")},
    ),
    "averaging --ranks 1": (2, {"'1': two ranks or more average": ...}),
    "scaling --computed OWNconvolution --quick --samples 4": (0, {r"^ +[124]( +\d+\.\d){4}( +\d+\.\d\d){2}$": 3}),
    "scaling --split OWNconvolution --quick --samples 4 --processes 1,2": (
        0,
        {r"^  [12] +[\d.]+ +\d+\.\d\d \(": 2, "best number of processes over one process, geometric mean: ": 1},
    ),
    "scaling": (2, {"give --split or --computed": ...}),
    "lockstep --only OWNlinear --systems plain,OWNsleeping --small --seconds 1 --restarts 1 --busy 1": (
        0,
        {r"^\| OWNlinear \| [\d.]+ \| [5-9]\d\.\d+ \| 0\.": 1},  # 50 ms slower
    ),
    "lockstep --systems plain": (2, {"--systems takes two": ...}),
    "between --only OWNconvolution --small --threads 1 --rows 100": (
        0,
        {r"\| `_log_softmax` \| forward \| 1 \|": 1, "_fused_adamw_": ..., r"^\| OWNconvolution \|": ..., "addmm": 0},
    ),
    "shapes --quick --threads 1 --only 'VAE: Linear'": (0, {r"\| VAE \| Linear\(784, 400\) \| 128 × 784 \|": ...}),
    "least_sizes --rounds 2 --seconds 0.001 --only policy": (0, {r"^\| policy \|": 1}),
    "training --only char_gpt --seeds 1 --modes fp32,bf16-true '--char-gpt=TINY'": (
        0,
        {r"^\| char_gpt \| fp32 \|": 1, r"^\| char_gpt \| bf16-true \|": 1},
    ),
    "processes --rounds 0": (2, {"'0': a whole number, 1 or more": ...}),
    "averaging --rounds 0": (2, {"'0': a whole number, 1 or more": ...}),
    "training --only digits --seeds 1 '--digits=--epochs many'": (1, {"invalid int value: 'many'": ...}),
}


@pytest.mark.parametrize(
    "line",
    [
        pytest.param(each, marks=[pytest.mark.slow] * each.startswith(("averaging --r", "scaling --")))
        for each in PROGRAMS
    ],
)
def test_program_measures_or_says_why_not(line):
    code, patterns = PROGRAMS[line]
    program, *options = shlex.split(line.replace("OWN", OWN).replace("TINY", TINY))
    done = run(f"benchmarks.{program}", *options)
    assert done.returncode == code, done.stderr
    text = done.stderr if code else done.stdout
    found = {each: len(re.findall(each.replace("OWN", OWN), text, re.MULTILINE)) for each in patterns}
    assert {
        each: count
        for each, count in found.items()
        if count != patterns[each] and not (count and patterns[each] is ...)
    } == {}, text
