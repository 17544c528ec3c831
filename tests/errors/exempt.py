"""What the table cannot raise, each with its reason."""

from __future__ import annotations

REASON = "becomes a reason in the refusal of mw.unpad, which has its own hint"
EXEMPT: dict[tuple[str, str], str] = {
    ("models/hugging_face/adapter.py", "HuggingFaceAdapter.install"): REASON,
    ("models/hugging_face/adapter.py", "HuggingFaceAdapter.enclose"): REASON,
    ("models/hugging_face/adapter.py", "_check_stacks"): REASON,
    ("models/hugging_face/generation.py", "_class.PackedCache._state"): REASON,
    ("models/hugging_face/tokenwise.py", "TokenwiseAdapter.install"): REASON,
    ("models/audit/rewrites.py", "attending"): "becomes the note of a rewrite that is left out of a report",
    ("distributed/accumulate.py", "Window._verify"): "needs several ranks, which tests/distributed has",
    ("distributed/accumulate.py", "Window._raise_own"): "hands on what counting has raised",
    ("nn/rewire.py", "Rewire._check_ranks"): "takes several ranks, and tests/nn/test_across_ranks.py has them",
    ("ops/linear/linear.py", "linear"): "hands on what torch raises for arguments that pass every check",
    ("ops/gpu/replay.py", "_fact"): "is caught where it is called: such a call is not replayed",
    ("plan/calibration.py", "read"): "becomes the fault of a warning, whose hint tests/plan/test_calibration.py checks",
}
