"""Puts the simulated Ascend in place when torch_npu is imported, in whatever process that is."""

import ctypes
import importlib.util
import os
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

FOLDER = "FAKE_CANN_BUILD"  # names the folder that build.py wrote
LIBRARIES = (
    "libascendcl.so",
    "libacl_op_compiler.so",
    "libhccl.so",
    "libge_runner.so",
    "libgraph.so",
    "libacl_tdt_channel.so",
)


class _Finder(MetaPathFinder):
    """Finds torch_npu as it would be found, with a loader that prepares for it."""

    _asking = False

    def find_spec(self, name, path=None, target=None):
        if name != "torch_npu" or self._asking:
            return None
        self._asking = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._asking = False
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(Loader):
    def __init__(self, real: Loader) -> None:
        self._real = real

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._real.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        folder = Path(os.environ[FOLDER])
        importlib.import_module("torch")
        for name in (*LIBRARIES, "libopapi.so"):
            ctypes.CDLL(str(folder / name), ctypes.RTLD_GLOBAL)
        library = kernels()
        library.fake_cann_before_import()
        self._real.exec_module(module)
        library.fake_cann_after_import()
        library.fake_cann_install()

    def __getattr__(self, name: str) -> object:
        return getattr(self._real, name)


def install() -> None:
    """Have the next import of torch_npu, in this process, find the simulated Ascend."""
    if "torch_npu" not in sys.modules and not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def kernels() -> ctypes.CDLL:
    """The library of kernels, loaded."""
    return ctypes.CDLL(str(Path(os.environ[FOLDER]) / "kernels.so"))
