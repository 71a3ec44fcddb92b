"""Let the kernel refuse a program what it refuses in containers: some system calls, or the files and memory of other processes.

To be called in the main thread, which alone is affected, with the threads that it starts later.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct

CALLS = {
    "x86_64": {"process_vm_readv": 310, "process_vm_writev": 311, "memfd_create": 319},
    "aarch64": {"process_vm_readv": 270, "process_vm_writev": 271, "memfd_create": 279},
}
"""The numbers of system calls."""

ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""What the kernel calls these machines (linux/audit.h)."""

POSSIBLE = platform.machine() in CALLS and os.path.exists("/proc/sys/kernel/seccomp")

LOAD_WORD, JUMP_IF_EQUAL, RETURN = 0x20, 0x15, 0x06
ALLOW, ERROR = 0x7FFF0000, 0x00050000
NUMBER_AT, ARCHITECTURE_AT = 0, 4
PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 4, 22, 38
SECCOMP_MODE_FILTER = 2
CAPABILITY_VERSION, CAP_SYS_PTRACE = 0x20080522, 19

_LIBC = ctypes.CDLL(None, use_errno=True)


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def calls(*names: str) -> None:
    """Answer some system calls with EPERM from now on; there is no way back."""
    numbers = [CALLS[platform.machine()][name] for name in names]
    instructions = [_instruction(LOAD_WORD, ARCHITECTURE_AT),
                    _instruction(JUMP_IF_EQUAL, ARCHITECTURES[platform.machine()], 0, len(numbers) + 1),
                    _instruction(LOAD_WORD, NUMBER_AT)]
    instructions += [_instruction(JUMP_IF_EQUAL, number, len(numbers) - place) for place, number in enumerate(numbers)]
    instructions += [_instruction(RETURN, ALLOW), _instruction(RETURN, ERROR | errno.EPERM)]
    program = _Program(len(instructions), b"".join(instructions))
    _prctl(PR_SET_NO_NEW_PRIVS, 1)
    _prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.addressof(program))


def _instruction(code: int, operand: int, if_true: int = 0, if_false: int = 0) -> bytes:
    """Return one instruction of a BPF program; jumps count the instructions that are left out."""
    return struct.pack("=HBBI", code, if_true, if_false, operand)


def ptrace() -> None:
    """Give up root's right to open the files and the memory of processes that hide; others do not have it."""
    header = struct.pack("=Ii", CAPABILITY_VERSION, 0)
    held = ctypes.create_string_buffer(24)               # effective, permitted, inheritable: the lower 32 bits, then the upper
    _check(_LIBC.capget(header, held))
    words = list(struct.unpack("=6I", held.raw))
    words[:2] = [word & ~(1 << CAP_SYS_PTRACE) for word in words[:2]]
    _check(_LIBC.capset(header, struct.pack("=6I", *words)))


def hide() -> None:
    """Let no process but this one open its files under /proc or reach its memory, unless it may ptrace all."""
    _prctl(PR_SET_DUMPABLE, 0)


def _prctl(option: int, *arguments: int) -> None:
    _check(_LIBC.prctl(option, *map(ctypes.c_ulong, (*arguments, 0, 0, 0, 0)[:4])))


def _check(status: int) -> None:
    if status:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
