"""The whole of growkern on this machine, on text that is already there, in minutes."""

from growkern.demo.config import FULL, MICRO, QUICK, DemoConfig
from growkern.demo.run import run_demo

__all__ = ["FULL", "MICRO", "QUICK", "DemoConfig", "run_demo"]
