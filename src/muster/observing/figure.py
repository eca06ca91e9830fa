"""The figures of ``plot()``: matplotlib's, which notebooks show."""

from __future__ import annotations

import io

from matplotlib.figure import Figure


class NotebookFigure(Figure):
    """A figure that a notebook shows as a picture, whether pyplot was imported or not.

    It is not made with pyplot: that would set the program's backend, and can open windows. Without
    pyplot, IPython has no picture for figures and prints ``<Figure ...>``, unless they make one
    themselves.
    """

    def _repr_png_(self) -> bytes:
        """Return the picture, for IPython.

        Its own formatters for figures, with ``%matplotlib``, come first.
        """
        file = io.BytesIO()
        self.savefig(file, format="png")
        return file.getvalue()
