"""Invalid options are reported together, the environment overrides the code, and nothing but our error is raised."""

import warnings
from decimal import Decimal
from fractions import Fraction
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from option_values import ALLOWED, REFUSED, SPELLINGS, TEXTS, Colour

import nano_loop
from nano_loop import NanoConfigError, NanoError, NanoWarning, TorchNano, accelerated, nano
from nano_loop.config.declarations import CHECKS, EXACT, OPTIONS
from nano_loop.config.environment import kernels_choice, variable_of
from nano_loop.config.leftovers import REMOVED
from nano_loop.config.options import Options
from nano_loop.errors import shown

HUGE = 10**5000  # Python refuses to print it
BAD = [(name, value) for name, check in CHECKS.items() for value in REFUSED[check]]
OTHERS_NAMES = {"use_amp": "precision", "num_workers": "num_workers in each DataLoader", "nprocs": "num_processes"}
AUTO = {"num_processes": "auto", "split_batches": True}
TYPOS = "precison=precision num_process=num_processes channel_last=channels_last fused_optimiser=fused_optimizer"
TYPOS += " use_ipx=use_ipex Verbose=verbose fast_fetching=fast_fetch"
LISTED = "help(nano_loop.nano) lists the options"
KERNELS = "v3, v4, bf16, neon, sve, compile, off"
ADVICE = ("Omit it", "Pass ", "Write ", "Make ", "Take ")


def refusal(call, **arguments):
    with pytest.raises(NanoConfigError) as caught:
        call(**arguments)
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, NanoError)
    return str(caught.value)


def assert_has_three_parts(line, name, value):
    """Check that a line has the format ``name=value: what is allowed. What to do.``."""
    start = f"{name}={value!r}: " if len(repr(value)) <= 80 else f"{shown(name, value)}: "
    assert line.startswith(start)
    assert line.endswith(".")
    allowed, _, advice = line.removeprefix(start).removesuffix(".").rpartition(". ")
    assert [word for word in ALLOWED[CHECKS[name]] if word not in allowed] == []
    assert allowed[0].islower()
    assert advice.startswith(ADVICE)
    assert not allowed.endswith(".")
    assert not advice.endswith(".")


# --- bad arguments ---


def named(value):
    """Return the same name in every process, without an address: pytest's workers have to agree on test names."""
    return repr(value).partition(" at 0x")[0][:40]


@pytest.mark.parametrize(("name", "value"), BAD, ids=named)
def test_bad_argument_is_named_with_its_value_and_what_to_do(name, value):
    assert_has_three_parts(refusal(TorchNano, **{name: value}), name, value)


