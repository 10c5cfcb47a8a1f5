"""Compiles the CPU kernels into a wheel, where there is a C++ compiler; all else is in pyproject.toml."""

import os
import runpy
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py


class BuildKernels(build_py):
    """Makes the variants beside the modules. Where that does not work, one is compiled when it is first needed."""

    def run(self):
        """Run the command; a variant that does not compile is left out."""
        super().run()
        if self.editable_mode:
            return
        folder = Path(self.build_lib, "sakiyomi", "kernels")
        kernels = runpy.run_path(str(folder / "variants.py"))
        prebuilt = folder / kernels["PREBUILT"].name
        shutil.rmtree(prebuilt, ignore_errors=True)  # of a build before
        cxx = kernels["compiler"]()
        if cxx is None or not kernels["distributed"]():
            return
        prebuilt.mkdir()

        def make(variant):
            try:
                kernels["make"](variant, cxx, prebuilt / variant)
            except OSError as error:
                self.warn(f"the kernels for {variant} are left out: {error}")

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(make, kernels["VARIANTS"]))


class PlatformWheel(bdist_wheel):
    """A wheel that has kernels in it is for this kind of machine, and for every Python."""

    def get_tag(self):
        """Of what lies in the folder that becomes the wheel."""
        tag = super().get_tag()
        prebuilt = any(Path(self.bdist_dir).glob("sakiyomi/kernels/prebuilt/*.so"))
        self.root_is_pure = not prebuilt
        return ("py3", "none", self.plat_name.replace("-", "_")) if prebuilt else tag


setup(cmdclass={"build_py": BuildKernels, "bdist_wheel": PlatformWheel})
