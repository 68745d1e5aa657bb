"""Archives to be read."""

from __future__ import annotations

import gzip
import io
import lzma
import stat
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from msa_vendored.vendoring.archives import open_archive

FILES = {"pkg/a.py": b"a = 1\n", "pkg/sub/b.cu": b"\r\n\xff\n", "pkg/empty": b""}


def write_zip(path: Path, members: list[tuple[str, bytes]], mode: int = stat.S_IFREG | 0o644) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as target:
        for name, data in members:
            info = zipfile.ZipInfo(name)
            info.external_attr = mode << 16
            info.compress_type = zipfile.ZIP_DEFLATED
            target.writestr(info, data)
    return path


def make_tar(members: list[tuple[str, bytes, bytes]]) -> bytes:
    """Members are name, type and bytes."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as target:
        for name, kind, data in members:
            info = tarfile.TarInfo(name)
            info.type, info.linkname, info.size = kind, "pkg/a.py", len(data)
            target.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def write_archive(path: Path, files: dict[str, bytes]) -> Path:
    if path.suffix in (".whl", ".zip"):
        return write_zip(path, list(files.items()))
    compress: dict[str, Callable[[bytes], bytes]] = {".gz": gzip.compress, ".tgz": gzip.compress, ".xz": lzma.compress}
    data = make_tar([(name, tarfile.REGTYPE, data) for name, data in files.items()])
    path.write_bytes(compress.get(path.suffix, bytes)(data))
    return path


def read_all(path: Path) -> dict[str, bytes]:
    with open_archive(path) as archive:
        return dict(archive.read(list(archive.sizes)))