#: Arguments, variables without their prefix, and checks of the error: words of it, ``^`` its beginning, ``$`` its end,
#: ``=`` all of it, ``!`` words it must not contain, ``#`` its number of lines.
REFUSALS = [
    # arguments are reported together
    (
        {"num_processes": -2, "precision": "fp8", "timeout": "soon", "verbose": 3, "channels_last": True},
        {},
        ["#4", "^num_processes=-2: ", "precision='fp8': ", "timeout='soon': ", "verbose=3: "],
    ),
    *(
        ({"precision": "fp8", "chanels_last": True}, {"VERBOSITY": "1"}, [each])
        for each in ("precision='fp8'", "chanels_last=True", "NANO_LOOP_VERBOSITY=1")
    ),
    ({"precision": 32}, {"PRECISION": "fp8"}, ["^NANO_LOOP_PRECISION=fp8: "]),
    (
        {"num_processes": "two", "cpu_for_each_process": [[0], [1]]},
        {},
        ["num_processes='two'", "!cpu_for_each_process"],
    ),
    (
        {"precision": "bf16", "bf16_ops": ["softmax", "layer_norm"], "fp32_ops": ["softmax"]},
        {},
        ["bf16_ops", "fp32_ops", "softmax", "!layer_norm"],
    ),
    ({"compile": {"mode": "max-autotune", "no_such_argument": 1}}, {}, ["compile=", "no_such_argument"]),
    # names that others use, typing errors, and names with no close match
    *(({name: True}, {}, [f"$Write {option}."]) for name, option in OTHERS_NAMES.items()),
    *(
        ({typo: 1}, {}, [f"^{typo}=1: ", f"$Write {meant}."])
        for typo, meant in (each.split("=") for each in TYPOS.split())
    ),
    *(
        ({}, {typo: "bf16"}, [f"^NANO_LOOP_{typo}=bf16: ", f"$Write NANO_LOOP_{meant}."])
        for typo, meant in (("PRECISON", "PRECISION"), ("VERBOS", "VERBOSE"))
    ),
    *(
        ({name: "cpu"}, {}, [f"={name}='cpu': there is no such option. Omit it: {LISTED}."])
        for name in ("gpus", "device", "fast_softmax", "fast_adam")
    ),
    ({"workers": 4}, {}, ["$Write num_workers in each DataLoader."]),
    ({"fast_conv": True}, {}, ["$Write fast_convolution."]),
    # strings from the program, whose control characters must have no effect
    *(
        (
            {name: ["softmax"]},
            {},
            [f"^{name}=['softmax'] with precision=32: ", '$Pass precision="bf16", or omit it.'],
        )
        for name in ("bf16_ops", "fp32_ops")
    ),
    ({"fp32_ops": "safe", "precision": "auto"}, {}, ["^fp32_ops='safe' with precision='auto': "]),
    ({"distributed_backend": "ray"}, {}, ["^distributed_backend='ray' with num_processes=None: it is only for"]),
    ({"process_group_backend": "gloo", "num_processes": 1}, {}, ["^process_group_backend='gloo' with num_processes=1"]),
    ({"image_cache": "1 GB", "fast_images": False}, {}, ["^image_cache='1 GB' with fast_images=False: "]),
    ({"exact_images": False, "fast_images": False}, {}, ["^exact_images=False with fast_images=False: "]),
    ({"num_threads": 9999}, {}, ["^num_threads=9999: this host has fewer CPUs"]),
    *(({name: 1}, {}, [f"{name}=1: "]) for name in ("as_written", "from_environment")),
    ({"from_environment": ("x",)}, {}, ["from_environment=('x',)"]),
    ({"devices": 4}, {}, ["=devices=4: num_processes counts the processes. Write num_processes instead."]),
    # values that others use
    ({"process_group_backend": "ccl"}, {}, ["^process_group_backend='ccl': ", "oneCCL", "retired", "$gloo."]),
    *(
        ({"precision": each}, {}, [f'=precision=\'{each}\': it is only for GPUs. Pass "bf16" or "bf16-true".'])
        for each in ("transformer-engine", "transformer-engine-float16", "16-true")
    ),
    *(
        (
            {"precision": "fp8"},
            {"KERNELS": each},
            ["#2", "fp8", f"NANO_LOOP_KERNELS={each}: it is one of {KERNELS}. Correct it, or unset NANO_LOOP_KERNELS"],
        )
        for each in ("avx2", "native", "v3,v4", "True")
    ),
    # contradictions name the variable that they come from
    ({"fp32_ops": ["mul"]}, {"BF16_OPS": "exp,mul"}, ["mul in both NANO_LOOP_BF16_OPS and fp32_ops"]),
    ({"bf16_ops": ["mul"]}, {"FP32_OPS": "exp,mul"}, ["mul in both bf16_ops and NANO_LOOP_FP32_OPS"]),
    ({"num_processes": 3}, {"CPU_FOR_EACH_PROCESS": "[[0], [1]]"}, ["NANO_LOOP_CPU_FOR_EACH_PROCESS has 2 lists"]),
    ({"cpu_for_each_process": [[0]]}, {"NUM_PROCESSES": "3"}, ["and NANO_LOOP_NUM_PROCESSES=3. Make the two agree"]),
    ({"num_processes": "auto"}, {}, ["^num_processes='auto': a measured number", "$=True too, or a number."]),
    ({}, {"NUM_PROCESSES": "auto"}, ["^NANO_LOOP_NUM_PROCESSES='auto': a measured number"]),
    ({**AUTO, "cpu_for_each_process": [[0]]}, {}, ["cpu_for_each_process has 1 lists", "and num_processes='auto'"]),
    ({"compile": True}, {"BF16_OPS": "exp"}, ["NANO_LOOP_BF16_OPS with compile"]),
    ({"bf16_ops": ["exp"]}, {"COMPILE": "on"}, ["bf16_ops with NANO_LOOP_COMPILE"]),
    ({"fast_norm": True}, {"EXACT": "1"}, ["fast_norm=True with NANO_LOOP_EXACT=1: it changes bits"]),
    ({"exact": True}, {"PRECISION": "auto"}, ["NANO_LOOP_PRECISION=auto with exact=True: it changes bits"]),
]


