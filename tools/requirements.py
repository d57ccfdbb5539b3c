"""Print what `make` has to install, from pyproject.toml's lists.

    python tools/requirements.py          before the native build: what it and erllama need; build tools
    python tools/requirements.py --dev    what tests and checks need besides

`make` installs these first, so that the long native build can run in the foreground with its own
progress, instead of hidden behind pip; installing the project afterwards takes a second.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))


def requirements() -> list[str]:
    """Build requirements, dependencies and the extra server; CMake and ninja unless the system's do."""
    from tools.libllama.toolchain import missing_requirements

    project = _project()
    wanted = [
        *project["build-system"]["requires"],
        "editables",  # what hatchling asks for in an editable install
        *project["project"]["dependencies"],
        *project["project"]["optional-dependencies"]["server"],
        *missing_requirements(),
    ]
    return list(dict.fromkeys(wanted))


def dev_requirements() -> list[str]:
    """The extra dev."""
    return list(_project()["project"]["optional-dependencies"]["dev"])


def _project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


if __name__ == "__main__":
    print("\n".join(dev_requirements() if sys.argv[1:] == ["--dev"] else requirements()))
