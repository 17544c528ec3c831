from importlib.metadata import version

import pytest
from typer.testing import CliRunner

from maskwise.cli import app as commands
from maskwise.cli.app import app


@pytest.fixture
def invoke():
    return lambda *arguments: CliRunner().invoke(app, list(arguments))


def test_version_is_the_packages(invoke):
    result = invoke("--version")
    assert (result.exit_code, result.stdout) == (0, f"maskwise {version('maskwise')}\n")


@pytest.mark.parametrize("command", ["doctor", "demo", "bench", "draw", "calibrate"])
def test_every_command_explains_itself(invoke, command):
    assert command in invoke("--help").stdout
    result = invoke(command, "--help")
    assert result.exit_code == 0
    assert "--json" in result.stdout
    assert "<bool>" not in result.stdout + invoke("--help").stdout


@pytest.mark.parametrize(
    "arguments",
    [["no-such-command"], ["doctor", "--no-such-option"], ["doctor", "surplus"], ["bench", "--csv"], ["draw"]],
    ids=" ".join,
)
def test_bad_arguments_end_with_code_2_and_no_traceback(invoke, arguments):
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert "Traceback" not in result.output


def test_an_interrupt_ends_with_the_code_that_shells_expect(monkeypatch, invoke):
    def interrupted(**_):
        raise KeyboardInterrupt

    monkeypatch.setattr("maskwise.cli.doctor.run", interrupted)
    result = invoke("doctor")
    assert result.exit_code == 130
    assert result.stderr == "interrupted: nothing was written\n"


def test_a_place_that_cannot_be_written_is_told_without_a_traceback(invoke, tmp_path):
    (tmp_path / "file").touch()
    result = invoke("bench", "--quick", "--filter", "4x8 bool", "--csv", str(tmp_path / "file" / "out.csv"))
    assert result.exit_code == 1
    assert "error:" in result.stderr
    assert "Traceback" not in result.output


def test_without_a_checkout_bench_says_where_the_benchmarks_are(monkeypatch, invoke, tmp_path):
    monkeypatch.setattr(commands, "ROOT", tmp_path)
    result = invoke("bench", "--filter", "sum", "--check")
    assert result.exit_code == 1
    assert result.stdout == ""
    assert "the benchmarks are in the repository, not in the installed package" in result.stderr
    assert "Hint: make bench, or python -m benchmarks --filter sum --check, in a clone of it." in result.stderr


def test_in_a_checkout_bench_runs_the_benchmarks(invoke):
    result = invoke("bench", "--list", "--filter", "startup")
    assert result.exit_code == 0
    assert "import maskwise" in " ".join(result.stdout.split())
    assert invoke("bench", "--quick", "--check").exit_code == 2


def test_training_with_every_gate_is_an_example(invoke):
    result = invoke("demo", "--train")
    assert result.exit_code == 1
    assert "Hint: python examples/train_digits.py --quick" in result.stderr
    assert invoke("demo", "--quick").exit_code == 2
