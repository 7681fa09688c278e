import shutil

import pytest

from .running import kill_when_it_has_saved, results, run

SHAPE = ("--layers", 1, "--heads", 2, "--width", 32, "--context", 32)
TINY = (*SHAPE, "--batch-size", 4, "--warmup", 5, "--sample", 20)
STEPS = 300
# With dropout, the loss depends on torch's random numbers, so a resumed run must draw the same ones.
LONG = (*TINY, "--dropout", 0.1, "--steps", STEPS, "--eval-every", 20)
MODES = {"plain": ["--plain"], "accelerated": ["--precision", 32]}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """The results of a full run in each mode; the plain one runs without nano_loop."""
    return {
        mode: results(
            "char_gpt.py", *options, *LONG, folder=tmp_path_factory.mktemp(mode), nano_loop=mode == "accelerated"
        )
        for mode, options in MODES.items()
    }


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """The checkpoints of runs killed soon after their first checkpoint, in each mode."""
    folder = tmp_path_factory.mktemp("killed")
    files = {mode: folder / f"{mode}.pt" for mode in MODES}
    for mode, options in MODES.items():
        kill_when_it_has_saved(files[mode], "char_gpt.py", *options, *LONG)
    return files


def resume(checkpoint, mode, folder):
    own_copy = shutil.copy(checkpoint, folder / "gpt.pt")
    return results("char_gpt.py", *MODES[mode], *LONG, "--checkpoint", own_copy, "--resume", folder=folder)


@pytest.mark.slow
def test_plain_learns_where_there_is_no_nano_loop_and_fp32_trains_as_it_does(uninterrupted):
    plain, accelerated = uninterrupted["plain"], uninterrupted["accelerated"]
    assert plain["loss"] < 3.2  # starting from ln(128) = 4.85
    assert accelerated["loss"] == pytest.approx(plain["loss"], rel=1e-4)
    assert "\ndef " in "\n" + accelerated["stdout"]  # the generated text
    assert "fused_optimizer" in accelerated["stderr"]


@pytest.mark.slow  # it starts the example six times; tests/loops/test_checkpoints.py covers small loops
@pytest.mark.parametrize("resumed_by", MODES)
@pytest.mark.parametrize("saved_by", MODES)
def test_a_killed_run_that_either_resumes_ends_as_an_uninterrupted_one(
    saved_by, resumed_by, uninterrupted, checkpoints, tmp_path
):
    resumed = resume(checkpoints[saved_by], resumed_by, tmp_path)
    assert 0 < resumed["first_step"] < STEPS
    accuracy = 1e-6 if saved_by == resumed_by else 1e-4
    assert resumed["loss"] == pytest.approx(uninterrupted[saved_by]["loss"], rel=accuracy)


@pytest.mark.slow  # it needs the checkpoints of the slow tests
def test_a_run_of_other_settings_is_not_resumed(checkpoints):
    process = run("char_gpt.py", "--plain", *LONG, "--lr", 0.5, "--checkpoint", checkpoints["plain"], "--resume")
    assert process.returncode == 2
    assert "--lr 0.002" in process.stderr


def test_resume_without_a_checkpoint_is_refused(tmp_path):
    missing = tmp_path / "missing.pt"
    process = run("char_gpt.py", "--plain", "--checkpoint", missing, "--resume")
    assert process.returncode == 2
    assert str(missing) in process.stderr
