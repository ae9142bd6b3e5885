"""Checkpoint folders: config.json beside model.safetensors, or beside several files and an index of them."""

import json
from pathlib import Path
from typing import Any

from bridge.models.config import MambaConfig

WEIGHTS = "model.safetensors"
INDEX = f"{WEIGHTS}.index.json"
METADATA = {"format": "pt"}  # the order of axes; `transformers` asks for it


def read_config(folder: str | Path) -> MambaConfig:
    return MambaConfig.from_transformers(json.loads(_existing(Path(folder) / "config.json").read_text()))


def write_config(folder: str | Path, config: MambaConfig) -> Path:
    """Makes the folder too. Returns where the weights go."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    (Path(folder) / INDEX).unlink(missing_ok=True)  # of an older checkpoint in several files
    (Path(folder) / "config.json").write_text(json.dumps(config.to_transformers(), indent=2) + "\n")
    return Path(folder) / WEIGHTS


def weight_files(folder: str | Path) -> list[Path]:
    """The files that hold the weights. Raises FileNotFoundError where one isn't there."""
    index = Path(folder) / INDEX
    names: Any = set(json.loads(index.read_text())["weight_map"].values()) if index.exists() else {WEIGHTS}
    return [_existing(Path(folder) / name) for name in sorted(names)]


def _existing(path: Path) -> Path:
    if not path.is_file():
        raise FileNotFoundError(f"a checkpoint is a folder with config.json and {WEIGHTS}: {path} isn't there")
    return path
