"""The package around the libraries of build_tools/native.py; everything else stands in pyproject.toml."""

import shutil
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build import build
from setuptools.command.build_ext import build_ext
from setuptools.command.dist_info import dist_info
from setuptools.command.sdist import sdist

sys.path.insert(0, str(Path(__file__).resolve().parent))

from build_tools import native, toolchain  # noqa: E402


class Build(build):
    def run(self):
        shutil.rmtree(self.build_lib, ignore_errors=True)  # or files that are gone by now would get into the wheel
        super().run()


class BuildExt(build_ext):
    """Both libraries by ninja: into the wheel's folder, or beside the Python files for an in-place build."""

    def run(self):
        native.build(Path(self.get_ext_fullpath("gqa_attn._C")).parent)

    def get_outputs(self):
        folder = Path(self.get_ext_fullpath("gqa_attn._C")).parent
        return [str(folder / name) for name in (native.LIBRARY, native.MODULE)]


class DistInfo(dist_info):
    """pip asks for metadata first, before it fetches dependencies: the moment to stop an isolated build."""

    def run(self):
        toolchain.require_build_packages()
        super().run()


class Sdist(sdist):
    def run(self):
        native.generate()
        super().run()


setup(
    ext_modules=[Extension("gqa_attn._C", sources=[])],
    cmdclass={"build": Build, "build_ext": BuildExt, "dist_info": DistInfo, "sdist": Sdist},
)
