"""The native CPU core, built once per instruction set; ops/native.py picks one at run time.

Optional: without a compiler, or on another kind of processor, installation goes on and torch serves. The libraries are loaded
with ctypes and know nothing of Python, so one wheel serves every version of it.
"""

import hashlib
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

FOLDER = Path("src/outrider/ops/cpu")
SOURCES = sorted([*FOLDER.glob("*.h"), *FOLDER.glob("*.cpp")])
# which sources a library was built from, so that a stale one is noticed; see Core in ops/native.py
DIGEST = hashlib.sha256(b"".join(path.read_bytes() for path in SOURCES)).hexdigest()
FLAGS = [
    "-O3",
    "-g0",
    "-std=c++17",
    "-pthread",
    "-fvisibility=hidden",
    "-ffp-contract=off",  # products are fused where the source says so, in every loop alike
    "-fno-wrapv",  # which Python is built with: 1 to 2 % of a forward
    "-Wno-uninitialized",  # gcc 12 says so of its own vector headers
    "-Wno-maybe-uninitialized",
    f'-DOUTRIDER_SOURCES="{DIGEST}"',
]
AVX2 = ["-mavx2", "-mfma", "-mf16c"]
AVX512 = [*AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl"]
BF16 = [*AVX512, "-mavx512vnni", "-mavx512bf16"]
X86 = {"avx2": AVX2, "avx512": AVX512, "avx512bf16": BF16, "amx": [*BF16, "-mamx-tile", "-mamx-bf16", "-mamx-int8"]}
ARM = {"neon": ["-march=armv8.2-a+dotprod"], "neonbf16": ["-march=armv8.2-a+dotprod+i8mm+bf16"]}
MACHINES = {"x86_64": X86, "amd64": X86, "aarch64": ARM}
# the machine that Python says it is for: where it is told another one, the compiler in CXX builds for that
BUILDS = MACHINES.get(sysconfig.get_platform().rpartition("-")[2], {})


class BuildLibraries(build_ext):
    """Names the libraries without the version of Python."""

    def get_ext_filename(self, fullname: str) -> str:
        return str(Path(*fullname.split("."))) + ".so"


class AnyPython(bdist_wheel):
    """Marks the wheel for its platform and any version of Python."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


setup(
    cmdclass={"build_ext": BuildLibraries, "bdist_wheel": AnyPython},
    ext_modules=[
        Extension(
            f"outrider.ops.cpu._core_{name}",
            [str(FOLDER / "core.cpp")],
            depends=[str(path) for path in SOURCES],
            extra_compile_args=[*FLAGS, *flags],
            language="c++",
            optional=True,
        )
        for name, flags in BUILDS.items()
    ],
)
