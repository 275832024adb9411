"""Runs of regard without torch: `regard_native.load("runs/g2p").generate(["hello"], beam=5)`."""

__version__ = "0.16.1"

from regard_native.core import NativeError
from regard_native.run import Hypothesis, Run, load

__all__ = ["Hypothesis", "NativeError", "Run", "load"]
