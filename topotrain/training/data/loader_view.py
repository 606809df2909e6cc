"""An object in the place of a loader, with the loader's attributes."""

from typing import Any


class LoaderView:
    """Has the attributes of the loader, but for those of its own class."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        # Not set yet: this object is being copied or unpickled.
        if name == "_loader":
            raise AttributeError(name)
        return getattr(self._loader, name)
