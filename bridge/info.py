"""Versions, devices, and which backend will run here and why."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from bridge.backends import choose
from bridge.frontend import MODULES, installed, load
from bridge.language import INTERPRETING


def gather() -> dict[str, Any]:
    """All of it, ready for JSON."""
    found: dict[str, Any] = {
        "python": platform.python_version(),
        "kernel-bridge": _version("kernel-bridge"),
        "triton": _version("triton"),
        "numpy": _version("numpy"),
        "interpreting": INTERPRETING,
        "environment": {name: os.environ[name] for name in ("TRITON_INTERPRET", "BRIDGE_BACKEND") if name in os.environ},
        "frontends": {},
    }
    for name in MODULES:
        found["frontends"][name] = _frontend(name) if name in installed() else {"problem": f"{name} is not installed"}
    return found


def _frontend(name: str) -> dict[str, Any]:
    try:
        frontend = load(name)
    except ImportError as error:
        return {"problem": str(error)}
    described: dict[str, Any] = {"versions": frontend.versions(), "devices": frontend.devices()}
    try:
        described["backend"], described["reason"] = choose("info", None, frontend.gpu)
    except ValueError as error:
        described["problem"] = str(error)
    return described


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"
