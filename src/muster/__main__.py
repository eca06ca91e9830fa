"""``python -m muster`` is the ``muster`` command; so is ``torchrun -m muster``."""

import sys

from muster.cli.main import main

sys.exit(main())
