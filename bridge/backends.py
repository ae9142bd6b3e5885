"""Which backend runs a call, and why."""

import os

from bridge.language import INTERPRETING

BACKENDS = ("triton", "interpret", "reference")


def choose(function: str, asked: str | None, gpu: bool) -> tuple[str, str]:
    """The backend for arrays on a GPU or a CPU, and the reason in words.

    An argument beats the environment variable BRIDGE_BACKEND, which beats the default. Raises ValueError where the
    backend that was asked for can't run.
    """
    if asked is not None:
        backend, reason = asked, f"backend={asked!r} was passed"
    elif environment := os.environ.get("BRIDGE_BACKEND"):
        if environment not in BACKENDS:
            raise ValueError(f"{function}: BRIDGE_BACKEND must be one of {', '.join(BACKENDS)}, got {environment!r}")
        backend, reason = environment, f"BRIDGE_BACKEND={environment} is set"
    elif gpu:
        backend, reason = "triton", "the arrays are on a GPU"
    elif INTERPRETING:
        backend, reason = "interpret", "the arrays are on a CPU and the process was started with TRITON_INTERPRET=1"
    else:
        backend, reason = "reference", "the arrays are on a CPU"
    if problem := _problem(backend, gpu):
        raise ValueError(f"{function}: backend {backend!r} ({reason}) {problem}")
    return backend, reason


def _problem(backend: str, gpu: bool) -> str | None:
    if backend == "triton" and not gpu:
        return (
            "needs arrays on a GPU: move them there, or use backend='reference', "
            "or start the process with TRITON_INTERPRET=1 and use backend='interpret'"
        )
    if backend == "triton" and INTERPRETING:
        return (
            "can't compile kernels in a process that was started with TRITON_INTERPRET=1: start it without, or move the arrays to the CPU"
        )
    if backend == "interpret" and gpu:
        return "needs arrays on the CPU: move them there, or use backend='triton'"
    if backend == "interpret" and not INTERPRETING:
        return "needs a process that was started with TRITON_INTERPRET=1 (Triton reads it when it is imported)"
    return None
