"""What the table cannot raise, each with its reason."""

from __future__ import annotations

REASON = "becomes a reason in the refusal of mw.unpad, which has its own hint"
EXEMPT: dict[tuple[str, str], str] = {
    ("models/hugging_face/adapter.py", "HuggingFaceAdapter.install"): REASON,
    ("models/hugging_face/adapter.py", "HuggingFaceAdapter.enclose"): REASON,
    ("models/hugging_face/mixing.py", "MixingWatch.__torch_dispatch__"): REASON,
    ("models/hugging_face/mixing.py", "MixingWatch._convolution"): REASON,
    ("models/hugging_face/probe.py", "check"): REASON,
    ("models/hugging_face/probe.py", "_same_around"): REASON,
    ("models/hugging_face/probe.py", "_reference"): REASON,
    ("models/hugging_face/probe.py", "_refusing"): REASON,
    ("models/hugging_face/probe.py", "_inputs"): REASON,
    ("models/hugging_face/probe.py", "_kinds"): REASON,
    ("models/hugging_face/probe.py", "_equal"): REASON,
    ("ops/linear/linear.py", "linear"): "hands on what torch raises for arguments that pass every check",
    ("plan/calibration.py", "read"): "becomes the fault of a warning, whose hint tests/plan/test_calibration.py checks",
}
