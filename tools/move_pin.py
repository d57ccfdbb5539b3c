"""Move the pin: python tools/move_pin.py VERSION

Downloads that version of the archive, says what it changes in the C API that we use, writes
vendor/llama.cpp/pin.toml, builds, and runs the tests. With --report it stops after saying.
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import sys
import tarfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tools.libllama import tree  # noqa: E402  # the path comes first
from tools.libllama.api_diff import compare_api, used_names  # noqa: E402
from tools.libllama.binding import cdef_headers  # noqa: E402
from tools.libllama.errors import BuildError  # noqa: E402
from tools.libllama.fetch import fetch  # noqa: E402
from tools.libllama.folders import disk_errors  # noqa: E402
from tools.libllama.pin import PIN_FILE, Pin, read_pin  # noqa: E402
from tools.libllama.progress import Progress  # noqa: E402
from tools.libllama.source import archive_members, remove_sources  # noqa: E402

_WAY_BACK = "Go back with: git checkout vendor/llama.cpp/pin.toml && python build_libllama.py --clean"
_HEADERS = ("include/", "ggml/include/", "src/llama-ext.h")


def new_pin(version: str, old: Pin, progress: Progress) -> Pin:
    """Download a version's archive into the cache and work out its pin.

    Raises: BuildError if the index does not have it or it holds no llama.cpp tree.
    """
    archive = f"{old.package.replace('-', '_')}-{version}.tar.gz"
    asked = Pin(**{**old.as_dict(), "version": version, "archive": archive, "sha256": "", "tree": ""})
    path = fetch(asked, progress)
    progress.step(f"Reading {archive}")
    digests = {name: hashlib.sha256(data).hexdigest() for name, data, _ in archive_members(path, asked)}
    if "include/llama.h" not in digests:
        raise BuildError(f"{archive} holds no llama.cpp under {old.subtree}.")
    found = {
        "sha256": tree.file_digest(path),
        "tree": tree.tree_digest(digests),
        "commit": _commit(path, asked),
    }
    return Pin(**{**asked.as_dict(), **found})


def headers_of(pin: Pin, progress: Progress) -> str:
    """All C headers of a pinned archive that we declare from, joined."""
    members = archive_members(fetch(pin, progress), pin)
    return "\n".join(
        data.decode() for path, data, _ in members if path.startswith(_HEADERS) and path.endswith(".h")
    )


def _commit(archive: Path, pin: Pin) -> str:
    """Upstream's commit, which the archive's own git folder tells if it was packed with it."""
    stem = archive.name.removesuffix(".tar.gz")
    with tarfile.open(archive) as bundle:
        try:
            head = bundle.extractfile(f"{stem}/.git/modules/{pin.subtree}/HEAD")
        except KeyError:
            return "unknown"
        return head.read().decode().strip() if head else "unknown"


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("version", metavar="VERSION", help="of the package named in pin.toml")
    parser.add_argument("--report", action="store_true", help="only say what would change")
    options = parser.parse_args(arguments)
    progress = Progress()
    try:
        with disk_errors("Moving the pin", ROOT):
            old = read_pin()
            pin = new_pin(options.version, old, progress)
            progress.step("Comparing the declarations that we use")
            names = used_names(cdef_headers())
            diff = compare_api(names, headers_of(old, progress), headers_of(pin, progress))
            print(pin.to_toml())
            print(diff.describe())
            if options.report:
                return 0
            remove_sources(progress)
            PIN_FILE.write_text(pin.to_toml())
    except BuildError as error:
        print(error.render(), file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("Interrupted; the pin is where it was.", file=sys.stderr)
        return 130
    return build_and_test()


def build_and_test() -> int:
    """Build from the moved pin and run all tests; returns the exit code, and says how to go back."""
    for command in (["build_libllama.py"], ["-m", "pytest"]):
        try:
            code = subprocess.run([sys.executable, *command], cwd=ROOT, check=False).returncode
        except KeyboardInterrupt:
            code = 130
        if code != 0:
            how = "was interrupted" if code == 130 else "failed"
            print(f"The pin is moved, but this {how}: {' '.join(command)}", file=sys.stderr)
            print(_WAY_BACK, file=sys.stderr)
            return code
    print("The pin is moved, the build runs, the tests pass. Read the report above, then commit pin.toml.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
