"""The version of this package, and the versions of others that it was tested with."""

from importlib.metadata import PackageNotFoundError, version

from packaging.specifiers import SpecifierSet

__version__ = "0.1.0"


def require(name: str, range: str, cure: str) -> None:
    """Raise ImportError where an installed distribution is outside the tested range. One that is missing is no problem."""
    try:
        found = version(name)
    except PackageNotFoundError:
        return
    if not SpecifierSet(range).contains(found, prereleases=True):
        raise ImportError(f"kernel-bridge {__version__} works with {name} {range}, and {found} is installed: {cure}")
