"""Seven folders at the top, installed as one namespace: ``comm`` becomes ``dspark.comm`` and so on."""

from setuptools import find_packages, setup

TRITON = "triton>=3.7; platform_system == 'Linux'"
FOLDERS = ("parallel", "comm", "layers", "eplb", "runtime")

package_dir = {f"dspark.{folder}": folder for folder in FOLDERS}
packages = [f"dspark.{folder}" for folder in FOLDERS]
for folder in FOLDERS:
    packages += [f"dspark.{folder}.{name}" for name in find_packages(folder)]

setup(
    name="dspark",
    version="0.1.0",
    description="Distributed inference for DeepSeek-V4-style models with DSpark speculative decoding",
    license="Apache-2.0",
    python_requires=">=3.10",
    packages=packages,
    package_dir=package_dir,
    package_data={"dspark.runtime": ["bundled/*", "bundled/*/*", "bundled/*/*/*"]},
    install_requires=["torch>=2.6", "numpy>=1.26", "safetensors>=0.4.5", "tokenizers>=0.20", "tqdm>=4.60"],
    extras_require={
        # Compiled CPU kernels. Without it the plain torch twins run instead.
        "cpu": ["numba>=0.60"],
        # CUDA builds of torch bring their own triton; this extra is for the interpreter on a CPU.
        "triton": [TRITON],
        # Only for CUDA 12 builds of torch: current PyPI builds bring NCCL for CUDA 13.
        "nccl-cu12": ["nvidia-nccl-cu12"],
        "mpi": ["mpi4py>=4.0"],
        "plot": ["matplotlib>=3.8"],
        # For scripts/fuzz_atheris.py.
        "fuzz": ["atheris>=3.0; platform_system == 'Linux'"],
        "dev": [
            "pytest>=8",
            "pytest-timeout>=2.3",
            "pytest-xdist>=3.5",
            "hypothesis>=6.100",
            "ruff>=0.6",
            "scipy>=1.11",
            "transformers==5.23.0",
            "mpi4py>=4.0",
            "mpich",
            "matplotlib>=3.8",
            "numba>=0.60",
            TRITON,
        ],
    },
    entry_points={"console_scripts": ["dspark=dspark.runtime.cli:main"]},
)
