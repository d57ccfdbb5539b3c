"""Print what has to be installed before the native build: pyproject.toml's lists, plus missing build tools.

`make` installs these first, so that the long native build can run in the foreground with its own
progress, instead of hidden behind pip; installing the project afterwards takes a second.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))


def requirements() -> list[str]:
    """Build requirements, dependencies, the extras server and dev; CMake and ninja unless the system's do."""
    from tools.libllama.toolchain import missing_requirements

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wanted = [
        *project["build-system"]["requires"],
        "editables",  # what hatchling asks for in an editable install
        *project["project"]["dependencies"],
        *project["project"]["optional-dependencies"]["server"],
        *project["project"]["optional-dependencies"]["dev"],
        *missing_requirements(),
    ]
    return list(dict.fromkeys(wanted))


if __name__ == "__main__":
    print("\n".join(requirements()))
