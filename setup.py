"""The native CPU core, built once per instruction set; ops/native.py picks one at run time.

Optional: without a compiler, or on another kind of processor, installation goes on and torch serves.
"""

import platform
from pathlib import Path

from setuptools import Extension, setup

FOLDER = Path("src/outrider/ops/cpu")
# -ffp-contract=off: products are fused where the source says so, in every loop alike
FLAGS = ["-O2", "-std=c++17", "-ffp-contract=off", "-fvisibility=hidden", "-pthread", "-Wno-uninitialized", "-Wno-maybe-uninitialized"]
AVX2 = ["-mavx2", "-mfma"]
AVX512 = [*AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl"]
BUILDS = {"avx2": AVX2, "avx512": AVX512, "avx512bf16": [*AVX512, "-mavx512vnni", "-mavx512bf16"]}

setup(
    ext_modules=[
        Extension(
            f"outrider.ops.cpu._core_{name}",
            [str(FOLDER / "core.cpp")],
            depends=[str(header) for header in sorted(FOLDER.glob("*.h"))],
            extra_compile_args=[*FLAGS, *flags],
            language="c++",
            optional=True,
        )
        for name, flags in BUILDS.items()
        if platform.machine() in ("x86_64", "AMD64")
    ]
)
