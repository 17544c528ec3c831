import json
import sys

import pytest
import torch
from typer.testing import CliRunner

from maskwise.cli import doctor
from maskwise.cli.app import app
from maskwise.ops import backends
from maskwise.ops.backends import ExtensionStatus

LOADED = ExtensionStatus(path="/x/_C.abi3.so", loaded=True, error=None, simd="avx2", fix="")
BROKEN = ExtensionStatus(path="/x/_C.abi3.so", loaded=False, error="undefined symbol", simd="none", fix="rebuild it")
NO_AVX2 = ExtensionStatus(path=None, loaded=False, error="this CPU has no AVX2", simd="none", fix="")
ABSENT = ExtensionStatus(path=None, loaded=False, error=None, simd="none", fix="install with torch")


@pytest.fixture
def examined(monkeypatch):
    def run(status, *arguments):
        monkeypatch.setattr(backends, "status", lambda: status)
        return CliRunner().invoke(app, ["doctor", *arguments])

    return run


def test_json_holds_what_a_bug_report_needs(examined):
    report = json.loads(examined(LOADED, "--json").stdout)
    assert set(report) == {
        "maskwise", "torch", "numpy", "triton", "python", "executable", "os", "cpu", "compiler", "extension",
        "threads", "devices", "calibration",
    }  # fmt: skip
    assert report["torch"] == torch.__version__
    assert report["threads"]["intraop"] == torch.get_num_threads()
    assert report["devices"][0] == "cpu"
    assert report["extension"] == {
        "path": "/x/_C.abi3.so", "loaded": True, "error": None, "simd": "avx2", "fix": "",
    }  # fmt: skip


def test_a_loaded_extension_is_shown_with_its_simd_level(examined):
    result = examined(LOADED)
    assert result.exit_code == 0
    assert "loaded, SIMD avx2" in result.stdout


def test_an_extension_that_does_not_load_is_shown_with_error_and_fix_and_code_1(examined):
    result = examined(BROKEN)
    assert result.exit_code == 1
    assert "undefined symbol" in result.stdout
    assert "fix: rebuild it" in result.stdout


def test_a_pure_install_is_healthy_and_shows_the_fix(examined):
    result = examined(ABSENT)
    assert result.exit_code == 0
    assert "not built" in result.stdout
    assert "fix: install with torch" in result.stdout


def test_a_cpu_without_avx2_is_healthy_and_shows_why_no_kernel_runs(examined):
    result = examined(NO_AVX2)
    assert result.exit_code == 0
    assert "this CPU has no AVX2" in result.stdout
    assert "fix:" not in result.stdout


def test_no_compiler_is_no_error(monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    assert doctor.examine()["compiler"] is None


def test_a_torch_that_cannot_be_imported_is_reported_and_is_no_traceback(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 1
    assert "it cannot be imported: import of torch halted" in result.stdout
    assert "fix: pip install torch" in result.stdout
    report = json.loads(CliRunner().invoke(app, ["doctor", "--json"]).stdout)
    assert (report["torch"], report["extension"]) == (torch.__version__, None)
