"""Which llama.cpp we build: the pin file, and where the project's folders are."""

from __future__ import annotations

import tomllib
from dataclasses import asdict, dataclass
from pathlib import Path

from tools.libllama.errors import BuildError

ROOT = Path(__file__).resolve().parents[2]
VENDOR = ROOT / "vendor" / "llama.cpp"
PIN_FILE = VENDOR / "pin.toml"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pin:
    """One exact state of the upstream sources.

    `package` and `version` name what the package index is asked for, `archive` the file it must
    answer with, `sha256` that file's digest. `subtree` is the folder inside the archive that we
    unpack, `tree` the digest of what is unpacked (see `tree.py`), `commit` upstream's own name for it.
    """

    package: str
    version: str
    archive: str
    sha256: str
    subtree: str
    tree: str
    commit: str

    def as_dict(self) -> dict[str, str]:
        """The pin as it is stored in build.json, for reading at run time."""
        return asdict(self)

    def to_toml(self) -> str:
        """The text of a pin file that reads back as this pin."""
        lines = [
            "# The llama.cpp sources that erllama is built from and tested with.",
            "# Move it with: python tools/move_pin.py VERSION",
        ]
        lines += [f'{key} = "{value}"' for key, value in self.as_dict().items()]
        return "\n".join(lines) + "\n"


def read_pin(path: Path = PIN_FILE) -> Pin:
    """Read a pin file.

    Raises: BuildError if the file is missing, is no TOML, or has other keys than a pin has.
    """
    try:
        data = tomllib.loads(path.read_text())
        return Pin(**data)
    except FileNotFoundError:
        raise BuildError(
            f"The pin file {path} is missing.", advice="Restore it from the repository."
        ) from None
    except (tomllib.TOMLDecodeError, TypeError) as error:
        raise BuildError(
            f"The pin file {path} cannot be read: {error}.", advice="Restore it from the repository."
        ) from None
