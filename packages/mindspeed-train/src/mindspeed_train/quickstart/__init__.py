"""The quickstart: a real model from a package on PyPI, taught a few facts, and asked before and after."""

from .quickstart import QUESTIONS, UNTAUGHT, quickstart

__all__ = ["QUESTIONS", "UNTAUGHT", "quickstart"]
