"""Finds the engine that a command is about: `--app MODULE:ENGINE`."""

import importlib
import sys
from typing import Annotated

import typer

from raydispatch.bus.engine import DispatchEngine
from raydispatch.errors import InvalidParameter

App = Annotated[
    str,
    typer.Option(
        "--app",
        help="Where the engine is: MODULE:ENGINE, such as shop.orders:engine. Modules are found from this folder.",
        envvar="RAYDISPATCH_APP",
        metavar="MODULE:ENGINE",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]


def load_engine(app: str) -> DispatchEngine:
    """Import the module and freeze the engine in it, if it is not frozen yet."""
    module_name, separator, attribute = app.partition(":")
    if not module_name or not separator or not attribute:
        raise InvalidParameter(f"The engine must read MODULE:ENGINE, such as shop.orders:engine; not '{app}'.")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not module_name.startswith(error.name):
            raise
        raise InvalidParameter(
            f"There is no module '{error.name}' in this folder or among the installed ones."
        ) from None
    engine = getattr(module, attribute, None)
    if not isinstance(engine, DispatchEngine):
        found = "has no such name" if engine is None else f"has a {type(engine).__name__} there"
        raise InvalidParameter(f"'{app}' is no DispatchEngine: the module {found}.")
    engine.freeze()
    return engine
