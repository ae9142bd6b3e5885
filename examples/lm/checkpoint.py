"""Checkpoints that either framework goes on from: weights, moments of AdamW, losses so far.

The weights lie as `transformers` reads them; moments have the weights' names and shapes.
"""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from bridge.models import MambaConfig, files

KINDS = ("weight", "first", "second")  # a parameter, and the means of its gradient and of the gradient's square
Arrays = dict[str, dict[str, np.ndarray]]  # kind -> name -> array


def save(folder: Path, config: MambaConfig, arrays: Arrays, losses: list[float]) -> None:
    weights, *moments = (arrays[kind] for kind in KINDS)
    save_file(weights, files.write_config(folder, config), metadata=files.METADATA)
    save_file(
        {f"{kind}/{name}": x for kind, m in zip(KINDS[1:], moments, strict=True) for name, x in m.items()}, folder / "adamw.safetensors"
    )
    (folder / "losses.json").write_text(json.dumps(losses))


def load(folder: Path) -> tuple[MambaConfig, Arrays, list[float]]:
    arrays: Arrays = {"weight": {}, "first": {}, "second": {}}
    for path in files.weight_files(folder):
        arrays["weight"] |= load_file(path)
    for key, x in load_file(folder / "adamw.safetensors").items():
        kind, _, name = key.partition("/")
        arrays[kind][name] = x
    return files.read_config(folder), arrays, json.loads((folder / "losses.json").read_text())
