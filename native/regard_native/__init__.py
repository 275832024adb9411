"""Runs of regard without torch: `regard_native.load("runs/g2p").generate(["hello"], beam=5)`."""

__version__ = "0.17.0"

from regard_native.core import NativeError
from regard_native.hypothesis import Alignment, Hypothesis, Scored
from regard_native.options import Options
from regard_native.run import Run, load

__all__ = ["Alignment", "Hypothesis", "NativeError", "Options", "Run", "Scored", "load"]
