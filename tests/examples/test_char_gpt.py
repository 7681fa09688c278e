import pytest

from .running import kill_when_it_has_saved, results, run

SHAPE = ("--layers", 1, "--heads", 2, "--width", 32, "--context", 32)
TINY = (*SHAPE, "--batch-size", 4, "--warmup", 5, "--sample", 20)
LONG = (*TINY, "--dropout", 0.1, "--steps", 300, "--eval-every", 20)


@pytest.mark.slow
def test_plain_learns_where_there_is_no_nano_loop_and_fp32_trains_as_it_does(tmp_path):
    plain = results("char_gpt.py", "--plain", *LONG, folder=tmp_path, nano_loop=False)
    accelerated = results("char_gpt.py", "--precision", 32, *LONG, folder=tmp_path)
    assert plain["loss"] < 3.2  # starting from ln(128) = 4.85
    assert accelerated["loss"] == pytest.approx(plain["loss"], rel=1e-4)
    assert "\ndef " in "\n" + accelerated["stdout"]  # the generated text
    assert "fused_optimizer" in accelerated["stderr"]


@pytest.mark.slow
def test_a_run_of_other_settings_is_not_resumed(tmp_path):
    checkpoint = tmp_path / "gpt.pt"
    kill_when_it_has_saved(checkpoint, "char_gpt.py", "--plain", *LONG)
    process = run("char_gpt.py", "--plain", *LONG, "--lr", 0.5, "--checkpoint", checkpoint, "--resume")
    assert process.returncode == 2
    assert "--lr 0.002" in process.stderr


def test_resume_without_a_checkpoint_is_refused(tmp_path):
    missing = tmp_path / "missing.pt"
    process = run("char_gpt.py", "--plain", "--checkpoint", missing, "--resume")
    assert process.returncode == 2
    assert str(missing) in process.stderr
