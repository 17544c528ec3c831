from importlib.metadata import version

import pytest
from typer.testing import CliRunner

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
