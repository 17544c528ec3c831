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


@pytest.mark.parametrize("command", ["doctor", "demo", "bench"])
def test_every_command_explains_itself(invoke, command):
    assert command in invoke("--help").stdout
    result = invoke(command, "--help")
    assert result.exit_code == 0
    assert "--json" in result.stdout


@pytest.mark.parametrize(
    "arguments",
    [["no-such-command"], ["doctor", "--no-such-option"], ["doctor", "surplus"], ["bench", "--csv"]],
    ids=" ".join,
)
def test_bad_arguments_end_with_code_2_and_no_traceback(invoke, arguments):
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert "Traceback" not in result.output
