"""The source tree that is built: unpacked from the pinned archive, or the user's own, and verified.

Rule 1: an unpack in progress is marked by a file; the mark goes away only after the manifest is
written. A tree with the mark is thrown away and unpacked again, so half a tree never gets built.
Rule 2: a tree without the mark is never changed by us: if it differs from the pin, the build stops
and names the files, because somebody may have put work into them. One foreign file is such a tree.
Rule 3: who reads the vendored tree (to verify it, to compile it) holds its lock shared, who changes it
holds it alone.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import tarfile
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tools.libllama import tree
from tools.libllama.errors import BuildError
from tools.libllama.fetch import downloads_dir, fetch
from tools.libllama.folders import disk_errors, locked, require_space
from tools.libllama.pin import VENDOR, Pin

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tools.libllama.progress import Progress

_TREE_ROOM_BYTES = 250 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A tree to build. `digest` names its content; `pinned` says whether it is the pin's.

    `files` is path → SHA-256 of a tree that may change between two builds; empty for the pin's.
    """

    root: Path
    digest: str
    pinned: bool
    files: dict[str, str] = field(default_factory=dict)

    def is_unchanged(self) -> bool:
        """Whether the tree still is what it was when its digest was taken."""
        return self.pinned or tree.scan(self.root) == self.files


def user_source(root: Path) -> Source:
    """A tree that the user names; whatever it holds is taken, and recorded by its digest.

    Raises: BuildError if it is no llama.cpp tree.
    """
    root = root.expanduser().absolute()
    if not (root / "CMakeLists.txt").is_file() or not (root / "include" / "llama.h").is_file():
        raise BuildError(
            f"{root} holds no llama.cpp sources.",
            advice="--source takes the folder in which llama.cpp's CMakeLists.txt and include/ lie.",
        )
    files = tree.scan(root)
    return Source(root=root, digest=tree.tree_digest(files), pinned=False, files=files)


def is_unpacked(vendor: Path = VENDOR) -> bool:
    """Whether a tree lies in the vendor folder that no unpack is at work on."""
    return any(tree.iter_files(vendor)) and not (vendor / tree.UNPACKING_NAME).exists()


def pinned_source(pin: Pin, progress: Progress, *, vendor: Path = VENDOR) -> Source:
    """The pinned tree in the vendor folder: unpacked if it is not there, and verified file by file.

    Raises: BuildError if a file differs from the pin (named), or the archive cannot be had.
    """
    found = Source(root=vendor, digest=pin.tree, pinned=True)
    lock = vendor / tree.LOCK_NAME
    with disk_errors("Unpacking the sources", vendor):
        with locked(lock, waiting=progress.note, shared=True):
            if is_unpacked(vendor):
                verify(pin, vendor=vendor)
                return found
        with locked(lock, waiting=progress.note):
            if is_unpacked(vendor):  # by another build that was faster
                verify(pin, vendor=vendor)
            else:
                unpack(fetch(pin, progress), pin, progress, vendor=vendor)
    return found


@contextlib.contextmanager
def in_use(source: Source, progress: Progress) -> Iterator[None]:
    """Keep other builds from removing a tree while it is compiled. A user's own tree has no lock.

    Raises: BuildError if that has happened already.
    """
    if not source.pinned:
        yield
        return
    with locked(source.root / tree.LOCK_NAME, waiting=progress.note, shared=True):
        if not is_unpacked(source.root):
            raise BuildError(
                f"Another build has removed the sources in {source.root}.",
                advice="Run the same command again.",
            )
        yield


def remove_sources(progress: Progress, *, vendor: Path = VENDOR) -> None:
    """`remove_tree`, once nobody reads the tree any more."""
    with (
        disk_errors("Removing the sources", vendor),
        locked(vendor / tree.LOCK_NAME, waiting=progress.note),
    ):
        remove_tree(vendor)