@pytest.mark.parametrize(
    ("arguments", "environ"),
    [
        ({"bf16_ops": ["softmax"], "precision": "bf16"}, {}),
        ({"bf16_ops": ["softmax"]}, {"PRECISION": "bf16"}),
        ({"bf16_ops": ["softmax"], "precision": "bf16"}, {"PRECISION": "32"}),
        ({}, {"BF16_OPS": "softmax"}),
        ({}, {"NUM_THREADS": "9999"}),
        ({"num_processes": 2, "process_group_backend": "gloo"}, {"NUM_PROCESSES": "1"}),
        ({"num_threads": 9999, "num_processes": 2, "distributed_backend": "ray"}, {}),
        ({**AUTO, "distributed_backend": "spawn", "process_group_backend": "gloo"}, {}),
        ({"num_processes": 1, "auto_lr": False, "timeout": 5, "compare_parameters": False, "worker_init": print}, {}),
    ],
    ids=str,
)
def test_option_that_acts_or_that_the_environment_has_made_idle_is_taken(monkeypatch, arguments, environ):
    for name, value in environ.items():
        monkeypatch.setenv(f"NANO_LOOP_{name}", value)
    nano(**arguments)


def test_backend_is_taken_where_torchrun_has_started_a_single_process(monkeypatch):
    for name, value in {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "TORCHELASTIC_RUN_ID": "a"}.items():
        monkeypatch.setenv(name, str(value))
    nano(process_group_backend="gloo")


def test_refusal_says_what_was_given_and_what_to_write():
    assert {name: told for name, told in ((str(row[:2]), untold(*row)) for row in REFUSALS) if told} == {}


