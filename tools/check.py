"""Everything that must hold before tests are worth running: style, types, layers, docs.

    python tools/check.py            all checks, a line each; the output of those that failed
    python tools/check.py ruff types the named ones

Exit status 0 only if every check passed.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
PYTEST = ("pytest", "-q", "--no-header", "-p", "no:cacheprovider")
CHECKS: dict[str, tuple[str, ...]] = {
    "format": ("ruff", "format", "--check", "."),
    "ruff": ("ruff", "check", "."),
    "types": ("mypy",),
    "layers": (*PYTEST, "tests/test_layers.py"),
    "exports": (*PYTEST, "tests/test_exports.py"),
    "docs": (*PYTEST, "tests/test_docs.py", "-m", "not model"),
}


def run(name: str) -> bool:
    """Run one check; print its verdict, and its output if it failed."""
    started = time.perf_counter()
    command = [sys.executable, "-m", *CHECKS[name]]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=False)
    verdict = "ok" if done.returncode == 0 else "FAILED"
    print(f"{name:<8} {verdict:<6} {time.perf_counter() - started:5.1f} s", flush=True)
    if done.returncode != 0:
        print(f"$ {' '.join(CHECKS[name])}\n{done.stdout}{done.stderr}", flush=True)
    return done.returncode == 0


def main(argv: list[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description="Style, types, layers, docs: what must hold before tests.")
    parser.add_argument("checks", nargs="*", metavar="CHECK", help=f"some of: {', '.join(CHECKS)}")
    chosen = parser.parse_args(argv).checks or list(CHECKS)
    if unknown := [name for name in chosen if name not in CHECKS]:
        parser.error(f"no check {unknown[0]!r}; there are {', '.join(CHECKS)}")
    failed = [name for name in chosen if not run(name)]
    if failed:
        print(f"failed: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