def verify(pin: Pin, *, vendor: Path = VENDOR) -> None:
    """Check every file of the vendor folder against the pin.

    Raises: BuildError naming the files that differ.
    """
    found = tree.scan(vendor)
    if tree.tree_digest(found) == pin.tree:
        _write_manifest(vendor, found)
        return
    expected = _expected(pin, vendor)
    if expected is None:
        which = "which files, only the archive could tell, and it is not in the cache"
    else:
        which = tree.compare(expected, found).describe()
    raise BuildError(
        f"The sources in {vendor} are not those of the pin ({which}).",
        advice=(
            "Undo the change, or start over with: python build_libllama.py --clean. "
            "To build a changed llama.cpp on purpose, keep it elsewhere and name it: --source DIR"
        ),
    )


def unpack(archive: Path, pin: Pin, progress: Progress, *, vendor: Path = VENDOR) -> None:
    """Replace what is in the vendor folder by the archive's tree.

    Raises: BuildError if the archive's tree is not the pin's; the vendor folder is empty then.
    """
    progress.step(f"Unpacking {archive.name}")
    require_space(vendor, _TREE_ROOM_BYTES, "the sources")
    vendor.mkdir(parents=True, exist_ok=True)
    (vendor / tree.UNPACKING_NAME).touch()
    remove_tree(vendor)
    digests: dict[str, str] = {}
    for n_done, (path, data, executable) in enumerate(archive_members(archive, pin), start=1):
        target = vendor / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
        if executable:
            target.chmod(0o755)
        digests[path] = hashlib.sha256(data).hexdigest()
        if n_done % 100 == 0:
            progress.update(f"{n_done} files")
    if tree.tree_digest(digests) != pin.tree:
        remove_tree(vendor)
        raise BuildError(
            f"The tree inside {archive.name} is not the one that the pin names.",
            advice="pin.toml was changed by hand; restore it, or move the pin with tools/move_pin.py.",
        )
    _write_manifest(vendor, digests)
    (vendor / tree.UNPACKING_NAME).unlink()


def archive_digests(archive: Path, pin: Pin) -> dict[str, str]:
    """Path → SHA-256 of the tree inside an archive, without unpacking it."""
    return {path: hashlib.sha256(data).hexdigest() for path, data, _ in archive_members(archive, pin)}


def remove_tree(vendor: Path = VENDOR) -> None:
    """Empty the vendor folder of everything but our own files and the mark of an unpack."""
    keep = {*tree.OURS, tree.UNPACKING_NAME, tree.LOCK_NAME}
    for entry in list(vendor.iterdir()) if vendor.is_dir() else []:
        if entry.name not in keep:
            shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()


def archive_members(archive: Path, pin: Pin) -> Iterator[tuple[str, bytes, bool]]:
    """The files of the archive's subtree: relative path, content, whether executable."""
    prefix = f"{archive.name.removesuffix('.tar.gz')}/{pin.subtree}/"
    try:
        with tarfile.open(archive) as bundle:
            for member in bundle:
                path = member.name.removeprefix(prefix)
                if path == member.name or not member.isfile() or not tree.is_source(path):
                    continue
                if ".." in path.split("/"):
                    raise BuildError(f"{archive.name} holds a path that leads out of it: {member.name}.")
                file = bundle.extractfile(member)
                assert file is not None  # isfile() was true
                yield path, file.read(), bool(member.mode & 0o100)
    except (tarfile.TarError, EOFError, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise BuildError(f"{archive} cannot be read: {error}.", advice="Delete it and run again.") from error


def _expected(pin: Pin, vendor: Path) -> dict[str, str] | None:
    """What the pin's tree holds, file by file: from the stored manifest, else from the cached archive."""
    stored = vendor / tree.MANIFEST_NAME
    if stored.is_file():
        digests = tree.parse_manifest(stored.read_text(errors="replace"))
        if tree.tree_digest(digests) == pin.tree:
            return digests
    archive = downloads_dir() / pin.archive
    if archive.is_file() and tree.file_digest(archive) == pin.sha256:
        return archive_digests(archive, pin)
    return None


def _write_manifest(vendor: Path, digests: dict[str, str]) -> None:
    target = vendor / tree.MANIFEST_NAME
    text = tree.manifest_text(digests)
    if target.is_file() and target.read_text(errors="replace") == text:
        return
    partial = target.with_name(f"{tree.MANIFEST_NAME}.{os.getpid()}")
    partial.write_text(text)
    partial.replace(target)
