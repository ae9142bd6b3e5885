"""What models are made of, whatever the framework: their sizes, and the names and shapes of their weights."""

from bridge.models.config import MambaConfig

__all__ = ["MambaConfig"]
