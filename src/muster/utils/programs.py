"""Programs of Muster in processes of their own."""

from __future__ import annotations

import os
import sys


def program(module: str, *arguments: str) -> list[str]:
    """Return the command that calls ``main(arguments)`` of a module, with the import path of this
    process.
    """
    code = "import os, sys; sys.path[:] = sys.argv.pop(1).split(os.pathsep); "
    code += f"from {module} import main; main(sys.argv[1:])"
    return [sys.executable, "-c", code, os.pathsep.join(sys.path), *arguments]
