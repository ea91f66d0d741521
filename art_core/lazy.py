"""Names of a package that are imported when they are first used (PEP 562): a framework takes seconds to import."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from art_core.errors import MissingExtraError


def lazy_exports(package: str, homes: Mapping[str, str], *, extra: str, needs: tuple[str, ...]) -> Callable[[str], Any]:
    """The `__getattr__` of `package`.

    Args:
        homes: the module below the package in which each name is defined.
        extra: what to install when a module whose name begins with one of `needs` is missing; the error says so.
    """

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        try:
            return getattr(import_module(f"{package}.{homes[name]}"), name)
        except ModuleNotFoundError as error:
            if str(error.name).startswith(needs):
                raise MissingExtraError(package, extra) from error
            raise

    return get
