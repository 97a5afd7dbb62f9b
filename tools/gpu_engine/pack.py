"""Packs vLLM's Python code for a GPU machine that has PyTorch and Triton but no vLLM and no network.

    python tools/gpu_engine/pack.py --output .carry/gpu-engine.tar.xz

The archive holds three folders for PYTHONPATH: ``vllm`` (vLLM's Python files, with stand-ins for the compiled
extensions that plain PyTorch models do not need), ``site`` (the packages in requirements.txt) and ``plugin`` (this
project's entry point). Wheels come from the configured package index and are kept in ``--cache``.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

import tomllib

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
# pip matches the number behind manylinux_2_ exactly.
PLATFORMS = [f"manylinux_2_{n}_x86_64" for n in (35, 34, 31, 28, 27, 26, 24, 17)] + [
    "manylinux2014_x86_64",
    "manylinux1_x86_64",
]
EXTENSIONS = {
    "vllm/_C_stable_libtorch.py": (HERE / "stubs/extension.py").read_text(),
    "vllm/_moe_C_stable_libtorch.py": '"""Stands for compiled MoE kernels; none is needed."""\n',
    "vllm/vllm_flash_attn/_vllm_fa3_C.py": '"""Stands for FlashAttention; none is needed."""\n',
}


def download(requirements: list[str], python: str, cache: Path) -> None:
    """Wheels of ``requirements``, and of nothing that they require, into ``cache``."""
    platforms = [argument for name in PLATFORMS for argument in ("--platform", name)]
    subprocess.run(
        [
            *(sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--no-deps"),
            *("--only-binary=:all:", "--python-version", python, "--implementation", "cp", *platforms),
            *("-d", str(cache), *requirements),
        ],
        check=True,
    )


def distribution(folder: Path, name: str, version: str, entry_points: str = "") -> None:
    """Metadata by which ``importlib.metadata`` finds ``name``."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    if entry_points:
        (info / "entry_points.txt").write_text(entry_points)


def unpack_vllm(wheel: Path, version: str, folder: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = [n for n in archive.namelist() if n.startswith("vllm/") and n.endswith(".py")]
        archive.extractall(folder, names)
    for name, text in EXTENSIONS.items():
        (folder / name).write_text(text)
    distribution(folder, "vllm", version)


def pack(version: str, python: str, cache: Path, output: Path) -> None:
    cache.mkdir(parents=True, exist_ok=True)
    lines = (HERE / "requirements.txt").read_text().splitlines()
    packages = [line for line in lines if line and not line.startswith("#")]
    download([f"vllm=={version}", *packages], python, cache)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    with tempfile.TemporaryDirectory() as name:
        tree = Path(name)
        (vllm,) = cache.glob(f"vllm-{version}-*.whl")
        unpack_vllm(vllm, version, tree / "vllm")
        for package in packages:
            stem = package.replace("==", "-").replace("-", "_").rpartition("_")
            (wheel,) = cache.glob(f"{stem[0]}-{stem[2]}-*.whl")
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(tree / "site")
        points = "".join(
            f"[{group}]\n" + "".join(f"{key} = {value}\n" for key, value in entries.items())
            for group, entries in project["entry-points"].items()
        )
        distribution(tree / "plugin", project["name"], "0", points)
        output.parent.mkdir(parents=True, exist_ok=True)
        with tarfile.open(output, "w:xz", preset=6) as archive:
            for folder in ("vllm", "site", "plugin"):
                archive.add(tree / folder, folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--vllm", default="0.33.0", metavar="VERSION")
    parser.add_argument("--python", default="3.12", metavar="VERSION", help="of the GPU machine")
    parser.add_argument("--cache", type=Path, default=ROOT / "build/gpu-engine", metavar="FOLDER")
    parser.add_argument("--output", type=Path, default=ROOT / ".carry/gpu-engine.tar.xz", metavar="FILE")
    arguments = parser.parse_args()
    pack(arguments.vllm, arguments.python, arguments.cache, arguments.output)
    print(f"{arguments.output}: {arguments.output.stat().st_size / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
