"""What is wrong with an expression, and where."""

from __future__ import annotations

from maskwise.errors import ArgumentError

__all__ = ["ExpressionError"]


class ExpressionError(ArgumentError):
    """An expression that means no mask: the message shows the place with carets below it.

    >>> print(ExpressionError("causal(4) & lenghts(2)", 12, 19, "there is no mask `lenghts`", "lengths(2)"))
    there is no mask `lenghts`
      causal(4) & lenghts(2)
                  ^^^^^^^
      Hint: lengths(2)
    """

    def __init__(self, text: str, start: int, end: int, what: str, hint: str) -> None:
        carets = " " * start + "^" * max(1, end - start)
        super().__init__("\n".join([what, f"  {text}", f"  {carets}", f"  Hint: {hint}"]))
        self.what, self.start, self.end, self.hint = what, start, end, hint
