"""``python -m benchmarks``, from the root of the repository."""

from benchmarks.command import app

if __name__ == "__main__":
    app(prog_name="python -m benchmarks")