def untold(arguments, environ, words):
    """Return the expected words that the error lacks, and the forbidden ones that it contains."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environ.items():
            patch.setenv(f"NANO_LOOP_{name}", value)
        message = refusal(TorchNano, **arguments)
    says = {
        "^": message.startswith,
        "$": message.endswith,
        "=": message.__eq__,
        "!": lambda word: word not in message,
        "#": lambda lines: len(message.splitlines()) == int(lines),
    }
    missing = [word for word in words if not says.get(word[0], message.__contains__)(word.lstrip("^$=!#"))]
    return missing and [*missing, message]


LONG = {
    "precision": "x" * 10**6,
    "verbose": [*range(10**6)],
    "NANO_LOOP_PRECISION": "x" * 10**5,
    "NANO_LOOP_NUM_PROCESSES": "9" * 10**5,
    "NANO_LOOP_BF16_OPS": ",".join(["exp"] * 10**4 + ["x" * 10**5]),
    "NANO_LOOP_FP32_OPS": "/" + "x" * 10**5,
    "NANO_LOOP_" + "X" * 10**5: "1",
}


ACTING = "\x1b[31mred\nnano-loop: all is well\r\x9b2J\u202e\udcff"  # would affect a terminal or the reader


@pytest.mark.parametrize("arguments", [{"precision": ACTING}, {ACTING: 1}, {"bf16_ops": [ACTING]}], ids=str)
def test_message_has_no_character_that_acts(arguments):
    environ = {f"NANO_LOOP_{name.upper()}": str(value) for name, value in arguments.items()}
    for message in (refusal(TorchNano, **arguments), refusal(partial(Options.from_call, {}), environ=environ)):
        assert message.isprintable()
        assert "\\x1b[31mred" in message.lower()


@pytest.mark.parametrize(("variable", "value"), LONG.items(), ids=[name[:20] for name in LONG])
def test_message_stays_short_for_a_long_value(variable, value):
    given = [{variable: value}, {}]
    with pytest.raises(NanoConfigError) as raised:
        Options.from_call(*given[:: -1 if variable.startswith("NANO_LOOP_") else 1])
    assert len(str(raised.value)) < 2000
    assert str(raised.value).startswith(variable[:20])


@pytest.mark.parametrize("name", EXACT)
def test_exact_lets_what_changes_bits_have_one_value_and_takes_auto_for_it(name):
    for value, normalized in SPELLINGS[CHECKS[name]]:
        if normalized in ("auto", EXACT[name]):
            assert getattr(Options(exact=True, **{name: value}), name) == EXACT[name]
        else:
            parts = refusal(Options, exact=True, **{name: value}).split(" with exact=True: it changes bits")
            assert parts[0].startswith(f"{name}=")
            assert parts[1].endswith(". Remove one of the two.")


def test_exact_keeps_the_other_options_and_is_kept_by_changes():
    exact, default = Options(exact=True), Options()
    differing = {name for name in OPTIONS if getattr(exact, name) != getattr(default, name)}
    assert {"exact", "fused_optimizer", "fast_norm", "tune_operators"} <= differing <= {"exact", *EXACT}
    assert exact.changed({"num_threads": 1}).fused_optimizer is False
    with pytest.raises(NanoConfigError, match=r"precision='bf16' with exact=True"):
        exact.changed({"precision": "bf16"})


# --- arguments of LightningLite, and removed ones ---


LEFTOVERS = {
    "strategy": (["subprocess", None], []),
    "accelerator": (["cpu", "auto", None], ["gpu", "cuda"]),
    "devices": ([1, "1", "auto", None], [4, [0, 1], True]),
    "num_nodes": ([1, None], [2, True]),
    "plugins": ([None, []], ["slurm", [object()]]),
}


@pytest.mark.parametrize("call", [TorchNano, nano])
@pytest.mark.parametrize("name", LEFTOVERS)
def test_what_lightning_lite_also_took_is_tolerated_where_it_asks_for_nothing(call, name):
    tolerated, refused = LEFTOVERS[name]
    for value in tolerated:
        with pytest.warns(NanoWarning, match=rf"{name}={value!r}: .+\. Omit it\.".replace("[", r"\[")) as caught:
            call(**{name: value})
        assert [each.filename for each in caught] == [__file__]
    for value in refused:
        message = refusal(call, **{name: value})
        assert message.startswith(f"{name}=")
        assert "allocator" not in message


def in_a_block(**options):
    with accelerated(torch.nn.Linear(1, 1), verbose=False, **options):
        pass


def installed(**options):
    nano_loop.install(verbose=False, **options)
    nano_loop.uninstall()


@pytest.mark.parametrize("call", [TorchNano, nano, in_a_block, installed])
@pytest.mark.parametrize("name", REMOVED)
def test_removed_option_says_so_and_its_advice_works(call, name, monkeypatch):
    variables = [variable_of(name), variable_of(name).lower()]
    for value in (True, False, "auto"):
        assert_tells_of_removal(refusal(call, **{name: value}), f"{name}={value!r}")
    for variable in variables:
        monkeypatch.setenv(variable, "0")
        assert_tells_of_removal(refusal(call), f"{variable}=0")
        monkeypatch.delenv(variable)
    call()


def assert_tells_of_removal(message, got):
    assert message.startswith(f"{got}: it was removed")
    assert message.endswith(". Omit it.")


# --- any argument at all ---


ODD = [
    *(HUGE, -HUGE, Fraction(HUGE), Fraction(1, HUGE), Decimal("NaN"), Decimal("1e9999")),
    *(np.int64(2), np.uint8(1), np.float32("nan"), np.bool_(True), np.str_("bf16"), np.datetime64("NaT")),
    *(np.array([1, 2]), np.array("auto"), np.array(["ccl", "gloo"]), np.zeros(0)),
    *(torch.ones(2), torch.tensor(1), torch.ones((), device="meta"), torch.bfloat16, torch.device("cpu")),
    *(torch.nn.Linear(1, 1), torch.nn.Linear, Colour.RED, [[HUGE]], [[np.int64(0)]]),
    *({"backend": HUGE}, {"model": 1}, ..., NotImplemented, object(), int, len, max, lambda: None),
    *("backend", "gloo\x00", "\ud800", "İ"),  # the last is longer in lower case
]


def calls_or_refuses(call, arguments):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NanoWarning)
        try:
            call(**arguments)
        except NanoError as error:
            str(error)


def exception_of(call, arguments):
    """Return the exception raised by a call if it is not a `NanoError`, formatted for a person."""
    try:
        calls_or_refuses(call, arguments)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


@pytest.mark.parametrize("name", [*OPTIONS, *LEFTOVERS, *REMOVED, "no_such_option"])
def test_odd_value_meets_no_other_exception(name):
    met = {f"{place}, a {type(value)}": exception_of(nano, {name: value}) for place, value in enumerate(ODD)}
    assert {value: error for value, error in met.items() if error} == {}


ODD_TEXTS = [
    *("", " ", "{[]: 1}", "[1,", "1e999", "-" + "9" * 5000, "(" * 200, "'\\d'", "{1: [None]}", "1 if 1 else 2", "²"),
    *(
        "9" * 400,
        "9" * 400 + " GB",
        "0x" + "f" * 5000,
        "~no_such_user/x",
    ),  # too large for floats, and for a folder's path
]
any_text = st.text() | st.sampled_from(ODD_TEXTS)
any_variable = (st.sampled_from(OPTIONS).map(str.upper) | st.sampled_from(OPTIONS) | st.text()).map(
    "NANO_LOOP_".__add__
)


@given(environ=st.dictionaries(any_variable, any_text, max_size=4))
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::SyntaxWarning")  # Python's own, about odd literals
def test_random_environment_meets_no_other_exception(environ):
    calls_or_refuses(Options.from_call, {"arguments": {}, "environ": environ})


# --- the environment ---

FROM_ENVIRONMENT = [(name, *case) for name, check in CHECKS.items() for case in TEXTS[check]]


@pytest.mark.parametrize(("name", "text", "expected"), FROM_ENVIRONMENT, ids=str)
def test_option_comes_from_the_environment(name, text, expected):
    variable = f"NANO_LOOP_{name.upper()}"
    options = Options.from_call({}, {variable: text})
    assert getattr(options, name) == expected
    assert type(getattr(options, name)) is type(expected)
    assert options.from_environment == (f"{variable}={text}",)


def test_environment_wins_over_the_code(monkeypatch):
    monkeypatch.setenv("NANO_LOOP_PRECISION", "32")
    monkeypatch.setenv("NANO_LOOP_CHANNELS_LAST", "true")
    for precision in ("bf16", "fp8"):  # the code's value may be invalid
        loop = TorchNano(precision=precision, channels_last=False, auto_lr=False)
        assert (loop.dtype, loop.channels_last, loop.auto_lr) == (torch.float32, True, False)


@pytest.mark.parametrize("variable", ["NANO_LOOP_Precision", "NANO_LOOP_precision"])
def test_variable_in_other_letters_is_read_or_told(variable):
    try:
        read = repr(Options.from_call({}, {variable: "bf16"}))
    except NanoConfigError as error:
        read = str(error)
    assert variable in read or "precision='bf16-mixed'" in read


@pytest.mark.parametrize("call", [TorchNano, nano, in_a_block, installed])
def test_secret_of_a_launch_was_removed_and_is_in_no_message(call, monkeypatch):
    monkeypatch.setenv("NANO_LOOP_SECRET", "0123456789abcdef" * 2)
    message = refusal(call)
    assert message.startswith("NANO_LOOP_SECRET=...: it was removed")
    assert "network protects them. Unset it" in message
    assert "0123456789abcdef" not in message


@pytest.mark.parametrize("text", ["v3", "v4", " BF16 ", "compile", "off", ""])
def test_choice_of_kernels_is_no_option(text):
    assert Options.from_call({}, {"NANO_LOOP_KERNELS": text}) == Options()
    assert kernels_choice({"NANO_LOOP_KERNELS": text}) == (text.strip().lower() or None)
    assert kernels_choice({}) is None


# --- records beside the options ---


def test_what_was_typed_is_remembered():
    given = Options.from_call({"precision": "bf16"}, {"NANO_LOOP_TIMEOUT": "30"}).as_written
    assert given["precision"] == "precision='bf16'"
    assert given["timeout"] == "NANO_LOOP_TIMEOUT=30"
    assert given["auto_lr"] == "auto_lr=True"
    assert Options(precision=64).as_written["precision"] == "precision=64"


# --- external launches: tests/distributed/launch_external covers which variables belong to one ---


@pytest.mark.usefixtures("rank_put_back")
def test_launch_from_outside_is_recognised_and_has_to_agree(monkeypatch):
    for name, value in {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_NTASKS": "2"}.items():
        monkeypatch.setenv(name, value)
    for fabric in (TorchNano(), TorchNano(num_processes=2), TorchNano(**AUTO)):
        assert (fabric.world_size, fabric.num_processes, fabric.global_rank) == (2, 2, 1)
    for wrong in (1, 3):
        with pytest.raises(NanoConfigError, match=rf"num_processes={wrong}: .* has started 2 processes\. Omit it"):
            TorchNano(num_processes=wrong)


@pytest.mark.usefixtures("rank_put_back")
def test_k8s_joins_processes_that_are_started_from_outside():
    assert TorchNano(distributed_backend="k8s").num_processes == 1
    with pytest.raises(NanoError, match=r"'k8s', num_processes=2: .*RANK and WORLD_SIZE"):
        TorchNano(distributed_backend="k8s", num_processes=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RANK", "1")
        patch.setenv("WORLD_SIZE", "2")
        assert TorchNano(distributed_backend="k8s", num_processes=2).num_processes == 2
