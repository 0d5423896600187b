"""A demonstration: trains a small BERT, grows it, and compares ways to train the large one."""

from growkern.demo.config import FULL, MICRO, QUICK, DemoConfig
from growkern.demo.run import run_demo

__all__ = ["FULL", "MICRO", "QUICK", "DemoConfig", "run_demo"]
