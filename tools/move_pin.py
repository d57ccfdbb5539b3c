"""Move the pin: python tools/move_pin.py VERSION

Downloads that version of the archive, says what it changes in the C API that we use, writes
vendor/llama.cpp/pin.toml, builds, and runs the tests of the binding. With --report it stops after saying.
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tools.libllama import tree  # noqa: E402  # the path comes first
from tools.libllama.api_diff import compare_api, used_names  # noqa: E402
from tools.libllama.binding import cdef_headers  # noqa: E402
from tools.libllama.errors import BuildError  # noqa: E402
from tools.libllama.fetch import download, downloads_dir, fetch  # noqa: E402
from tools.libllama.pin import PIN_FILE, Pin, read_pin  # noqa: E402
from tools.libllama.progress import Progress  # noqa: E402
from tools.libllama.source import archive_members, remove_tree  # noqa: E402

_HEADERS = ("include/", "ggml/include/", "src/llama-ext.h")


def new_pin(version: str, old: Pin, progress: Progress) -> Pin:
    """Download a version's archive into the cache and work out its pin.

    Raises: BuildError if the index does not have it or it holds no llama.cpp tree.
    """
    archive = f"{old.package.replace('-', '_')}-{version}.tar.gz"
    asked = Pin(**{**old.as_dict(), "version": version, "archive": archive, "sha256": "", "tree": ""})
    progress.step(f"Fetching {old.package} {version}")
    downloads_dir().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=downloads_dir(), prefix=".download-") as folder:
        path = download(asked, Path(folder), progress).replace(downloads_dir() / archive)
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


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("version", metavar="VERSION", help="of the package named in pin.toml")
    parser.add_argument("--report", action="store_true", help="only say what would change")
    options = parser.parse_args()
    progress = Progress()
    try:
        old = read_pin()
        pin = new_pin(options.version, old, progress)
        diff = compare_api(used_names(cdef_headers()), headers_of(old, progress), headers_of(pin, progress))
    except BuildError as error:
        print(error.render(), file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("Interrupted; the pin is where it was.", file=sys.stderr)
        return 130
    print(pin.to_toml())
    print(diff.describe())
    if options.report:
        return 0
    remove_tree()
    PIN_FILE.write_text(pin.to_toml())
    return _build_and_test()


def _build_and_test() -> int:
    for command in (["build_libllama.py"], ["-m", "pytest", "tests/llama", "tests/build"]):
        code = subprocess.run([sys.executable, *command], cwd=ROOT, check=False).returncode
        if code != 0:
            print(f"The pin is moved, but this failed: {' '.join(command)}", file=sys.stderr)
            print(
                "Go back with: git checkout vendor/llama.cpp/pin.toml && python build_libllama.py --clean",
                file=sys.stderr,
            )
            return code
    print("The pin is moved, the build runs, the tests pass. Read the report above, then commit pin.toml.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
