"""What the machine offers: what the processor supports, checked before torch is loaded, memory, and the user's cache folder.

Some virtual machines advertise AMX but hide the CPUID leaves that describe its tiles.
oneDNN then configures nothing and the first bf16 matrix product dies with an illegal
instruction. This module finds such a machine and keeps oneDNN away from AMX.
It imports nothing but the standard library.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

Amx = Literal["absent", "usable", "hidden"]

ISA_VARIABLES = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")
_SAFE_ISA = "AVX512_CORE_FP16"

# push rbx; mov eax,edi; mov ecx,esi; mov r8,rdx; cpuid;
# mov [r8],eax; mov [r8+4],ebx; mov [r8+8],ecx; mov [r8+12],edx; pop rbx; ret
_CPUID_CODE = bytes.fromhex("5389f889f14989d00fa24189004189580441894808418950 0c5bc3".replace(" ", ""))


@dataclass(frozen=True, slots=True)
class AmxGuard:
    """The state of the AMX trap and the action taken against it."""

    amx: Amx
    action: str
    bf16_products: bool  # may torch multiply bf16 matrices in this process?


def cpuid(leaf: int, subleaf: int = 0) -> tuple[int, int, int, int] | None:
    """EAX, EBX, ECX, EDX of a CPUID leaf, or None where it cannot be read."""
    if platform.machine() not in ("x86_64", "AMD64") or sys.platform != "linux":
        return None
    try:
        with mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC) as page:
            page.write(_CPUID_CODE)
            view = ctypes.c_char.from_buffer(page)
            call = ctypes.CFUNCTYPE(None, ctypes.c_uint32, ctypes.c_uint32, ctypes.c_void_p)(ctypes.addressof(view))
            out = (ctypes.c_uint32 * 4)()
            call(leaf, subleaf, ctypes.addressof(out))
            del view
            return out[0], out[1], out[2], out[3]
    except OSError:  # a kernel that forbids writable and executable pages
        return None


def amx_state(flags: frozenset[str], tile_leaf: tuple[int, int, int, int] | None) -> Amx:
    """Classify a processor from its /proc/cpuinfo flags and CPUID leaf 0x1D, palette 1.

    Where the leaf cannot be read at all, a machine under a hypervisor counts as hidden: without AMX it is slower, but the
    trap would kill the process.
    """
    if "amx_tile" not in flags:
        return "absent"
    if tile_leaf is None:
        return "hidden" if "hypervisor" in flags else "usable"
    return "usable" if any(tile_leaf) else "hidden"


def memory_bytes(cgroups: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")) -> int:
    """Memory that this process may take: the machine's, or less where a container's limit (cgroup v1 or v2) says so."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for line in _lines(membership):
        controllers, _, path = line.partition(":")[2].partition(":")
        if controllers in ("", "memory"):
            root, name = (cgroups / "memory", "memory.limit_in_bytes") if controllers else (cgroups, "memory.max")
            place = root / path.lstrip("/")
            limits += [int(text) for above in (place, *place.parents) for text in _lines(above / name) if text.isdigit()]
    return min(limits)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        return []


def _cpuinfo(*names: str) -> str:
    """The value of the first entry of /proc/cpuinfo whose name begins with one of these; empty where there is none."""
    entries = [line for line in _lines(Path("/proc/cpuinfo")) if line.startswith(names)]
    return entries[0].partition(":")[2].strip() if entries else ""


@lru_cache(maxsize=1)
def cpu_flags() -> frozenset[str]:
    """The processor's feature flags as the kernel names them."""
    if platform.machine() == "aarch64" and sys.platform == "linux":
        return arm_flags(ctypes.CDLL(None).getauxval)
    return frozenset(_cpuinfo("flags", "Features").split())


_HWCAP, _HWCAP2 = 16, 26  # entries of the auxiliary vector
_ARM_FLAGS = {"asimddp": (_HWCAP, 20), "i8mm": (_HWCAP2, 13), "bf16": (_HWCAP2, 14)}


def arm_flags(entry: Callable[[int], int]) -> frozenset[str]:
    """The flags of an ARM processor that matter here, by entries of the auxiliary vector that the kernel gives every process."""
    return frozenset(name for name, (number, bit) in _ARM_FLAGS.items() if entry(number) >> bit & 1)


@lru_cache(maxsize=1)
def cpu_name() -> str:
    """The processor's model name."""
    return _cpuinfo("model name") or platform.processor() or platform.machine()


def cache_folder() -> Path:
    """Where what was measured or built is kept. A user without a home keeps none: the folder is one that cannot be made."""
    for name, below in (("OUTRIDER_CACHE", ""), ("XDG_CACHE_HOME", "outrider")):
        if folder := os.environ.get(name):
            return Path(folder) / below
    try:
        return Path.home() / ".cache" / "outrider"
    except RuntimeError:  # HOME is not set, and the user is in no list
        return Path(os.devnull) / "outrider"


@lru_cache(maxsize=1)
def guard() -> AmxGuard:
    """Avoid the AMX trap in this process; called once when the package is imported."""
    flags = cpu_flags()
    amx = amx_state(flags, cpuid(0x1D, 1) if "amx_tile" in flags else None)
    if amx != "hidden":
        return AmxGuard(amx, "nothing to do", True)
    return _avoid(torch_was_first="torch" in sys.modules)


def _avoid(torch_was_first: bool) -> AmxGuard:
    for name in ISA_VARIABLES:
        if name in os.environ:
            return AmxGuard("hidden", f"{name}={os.environ[name]} was set by the user", True)
    # os.environ writes through to the C environment, and oneDNN reads it at its first product.
    os.environ[ISA_VARIABLES[0]] = _SAFE_ISA
    action = f"set {ISA_VARIABLES[0]}={_SAFE_ISA}"
    if not torch_was_first or _product_survives():
        return AmxGuard("hidden", action, True)
    return AmxGuard("hidden", action + " too late (torch was in use); bf16 products run in float32", False)


def _product_survives(timeout_s: float = 20.0) -> bool:
    """Try a bf16 product in a child, so that an illegal instruction kills only the child."""
    import time

    pid = os.fork()
    if pid == 0:
        try:
            _probe()
        finally:
            os._exit(0)
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status) == 0
        time.sleep(0.01)
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    return False


def _probe() -> None:
    import torch

    torch.set_num_threads(1)
    a = torch.ones(16, 64, dtype=torch.bfloat16)
    torch.nn.functional.linear(a, a)
